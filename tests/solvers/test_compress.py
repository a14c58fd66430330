"""Which values may be held in fewer bytes, and are plans that do so what they promise?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import punar
from punar.ir import Op, Trace
from punar.ir.trace import check
from punar.plan import simulate
from punar.plan.codecs import BLOCK, CODECS, ITEM_BYTES, LOSSY, OPTIONS, Codec, channel_name, codec_of, codecs_of
from punar.plan.moves import GRAIN, Channel
from punar.solvers import solve
from punar.solvers.auto import frontier_of
from punar.solvers.compress import codable, coded, first_bytes
from punar.solvers.offload import bound_with, movings
from punar.solvers.without import without


def channels_of(trace: Trace, options: Iterable[str], bytes_per_s: int = 1 << 33) -> tuple[Channel, ...]:
    """The channels of all codecs that a trace has values for, at one speed."""
    return tuple(channel_of(*known, bytes_per_s) for name in codable(trace, options) if (known := codec_of(name)) is not None)


def channel_of(codec: Codec, dtype: str, bytes_per_s: int) -> Channel:
    return Channel(
        name=channel_name(codec, dtype),
        capacity_bytes=1 << 50,
        write_bytes_per_s=bytes_per_s,
        read_bytes_per_s=bytes_per_s,
        latency_ns=1000,
        block_bytes=codec.elements * ITEM_BYTES[dtype],
        block_kept=codec.kept,
        scratch_bytes=1 << 16,
    )


def trace_of(forward: nn.Module, x: Tensor) -> Trace:
    """A step's trace with times that depend on nothing but sizes: products are dear."""
    trace = punar.profile(forward, x, lambda model, batch: model(batch).float().square().mean()).trace
    return replace(trace, ops=tuple(replace(op, time_ns=time_of(trace, op)) for op in trace.ops), meta={**trace.meta, "gap_ns": "0"})


def time_of(trace: Trace, op: Op) -> int:
    size = sum(trace.storages[trace.values[v].storage].bytes for v in op.outputs)
    return 1000 + size * (20 if "mm" in op.name else 1) // 4


def layers() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.Dropout(0.1)) for _ in range(6))
    )


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_of(layers(), torch.randn(1024, 64))


@pytest.mark.parametrize("options", [("mask",), ("mask", "int8"), OPTIONS])
@pytest.mark.parametrize("bytes_per_s", [1 << 28, 1 << 33])
def test_the_trace_without_the_coded_values_says_the_same(trace: Trace, options: tuple[str, ...], bytes_per_s: int) -> None:
    channels = channels_of(trace, options, bytes_per_s)
    sets = set(movings(trace, channels))
    assert len(sets) > 1
    for moves in sets:
        other = without(trace, moves, channels)
        check(other)
        mine = simulate(trace, (0,) * len(trace.values), moves=moves, channels=channels)
        theirs = simulate(other, (0,) * len(other.values))
        assert mine.peak_bytes == theirs.peak_bytes
        assert mine.coding_ns == sum(
            channels[m.tier].write_ns(size(trace, m.value)) + channels[m.tier].read_ns(size(trace, m.value)) for m in moves
        )
        assert mine.coded_bytes == sum(size(trace, move.value) for move in moves)


def size(trace: Trace, value: int) -> int:
    return trace.storages[trace.values[value].storage].bytes


@pytest.mark.parametrize("options", [("mask",), OPTIONS])
def test_never_slower_never_below_the_bound_and_less_memory(trace: Trace, options: tuple[str, ...]) -> None:
    channels = channels_of(trace, options)
    alone, both = frontier_of(trace), frontier_of(trace, channels)
    for point in alone.points:
        assert both.at(point.peak_bytes).time_ns <= point.time_ns
    for point in both.points:
        assert bound_with(trace, channels, point.peak_bytes) <= point.time_ns
    middle = (alone.points[0].peak_bytes + alone.points[-1].peak_bytes) // 2
    plan = both.at(middle)
    assert plan.moves
    assert plan.time_ns < alone.at(middle).time_ns
    seen = plan.judged(trace)
    assert (seen.peak_bytes, seen.time_ns, seen.coding_ns) == (plan.peak_bytes, plan.time_ns, plan.coding_ns)


def test_rounding_reaches_less_than_what_is_exact(trace: Trace) -> None:
    exact, rounded = frontier_of(trace, channels_of(trace, ("mask",))), frontier_of(trace, channels_of(trace, ("mask", "int4")))
    budget = exact.sensible().points[0].peak_bytes
    assert rounded.at(budget).time_ns < exact.at(budget).time_ns


