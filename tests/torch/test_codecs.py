"""Does what codecs hold in fewer bytes come back as promised, and does a step that uses them compute what the plain step does, in the memory that was predicted?"""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import punar
from punar.errors import UsageError, VerificationError
from punar.ir import Trace
from punar.plan import Plan, make_plan
from punar.plan.codecs import BLOCK, CODECS, ITEM_BYTES, OPTIONS, channel_name, codec_of
from punar.plan.moves import Channel, Move
from punar.solvers.compress import codable, coded
from punar.solvers.movable import movable
from punar.torch import codecs
from punar.torch.codecs import measured
from tests.torch.harness import Outcome, RandomRemat, assert_nothing_lives, last_peaks, no_garbage_collection, outcomes, train
from tests.torch.models import plain_step, stepping
from tests.torch.programs import Instruction, Program, programs
from tests.torch.test_offload import EXAMPLES, random_move
from tests.torch.test_random_programs import generator_state, maker, plain

CPU = torch.device("cpu")

SIZES = st.sampled_from([1, 7, 8, 9, BLOCK - 1, BLOCK, BLOCK + 1, 1000, codecs.CHUNK, codecs.CHUNK + 3, 2 * codecs.CHUNK + BLOCK + 5])

EXTREMES = {
    "float16": [0.0, -0.0, 1.5, -2.0, math.inf, -math.inf, math.nan, 6e-8, 65504.0],
    "float32": [0.0, -0.0, 1.5, -2.0, math.inf, -math.inf, math.nan, 1e-45, 3.4e38, 1e-38],
}


def through(name: str, flat: Tensor) -> Tensor | None:
    """What comes back of a flat tensor; None where the codec refuses it."""
    coder = codecs.coder_of(CODECS[name])
    channel = measured(CODECS[name], str(flat.dtype).removeprefix("torch."), CPU)
    data = torch.full((channel.kept(flat.nbytes),), 170, dtype=torch.uint8)
    seen = coder.encode(flat, data)
    if seen is None:
        return None
    back = torch.empty_like(flat)
    coder.decode(data, back, seen)
    return back