def test_what_is_first_has_so_many_bytes(trace: Trace) -> None:
    channels = channels_of(trace, OPTIONS)
    moves = coded(trace, channels, CODECS)
    whole = sum(size(trace, move.value) for move in moves)
    for part in (0.0, 0.3, 1.0):
        taken = first_bytes(trace, moves, part)
        assert taken == moves[: len(taken)]
        assert sum(size(trace, move.value) for move in taken) <= part * whole
    assert first_bytes(trace, moves, 1.0) == moves


def test_kept_bytes_are_whole_units() -> None:
    channel = channel_of(CODECS["int8"], "float32", 1 << 30)
    assert channel.is_codec
    assert channel.kept(4 * BLOCK) == GRAIN
    assert channel.kept(4 * BLOCK * 100) == -(-100 * (BLOCK + 8) // GRAIN) * GRAIN


# -- which values --------------------------------------------------------------------------------------------------------


class Custom(nn.Module):
    """Runs a function between two linear layers."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(64, 128), nn.Linear(128, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))  # type: ignore[operator]


def ways(function: object, *options: str) -> dict[str, int]:
    """How many values each channel could take in a step that applies a function."""
    found = codable(
        punar.profile(Custom(function), torch.randn(1024, 64), lambda model, batch: model(batch).square().mean()).trace, options
    )
    return {name: len(values) for name, values in found.items()}


def test_noise_of_two_values_is_bits() -> None:
    assert ways(F.dropout, "mask") == {"bits/float32": 1}
    assert ways(lambda x: x * torch.empty_like(x).bernoulli_(0.3), "mask") == {"bits/float32": 1}


def test_noise_of_many_values_is_not() -> None:
    assert ways(lambda x: x * torch.rand_like(x), "mask") == {}
    assert ways(lambda x: x * (torch.empty_like(x).bernoulli_(0.3) + x.detach()), "mask") == {}


def test_truth_values_are_bits() -> None:
    assert ways(lambda x: torch.where(x > 0, x, x.tanh() * 0.1), "mask") == {"bits/bool": 1}


def test_whole_numbers_are_halved() -> None:
    assert ways(lambda x: x.gather(1, x.detach().argsort(1)), "mask") == {"int32/int64": 1}


def test_a_sign_is_enough_for_relu_alone() -> None:
    assert ways(lambda x: x.relu() + 1.0, "mask") == {"sign/float32": 1}
    assert ways(lambda x: F.relu_(x * 2.0) + 1.0, "mask") == {"sign/float32": 1}
    assert ways(lambda x: x.relu(), "mask") == {}  # the last layer's product needs it
    assert ways(lambda x: x.relu() * 2.0 * x.relu().sin(), "mask") == {"sign/float32": 1}  # the first one


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: x.exp(), 1),  # of which the last layer's product, as in all of these, reads what it is given
        (lambda x: x.exp() + 1.0, 2),
        (lambda x: x.abs().sqrt() + 1.0, 1),  # divides by twice its result
        (lambda x: F.leaky_relu(x) + 1.0, 1),
        (lambda x: 1.0 / (x.square() + 1.0) + 1.0, 1),
        (lambda x: x.square().log1p() + 1.0, 1),
        (lambda x: F.gelu(x) + 1.0, 2),
    ],
)
def test_what_divides_or_decides_is_not_rounded(function: object, count: int) -> None:
    assert ways(function, "int8") == {"int8/float32": count}


def test_an_accelerator_is_not_waited_for() -> None:
    trace = punar.profile(layers(), torch.randn(256, 64), lambda model, batch: model(batch).square().mean()).trace
    assert set(codable(trace, ("mask",))) == {"bits/float32"}
    assert set(codable(replace(trace, device="cuda:0"), ("mask",))) == set()


def test_options() -> None:
    assert set(OPTIONS) == {"mask", *LOSSY}
    assert [codec.name for codec in codecs_of(["mask"])] == ["bits", "sign", "int32"]
    assert all(codec.is_exact == (codec.option == "mask") for codec in CODECS.values())
    assert codec_of("bits/float32") == (CODECS["bits"], "float32")
    assert codec_of("disk") is codec_of("bits/int8") is codec_of("fp8/float32") is None


def test_small_values_are_left(trace: Trace) -> None:
    small = trace_of(layers(), torch.randn(8, 64))
    assert codable(small, OPTIONS) == {}
    assert codable(small, OPTIONS, 0).keys() == codable(trace, OPTIONS).keys()
    assert solve(small, 1 << 40, channels=channels_of(small, OPTIONS)).channels == ()