def same_bytes(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def two_valued(dtype: str, size: int, ends: tuple[float, float], seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.tensor(ends, dtype=torch.float64).to(getattr(torch, dtype))[(torch.rand(size, generator=draw) > 0.3).long()]


# -- codecs --------------------------------------------------------------------------------------------------------------


@given(
    dtype=st.sampled_from(CODECS["bits"].dtypes),
    size=SIZES,
    ends=st.tuples(st.sampled_from(EXTREMES["float32"]), st.sampled_from(EXTREMES["float32"])),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_two_values_come_back_as_they_were(dtype: str, size: int, ends: tuple[float, float], seed: int) -> None:
    flat = two_valued(dtype, size, ends, seed)
    back = through("bits", flat)
    assert back is not None
    assert same_bytes(flat, back)


@given(dtype=st.sampled_from(CODECS["bits"].dtypes[1:]), size=SIZES.filter(lambda size: size > 2), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_third_value_is_refused_wherever_it_is(dtype: str, size: int, seed: int) -> None:
    flat = two_valued(dtype, size, (0.0, 1.25), seed)
    flat[:2] = torch.tensor([0.0, 1.25])
    flat[random.Random(seed).randrange(2, size)] = 0.5
    assert through("bits", flat) is None


@given(size=SIZES, seed=st.integers(0, 99), outside=st.sampled_from([None, 1 << 31, -(1 << 31) - 1, 1 << 62]))
@settings(max_examples=40, deadline=None)
def test_whole_numbers_of_32_bits(size: int, seed: int, outside: int | None) -> None:
    draw = torch.Generator().manual_seed(seed)
    flat = torch.randint(-(1 << 31), 1 << 31, (size,), generator=draw)
    if outside is None:
        back = through("int32", flat)
        assert back is not None
        assert torch.equal(back, flat)
    else:
        flat[-1] = outside
        assert through("int32", flat) is None


@given(dtype=st.sampled_from(CODECS["sign"].dtypes), size=SIZES, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_relu_lets_the_same_gradients_through(dtype: str, size: int, seed: int) -> None:
    kind = getattr(torch, dtype)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=draw).to(kind)
    extremes = torch.tensor(EXTREMES["float16"]).to(kind)
    x[: len(extremes)] = extremes[:size]
    result, gradient = x.relu(), torch.randn(size, generator=draw).to(kind)
    back = through("sign", result)
    assert back is not None
    expected = torch.ops.aten.threshold_backward(gradient, result, 0)
    assert same_bytes(torch.ops.aten.threshold_backward(gradient, back, 0), expected)


def scaled(dtype: str, size: int, scale: float, shift: float, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=draw) * scale + shift).to(getattr(torch, dtype))


@given(size=SIZES, scale=st.sampled_from([1e-40, 1e-30, 1.0, 1e30]), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_sixteen_bits_keep_seven_of_the_fraction(size: int, scale: float, seed: int) -> None:
    flat = scaled("float32", size, scale, 0.0, seed)
    back = through("bf16", flat)
    assert back is not None
    error = (back.double() - flat.double()).abs()
    assert bool((error <= (flat.double().abs() * 2**-7).clamp(min=2**-133)).all())


def test_sixteen_bits_keep_what_is_not_finite_and_make_nothing_so() -> None:
    flat = torch.tensor(EXTREMES["float32"] * 50)
    back = through("bf16", flat)
    assert back is not None
    assert torch.equal(back.isnan(), flat.isnan())
    assert torch.equal(back.isinf(), flat.isinf())
    assert torch.equal(back.signbit()[~flat.isnan()], flat.signbit()[~flat.isnan()])


@given(
    name=st.sampled_from(["int8", "int4"]),
    dtype=st.sampled_from(CODECS["int8"].dtypes),
    size=SIZES,
    scale=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    shift=st.sampled_from([0.0, -50.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_levels_are_as_near_as_promised(name: str, dtype: str, size: int, scale: float, shift: float, seed: int) -> None:
    flat = scaled(dtype, size, scale, shift, seed)
    back = through(name, flat)
    assert back is not None
    parts = {"int8": 250, "int4": 14}[name]
    precision = torch.finfo(flat.dtype).eps * (scale * 6 + abs(shift))
    for part, other in zip(flat.double().split(BLOCK), back.double().split(BLOCK), strict=True):
        assert float((part - other).abs().max()) <= float(part.max() - part.min()) / parts + precision


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_rounding_is_right_on_average(name: str) -> None:
    flat = scaled("float32", 4 * BLOCK, 1.0, 0.0, 0)
    coder = codecs.coder_of(CODECS[name])
    data, back, total = torch.empty(1 << 14, dtype=torch.uint8), torch.empty_like(flat), torch.zeros_like(flat, dtype=torch.float64)
    rounds = 400
    for _ in range(rounds):
        seen = coder.encode(flat, data)
        coder.decode(data, back, seen)
        total += back
    step = {"bf16": 2**-7 * float(flat.abs().max()), "int8": 8 / 255, "int4": 8 / 15}[name]
    assert float((total / rounds - flat).abs().max()) < 5 * step / math.sqrt(rounds) / 2
    assert not torch.equal(back, flat)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_levels_refuse_what_is_not_finite(name: str) -> None:
    flat = torch.randn(3 * BLOCK)
    flat[-1] = math.nan
    assert through(name, flat) is None
    flat[-1] = math.inf
    assert through(name, flat) is None


@given(size=st.integers(1, 300), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_an_accelerator_packs_bits_like_the_cpu(size: int, seed: int) -> None:
    truth = torch.rand(size, generator=torch.Generator().manual_seed(seed)) > 0.4
    ours, theirs = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    codecs.pack_by_octets(truth, ours)
    codecs.pack_by_words(truth, theirs)
    assert torch.equal(ours, theirs)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        back = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
        codecs.unpack_by_octets(ours, back[0], 3, 120)
        codecs.unpack_by_words(ours, back[1], 3, 120)
        assert torch.equal(back[0], back[1])
        assert torch.equal(back[0] == 120, truth)


@pytest.mark.parametrize(("name", "dtype"), [(codec.name, dtype) for codec in CODECS.values() for dtype in codec.dtypes])
def test_coding_needs_no_more_scratch_than_it_says(name: str, dtype: str) -> None:
    codec = CODECS[name]
    channel = measured(codec, dtype, CPU)
    flat = (torch.arange(5 * codecs.CHUNK + 3) % 2).to(getattr(torch, dtype))
    coder = codecs.coder_of(codec)
    data, back = torch.empty(channel.kept(flat.nbytes), dtype=torch.uint8), torch.empty_like(flat)
    seen: list[Any] = []
    coder.encode(flat, data)  # what is made once: a table of random numbers
    assert highest(lambda: seen.append(coder.encode(flat, data))) <= channel.scratch(flat.nbytes)
    assert highest(lambda: coder.decode(data, back, seen[0])) <= channel.scratch(flat.nbytes)
    small = flat[: max(1, 4096 // flat.element_size())].clone()
    assert highest(lambda: seen.append(coder.encode(small, data))) <= channel.scratch(small.nbytes)
    assert highest(lambda: coder.decode(data, back[: len(small)], seen[1])) <= channel.scratch(small.nbytes)


def highest(run: Callable[[], object]) -> int:
    """The most bytes that torch and numpy together had made, and not let go of, while something ran; each counted at its own highest."""
    tracemalloc.start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        run()
        numpy_bytes = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    live = most = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most + numpy_bytes


# -- steps ---------------------------------------------------------------------------------------------------------------


class RandomCodecs(RandomRemat):
    """Obeys a random plan that also holds some of the values in fewer bytes that can be, from and until random times; ``forced``: by ``bits`` others too."""

    def __init__(self, seed: int, hold: float, *, compress: tuple[str, ...] = ("mask",), share: float = 0.7, forced: float = 0.0) -> None:
        super().__init__(seed, hold)
        self.ways, self.share, self.forced = compress, share, forced

    def _make_plan(self, trace: Trace, *_: int) -> Plan:
        plan = super()._make_plan(trace)
        draw = random.Random(self.seed)
        ways: dict[int, str] = {}
        for name, values in codable(trace, self.ways, 0).items():
            ways.update((v, name) for v in values if draw.random() < self.share)
        for v in movable(trace, 0):
            dtype = trace.storages[trace.values[v].storage].dtype
            if draw.random() < self.forced and dtype in CODECS["bits"].dtypes:
                ways[v] = channel_name(CODECS["bits"], dtype)
        names = sorted(set(ways.values()))
        channels = tuple(channel_named(name) for name in names)
        hold, moves = list(plan.hold_from), []
        for v, name in sorted(ways.items()):
            if (move := random_move(trace, v, draw)) is not None:
                moves.append(Move(value=v, land=move.land, fetch=move.fetch, tier=names.index(name)))
                hold[v] = 0
        return make_plan(trace, hold, solver="random", budget_bytes=0, moves=moves, channels=channels)


def channel_named(name: str) -> Channel:
    known = codec_of(name)
    assert known is not None
    return measured(*known, CPU)


coded_in: list[int] = []


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@example(
    program=Program((Instruction("add", 0, 0, 0), Instruction("branch", 0, 0, 0))), seed=1, hold=0.0, forced=0.0
)  # replays from a sign
@given(
    program=programs(),
    seed=st.integers(0, 1 << 16),
    hold=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    forced=st.sampled_from([0.0, 0.4]),
)
def test_random_programs_compute_the_same(program: Program, seed: int, hold: float, forced: float) -> None:
    expected = plain(program)
    remat = RandomCodecs(seed, hold, forced=forced)
    found = train(maker(program), steps=len(expected), remat=remat, extra=generator_state)
    coded_in.append(sum(stats.coded_bytes for stats in remat.stats))
    assert [wanted.differences(got) for wanted, got in zip(expected, found, strict=True)] == [[]] * len(expected)


def test_much_was_coded() -> None:
    """The test above would say nothing if plans coded nothing."""
    if coded_in:
        assert sum(size > 0 for size in coded_in) > len(coded_in) // 5, coded_in


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs(is_straight=True), seed=st.integers(0, 1 << 16), hold=st.sampled_from([0.0, 0.3, 0.7, 1.0]), is_lossy=st.booleans())
def test_random_programs_take_the_predicted_bytes(program: Program, seed: int, hold: float, is_lossy: bool) -> None:
    names = [instruction.name for instruction in program.instructions]
    assume("dirty" not in names)  # what custom functions mark as written shows a version that no operator made, and is kept
    try:
        train(maker(program), steps=1)
    except RuntimeError:
        assume(False)
    remat = RandomCodecs(seed, hold, compress=OPTIONS if is_lossy else ("mask",))
    predicted, measured = last_peaks(maker(program), remat, keeps_graphs=program.replaces_what_outlives_a_step)
    stats = remat.stats[-1]
    assume(not stats.unmoved_values)  # numbers that are not finite have no levels
    assert stats.plan is not None
    note(f"predicted {predicted} B, measured {measured} B, {len(stats.plan.moves)} moves")
    assert 0 <= predicted - measured <= program.outliving_bytes
    if not program.outliving_bytes:
        assert stats.coded_bytes == stats.plan.coded_bytes


def block(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 4 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * width, width), nn.LayerNorm(width), nn.Dropout(0.2)
    )


def make_dropping() -> nn.Module:
    return nn.Sequential(*(block() for _ in range(6)))


dropping = stepping(plain_step, make_dropping, rows=512)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def all_coded(profile: punar.Profile, *ways: str) -> Plan:
    """Holds everything, in fewer bytes whatever can be."""
    trace = profile.trace
    channels = tuple(channel_named(name) for name in codable(trace, ways))
    moves = coded(trace, channels, CODECS)
    hold = [0] * len(trace.values)
    return make_plan(trace, hold, solver="all", budget_bytes=0, moves=moves, channels=channels)


def test_masks_as_bits_in_a_whole_training() -> None:
    expected = train(dropping, steps=5)
    with no_garbage_collection():
        remat = punar.Remat(plan=all_coded(punar.profile(make_dropping(), torch.randn(512, 32), mean_square), "mask"))
        found = train(dropping, steps=5, remat=remat)
        assert_nothing_lives(remat)
    assert [wanted.differences(got) for wanted, got in zip(expected, found, strict=True)] == [[]] * 5
    last = remat.stats[-1]
    assert last.plan is not None
    assert not last.plan.leaves_device
    assert {last.plan.channels[move.tier].name for move in last.plan.moves} == {"bits/float32", "sign/float32"}
    assert remat.stats[2].measured_peak_bytes == last.plan.peak_bytes
    assert last.coded_bytes == last.plan.coded_bytes > 0
    assert "compressed" in str(remat.report())
    assert punar.Remat(plan=Plan.from_json(last.plan.to_json())).plan == last.plan


def test_never_slower_than_without() -> None:
    profile = punar.profile(make_dropping(), torch.randn(512, 32), mean_square)
    alone, both = punar.frontier(profile, compress=()), punar.frontier(profile)
    assert not any(point.plan.moves for point in alone.points)
    for point in alone.points:
        assert punar.solve(profile, budget=point.peak_bytes).time_ns <= point.time_ns
    assert both.points[0].peak_bytes <= alone.points[0].peak_bytes


class Relus(nn.Module):
    """What ReLU made is saved once more by the sum's square, or not."""

    def __init__(self, *, is_saved_again: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.is_saved_again = is_saved_again

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            high = layer(x).relu()
            x = x + high
            total = total + (high.square().mean() if self.is_saved_again else high.mean())
        return total + x.square().mean()


def backward_of_loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    loss.backward()
    return loss


@pytest.mark.parametrize("is_saved_again", [False, True])
def test_the_sign_of_relu_is_all_that_is_kept(is_saved_again: bool) -> None:
    make = stepping(backward_of_loss, lambda: Relus(is_saved_again=is_saved_again), rows=512, width=64)
    expected = train(make, steps=3)
    remat = RandomCodecs(1, 1.0, share=1.0)
    found = train(make, steps=3, remat=remat)
    assert [wanted.differences(got) for wanted, got in zip(expected, found, strict=True)] == [[]] * 3
    plan = remat.stats[-1].plan
    assert plan is not None
    names = [plan.channels[move.tier].name for move in plan.moves]
    assert names == ([] if is_saved_again else ["sign/float32"] * 4)
    assert remat.stats[-1].measured_peak_bytes == plan.peak_bytes


def test_a_value_that_is_saved_once_more_than_was_traced_is_whole() -> None:
    """Its sign would not do for what saves it later."""
    calls = 0

    def step(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        high = model(x).relu()
        calls += 1
        loss = high.mean() if calls != 3 else (high * high).mean()
        loss.backward()
        return loss

    model, x = nn.Linear(64, 64), torch.randn(512, 64)
    expected = outcomes(step, model, x, steps=5)
    calls = 0
    found = outcomes(step, model, x, steps=5, remat=RandomCodecs(1, 1.0, share=1.0))
    assert [wanted.differences(got) for wanted, got in zip(expected, found, strict=True)] == [[]] * 5


def test_elements_that_do_not_fit_are_kept() -> None:
    """A plan says they have two values, and from the third step on they have more."""

    def run(remat: punar.Remat | None = None) -> list[Outcome]:
        torch.manual_seed(0)
        calls = iter(range(9))

        def step(model: nn.Module, x: Tensor) -> Tensor:
            noise = torch.empty(256, 128).bernoulli_(0.5)
            noise.mul_(torch.linspace(0.5, 1.0, 256)[:, None] if next(calls) > 2 else 1.0)
            loss = (model(x) * noise).square().mean()
            loss.backward()
            return loss

        return outcomes(step, nn.Linear(64, 128), torch.randn(256, 64), steps=6, remat=remat)

    remat = RandomCodecs(2, 0.5, forced=1.0)
    assert [wanted.differences(got) for wanted, got in zip(run(), run(remat), strict=True)] == [[]] * 6
    assert [stats.unmoved_values > 0 for stats in remat.stats[-2:]] == [True, True]


def test_as_many_elements_as_a_batch_chooses() -> None:
    """Experts get other numbers of tokens in each step than in the one that was traced."""
    least = 0.0

    def loss_of_chosen(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, nn.Sequential)
        return mean_square(model[1:], model[0](x)[(x[:, 0] > least).nonzero()[:, 0]])

    def step(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal least
        loss = loss_of_chosen(model, x)
        loss.backward()
        least += 0.2
        return loss

    def run(remat: punar.Remat | None = None) -> list[Outcome]:
        nonlocal least
        least = 0.0
        torch.manual_seed(0)
        return outcomes(step, make_dropping(), torch.randn(512, 32), steps=5, remat=remat)

    plan = all_coded(punar.profile(make_dropping(), torch.randn(512, 32), loss_of_chosen), "mask")
    expected = run()
    remat = punar.Remat(plan=replace(plan, budget_bytes=1 << 40))
    assert [wanted.differences(got) for wanted, got in zip(expected, run(remat), strict=True)] == [[]] * 5
    coded = [stats.coded_bytes for stats in remat.stats[1:]]
    assert coded == sorted(set(coded), reverse=True)
    assert coded[-1] > (128 + 128 + 32) * 4 * 512  # what the first block, which sees all rows, has


# -- asking for it -------------------------------------------------------------------------------------------------------


def smooth() -> tuple[nn.Module, Tensor, Callable[[nn.Module, Tensor], Tensor]]:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(6))
    return nn.Sequential(*layers), torch.randn(512, 64), lambda model, batch: model(batch)[:, :9].square().mean()


@pytest.mark.parametrize(("way", "most"), [("bf16", 0.01), ("int8", 0.03), ("int4", 0.3)])
def test_verify_tells_the_error_of_a_lossy_plan(way: str, most: float) -> None:
    step = smooth()
    plan = all_coded(punar.profile(*step), "mask", way)
    found = punar.verify(*step, plan=plan)
    assert found.plan.lossy_codecs == (way,)
    assert not found.is_identical
    assert found.is_as_promised
    assert 0 < found.gradient_error < most
    assert found.gradient_errors.keys() == dict(step[0].named_parameters()).keys()
    assert f"rounded as asked ({way})" in str(found)
    found.raise_if_different()
    assert 0 <= found.plan.peak_bytes - found.measured_peak_bytes <= 4  # the loss of the profiled step
    assert found.to_dict()["gradient_error"] == found.gradient_error
    wrong = replace(found, differences=("loss", *found.differences))
    assert not wrong.is_as_promised
    with pytest.raises(VerificationError):
        wrong.raise_if_different()


def test_rounding_is_only_done_where_it_is_asked_for() -> None:
    profile = punar.profile(*smooth())
    assert not punar.solve(profile, budget="min").lossy_codecs
    assert punar.Remat(budget=0.5).compress == ("mask",)
    assert punar.Remat(budget=0.5, compress=None).compress == ()
    assert punar.Remat(budget=0.5, compress="int8").compress == ("int8",)


@pytest.mark.parametrize("asked", ["int3", ["mask", "fp8"], 3, [4]])
def test_nonsense(asked: Any) -> None:
    with pytest.raises(UsageError, match="asked to compress by"):
        punar.Remat(budget="min", compress=asked)


def test_a_plan_whose_channel_is_no_codec_of_its_name_is_refused() -> None:
    plan = all_coded(punar.profile(make_dropping(), torch.randn(512, 32), mean_square), "mask")
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    for wrong in (text.replace("bits/float32", "tape"), text.replace("bits/float32", "bits/int32")):
        with pytest.raises(punar.errors.PlanError):
            Plan.from_json(wrong)


def test_every_dtype_of_a_codec_has_a_size() -> None:
    for codec in CODECS.values():
        for dtype in codec.dtypes:
            assert ITEM_BYTES[dtype] == getattr(torch, dtype).itemsize


def test_verify_says_where_nothing_is_rounded() -> None:
    model, batch, loss_fn = smooth()
    found = punar.verify(model, batch, loss_fn, budget=1.0, compress=("mask", "int4", "int8"))
    assert found.not_used == ("int8", "int4")
    assert found.is_identical
    assert "nothing is rounded: int8, int4 would not pay" in str(found)
