"""Does a step whose activations go to pinned memory and come back compute what the plain step does, whenever the copies run?

There is no GPU here: CPU tensors stand for a device's, and a fake of its streams runs each copy when that would hurt most.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import punar
from punar.arguments import check_offload
from punar.errors import HostMemoryFull, UsageError
from punar.plan.moves import Channel
from punar.torch import places
from punar.torch.host import LEAST_PIECE, HostCopy, HostTier, PinnedBlock, PinnedPool, measured, pieces_of
from punar.torch.offload import MoveCount, Offload
from punar.torch.places import Place
from punar.torch.streams import CudaStreams
from tests.torch.fake_streams import MODES, FakeStreams, Mode
from tests.torch.harness import Outcome, assert_nothing_lives, last_peaks, no_garbage_collection, train
from tests.torch.models import second_order, stepping
from tests.torch.programs import Program, programs
from tests.torch.test_offload import RandomOffload, make_narrow, narrow, wide
from tests.torch.test_random_programs import generator_state, maker, plain

EXAMPLES = int(os.environ.get("PUNAR_EXAMPLES", "60"))

PCIE = Channel(name="cpu", capacity_bytes=1 << 40, write_bytes_per_s=12 << 30, read_bytes_per_s=12 << 30, latency_ns=10_000)

ROOM = 1 << 30


def through(streams: FakeStreams, capacity_bytes: int = ROOM) -> Offload:
    return Offload([HostTier(capacity_bytes, streams)], (PCIE,))


def tier_of(offload: Offload) -> HostTier:
    tier = offload.tiers[0]
    assert isinstance(tier, HostTier)
    return tier


def assert_same(expected: list[Outcome], found: list[Outcome]) -> None:
    assert [wanted.differences(got) for wanted, got in zip(expected, found, strict=True)] == [[]] * len(expected)


moved_in: list[int] = []


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs(), seed=st.integers(0, 1 << 16), hold=st.sampled_from([0.0, 0.3, 0.7, 1.0]), mode=st.sampled_from(MODES))
def test_random_programs_compute_the_same(program: Program, seed: int, hold: float, mode: Mode) -> None:
    expected = plain(program)
    streams = FakeStreams(mode, seed=seed)
    remat = RandomOffload(seed, hold, through(streams))
    found = train(maker(program), steps=len(expected), remat=remat, extra=generator_state)
    moved_in.append(streams.copied_bytes)
    assert_same(expected, found)
    assert streams.violations == []


def test_much_was_moved() -> None:
    """The test above would say nothing if plans moved nothing."""
    if moved_in:
        assert sum(size > 0 for size in moved_in) > len(moved_in) // 3, moved_in


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs(is_straight=True), seed=st.integers(0, 1 << 16), hold=st.sampled_from([0.0, 0.3, 1.0]), mode=st.sampled_from(MODES))
def test_random_programs_take_the_predicted_bytes(program: Program, seed: int, hold: float, mode: Mode) -> None:
    names = [instruction.name for instruction in program.instructions]
    assume("dirty" not in names)  # as for the disk
    try:
        train(maker(program), steps=1)
    except RuntimeError:
        assume(False)
    streams = FakeStreams(mode, seed=seed)
    remat = RandomOffload(seed, hold, through(streams))
    predicted, measured = last_peaks(maker(program), remat, keeps_graphs=program.replaces_what_outlives_a_step)
    stats = remat.stats[-1]
    assert stats.plan is not None
    note(f"predicted {predicted} B, measured {measured} B, {len(stats.plan.moves)} moves")
    assert 0 <= predicted - measured <= program.outliving_bytes
    assert streams.violations == []
    if not program.outliving_bytes:
        assert stats.moved_bytes == stats.plan.moved_bytes


STEPS: dict[str, Callable[[], tuple[nn.Module, Callable[[], Tensor]]]] = {}


def twice_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def two_losses(model: nn.Module, x: Tensor) -> Tensor:
    """A second forward pass begins before the first one's backward."""
    first, second = model(x).square().mean(), model(x).abs().mean()
    second.backward()
    first.backward()
    return first + second


STEPS["plain"] = narrow
STEPS["wide"] = wide
STEPS["two backwards"] = stepping(twice_backward, make_narrow, rows=128)
STEPS["second order"] = stepping(second_order, make_narrow, rows=128)
STEPS["two losses"] = stepping(two_losses, make_narrow, rows=128)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, mode: Mode) -> None:
    """Bit-identical, nothing waited for by the host, nothing left alive, and the same pinned memory in each step."""
    expected = train(STEPS[name], steps=5)
    streams = FakeStreams(mode)
    with no_garbage_collection():
        offload = through(streams)
        remat = RandomOffload(1, 0.3, offload, share=1.0)
        pinned: list[int] = []
        found = train(STEPS[name], steps=5, remat=remat, extra=lambda model: pinned.append(streams.pinned_total))
        assert streams.copied_bytes > 0
        assert streams.host_waits == 0
        tier_of(offload).close()
        assert_nothing_lives(remat)
        assert tier_of(offload).pool.used_bytes == 0
    assert_same(expected, found)
    assert streams.violations == []
    assert pinned[1] > 0
    assert pinned[1:] == [pinned[1]] * 4
    assert [stats.stall_ns for stats in remat.stats] == [0] * 5


# -- the fake can fail -------------------------------------------------------------------------------------------------------


def nothing(*_: Any) -> None:
    return None


def no_compute_waits(streams: FakeStreams) -> None:
    streams.compute_waits = nothing  # type: ignore[method-assign]


def no_copy_waits(streams: FakeStreams) -> None:
    streams.copy_waits = nothing  # type: ignore[method-assign]


def events_too_early(streams: FakeStreams) -> None:
    """The event of a copy is recorded before it."""
    right = streams.copy_event
    streams.copy_event = lambda **_: right() if not streams.begun else type(right())(streams, streams.begun - 1, -1)  # type: ignore[method-assign]


def stale_compute_events(streams: FakeStreams) -> None:
    """The copy stream waits for an event that was recorded before the latest work."""
    right, kept = streams.compute_event, []

    def compute_event() -> Any:
        kept.append(right())
        return kept[max(0, len(kept) - 2)]

    streams.compute_event = compute_event  # type: ignore[method-assign]


def skipping(method: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A copy does not have the compute stream wait in this method."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        right, waits = getattr(HostCopy, method), FakeStreams.compute_waits

        def wrong(self: HostCopy) -> Any:
            monkeypatch.setattr(FakeStreams, "compute_waits", nothing)
            try:
                return right(self)
            finally:
                monkeypatch.setattr(FakeStreams, "compute_waits", waits)

        monkeypatch.setattr(HostCopy, method, wrong)

    return mutate


def fetch_before_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy in waits for an event from before its target was allocated."""
    allocate = FakeStreams.device_bytes

    def device_bytes(self: FakeStreams, nbytes: int) -> Tensor:
        event = self.compute_event()
        self.compute_event = lambda: event  # type: ignore[method-assign]
        return allocate(self, nbytes)

    monkeypatch.setattr(FakeStreams, "device_bytes", device_bytes)


def block_given_back_at_landing(monkeypatch: pytest.MonkeyPatch) -> None:
    right = HostCopy.land

    def land(self: HostCopy) -> bool:
        self.tier.pool.give(self.block, self.event)
        return right(self)

    monkeypatch.setattr(HostCopy, "land", land)


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "no wait before memory is let go": (skipping("land"), "freed before"),
    "no wait before what came back is used": (skipping("arrive"), "freed before|differ"),
    "the compute stream never waits": (lambda m: m.setattr(FakeStreams, "compute_waits", nothing), "freed before"),
    "the copy stream never waits": (lambda m: m.setattr(FakeStreams, "copy_waits", nothing), "does not wait"),
    "a fetch into memory that is still in use": (fetch_before_memory_is_free, "does not wait"),
    "a block given back too early": (block_given_back_at_landing, "differ"),
}

ON_STREAMS: dict[str, tuple[Callable[[FakeStreams], None], str]] = {
    "an event recorded before its copy": (events_too_early, "freed before|differ"),
    "a stale event of the compute stream": (stale_compute_events, "does not wait"),
}


def found_by_the_fake(streams: FakeStreams) -> list[str]:
    """What a run shows that is wrong: violations, and results that differ."""
    expected = train(narrow, steps=3)
    remat = RandomOffload(1, 0.3, through(streams), share=1.0)
    found = train(narrow, steps=3, remat=remat)
    differ = any(wanted.differences(got) for wanted, got in zip(expected, found, strict=True))
    assert streams.copied_bytes > 0
    return streams.violations + ["results differ"] * differ


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_fake_sees_a_tier_that_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, match = MUTATIONS[name]
    mutate(monkeypatch)
    found = found_by_the_fake(FakeStreams("late"))
    assert any(part in text for text in found for part in match.split("|")), found


@pytest.mark.parametrize("name", ON_STREAMS)
def test_the_fake_sees_events_that_are_wrong(name: str) -> None:
    streams = FakeStreams("late")
    mutate, match = ON_STREAMS[name]
    mutate(streams)
    found = found_by_the_fake(streams)
    assert any(part in text for text in found for part in match.split("|")), found


def test_the_fake_sees_nothing_where_nothing_is_wrong() -> None:
    assert found_by_the_fake(FakeStreams("late")) == []


# -- a copy that nobody waits for -----------------------------------------------------------------------------------------------


def begun_copy(streams: FakeStreams, tier: HostTier, *, is_coming_back: bool) -> HostCopy:
    copy = tier.send(torch.arange(1 << 16, dtype=torch.int32), MoveCount())
    assert copy is not None
    if is_coming_back:
        copy.land()
        copy.fetch()
    return copy


@pytest.mark.parametrize("is_coming_back", [False, True])
def test_a_copy_that_dies_half_way_keeps_its_memory(is_coming_back: bool) -> None:
    streams = FakeStreams("late")
    tier = HostTier(ROOM, streams)
    copy = begun_copy(streams, tier, is_coming_back=is_coming_back)
    del copy
    assert len(tier.retired) == 1
    tier.bury()
    assert len(tier.retired) == 1  # still under way
    streams.run_until(streams.begun)
    tier.bury()
    assert not tier.retired
    assert streams.violations == []


@pytest.mark.parametrize("is_coming_back", [False, True])
def test_a_tier_that_dies_waits_for_copies_that_nobody_waited_for(is_coming_back: bool) -> None:
    streams = FakeStreams("late")
    tier = HostTier(ROOM, streams)
    begun_copy(streams, tier, is_coming_back=is_coming_back)
    del tier
    assert streams.host_waits == 1
    assert streams.violations == []


@pytest.mark.parametrize("is_coming_back", [False, True])
def test_the_fake_sees_a_copy_that_dies_with_its_memory(is_coming_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = FakeStreams("late")
    tier = HostTier(ROOM, streams)
    copy = begun_copy(streams, tier, is_coming_back=is_coming_back)
    copy.tensor = None  # as if it were not kept
    del copy
    assert any("freed before" in text for text in streams.violations)


def test_what_failed_steps_leave_goes_when_the_next_begins() -> None:
    streams = FakeStreams("late")
    offload = through(streams)
    begun_copy(streams, tier_of(offload), is_coming_back=False)
    streams.run_until(streams.begun)
    offload.bury()
    assert not tier_of(offload).retired


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_raises_between_leaving_and_coming_back(mode: Mode) -> None:
    def make() -> tuple[nn.Module, Callable[[], Tensor]]:
        model, step = narrow()
        batch, calls = torch.randn(128, 32), iter(range(9))

        def failing() -> Tensor:
            if next(calls) == 2:
                with suppress(RuntimeError):
                    model(batch).square().mean() + torch.zeros(3, 3) @ torch.zeros(2, 2)
            return step()

        return model, failing

    expected = train(make, steps=5)
    streams = FakeStreams(mode)
    with no_garbage_collection():
        offload = through(streams)
        remat = RandomOffload(3, 0.3, offload, share=1.0)
        found = train(make, steps=5, remat=remat)
        tier_of(offload).close()
        assert_nothing_lives(remat)
        assert tier_of(offload).pool.used_bytes == 0
    assert_same(expected, found)
    assert streams.violations == []


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_without_backward_leaves_nothing(mode: Mode) -> None:
    streams = FakeStreams(mode)
    offload = through(streams)
    model, step = narrow()
    with no_garbage_collection():
        remat = RandomOffload(3, 0.3, offload, share=1.0)
        for _ in range(2):
            with remat:
                step()
        with remat:
            model(torch.randn(128, 32)).square().mean()
        tier_of(offload).close()
        assert tier_of(offload).pool.used_bytes == 0
    assert streams.violations == []


# -- room ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refuse_from", [1, 2, 7])
def test_what_finds_no_pinned_memory_is_kept(refuse_from: int) -> None:
    expected = train(narrow, steps=4)
    streams = FakeStreams("late", refuse_from=refuse_from)
    remat = RandomOffload(1, 0.3, through(streams), share=1.0)
    with no_garbage_collection(), pytest.warns(UserWarning, match="the fake refused it. What cannot be offloaded is kept") as told:
        found = train(narrow, steps=4, remat=remat)
    assert len(told) == 1
    assert_same(expected, found)
    assert streams.violations == []
    assert remat.stats[1].unmoved_values > 0
    assert (remat.stats[1].moved_bytes > 0) == (refuse_from > 1)


def test_what_finds_no_room_is_kept() -> None:
    expected = train(narrow, steps=4)
    streams = FakeStreams("late")
    remat = RandomOffload(1, 0.3, through(streams, capacity_bytes=3 * LEAST_PIECE), share=1.0)
    with pytest.warns(UserWarning, match=r"192\.0 KiB were allowed"):
        found = train(narrow, steps=4, remat=remat)
    assert_same(expected, found)
    assert streams.violations == []
    assert 0 < streams.pinned_total <= 3 * LEAST_PIECE
    assert remat.stats[1].moved_bytes > 0


def test_a_tier_that_has_failed_is_planned_without() -> None:
    expected = train(wide, steps=6)
    streams = FakeStreams("random", refuse_from=3)
    remat = punar.Remat(budget=0.6)
    remat._session.movers.offload = through(streams)
    with pytest.warns(UserWarning, match="the fake refused it"):
        found = train(wide, steps=6, remat=remat)
    assert_same(expected, found)
    assert streams.violations == []
    assert [stats.unmoved_values > 0 for stats in remat.stats] == [False, True, False, False, False, False]
    assert remat.plan is not None
    assert not remat.plan.moves


@pytest.mark.parametrize("nbytes", [0, 1, LEAST_PIECE, LEAST_PIECE + 1, 33 << 20, (1 << 30) - 1, 12345678901])
def test_pieces(nbytes: int) -> None:
    pieces = pieces_of(nbytes)
    assert all(size.bit_count() == 1 for size in pieces)
    assert pieces == sorted(set(pieces), reverse=True)
    assert len(pieces) <= 4
    assert 0 <= sum(pieces) - nbytes <= max(LEAST_PIECE, nbytes // 8)


def pool_of(streams: FakeStreams, capacity_bytes: int) -> PinnedPool:
    return PinnedPool(streams.pinned_bytes, capacity_bytes, streams.give_back_pinned)


def test_a_pool_uses_pieces_again() -> None:
    streams = FakeStreams()
    pool = pool_of(streams, ROOM)
    first = pool.take(33 << 20)
    places = [piece.data_ptr() for piece in first.pieces]
    pool.give(first, streams.copy_event())
    assert pool.used_bytes == 0
    again = pool.take((33 << 20) - 5)
    assert [piece.data_ptr() for piece in again.pieces] == places
    assert pool.used_bytes == pool.pinned_bytes == streams.pinned_total


def test_a_pool_at_its_capacity_lets_go_of_sizes_that_nobody_needs() -> None:
    streams = FakeStreams()
    pool = pool_of(streams, 1 << 20)
    pool.give(pool.take(1 << 20), streams.copy_event())
    small = pool.take(1 << 16)
    assert (pool.pinned_bytes, streams.returns) == (1 << 16, 1)
    with pytest.raises(HostMemoryFull, match=r"1\.0 MiB were allowed") as caught:
        pool.take(1 << 20)
    assert caught.value.asked_bytes == 1 << 20
    assert pool.used_bytes == 1 << 16
    assert small.nbytes == 1 << 16


def test_a_pool_does_not_let_go_of_what_is_still_copied() -> None:
    streams = FakeStreams("late")
    pool = pool_of(streams, 1 << 20)
    block, device = pool.take(1 << 20), streams.device_bytes(1 << 20)
    streams.copy_waits(streams.compute_event())
    streams.copy(block.beside(device))
    pool.give(block, streams.copy_event())
    del block
    with pytest.raises(HostMemoryFull):
        pool.take(1 << 16)
    streams.run_until(streams.begun)
    pool.take(1 << 16)
    assert streams.violations == []


def test_a_refused_piece_gives_the_others_back() -> None:
    streams = FakeStreams(refuse_from=2)
    pool = pool_of(streams, ROOM)
    with pytest.raises(HostMemoryFull, match="the fake refused it"):
        pool.take(33 << 20)
    assert pool.used_bytes == 0
    assert pool.pinned_bytes == streams.pinned_total


def test_a_finalizer_inside_of_the_pool_does_not_hang() -> None:
    """A block may be given back by a finalizer while the same thread is taking another."""
    streams = FakeStreams()
    pool = pool_of(streams, ROOM)
    other = pool.take(1 << 16)

    def allocate(nbytes: int) -> Tensor:
        pool.give(other, streams.copy_event())
        return streams.pinned_bytes(nbytes)

    pool.allocate = allocate
    taking = threading.Thread(target=pool.take, args=(1 << 20,), daemon=True)
    taking.start()
    taking.join(10)
    assert not taking.is_alive()
    assert pool.used_bytes == 1 << 20


def test_a_block_is_copied_in_parts() -> None:
    block = PinnedBlock(5, [torch.zeros(4, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)])
    flat = torch.arange(5, dtype=torch.uint8)
    assert [(part.tolist(), place.numel()) for part, place in block.beside(flat)] == [([0, 1, 2, 3], 4), ([4], 1)]


# -- asking for it -------------------------------------------------------------------------------------------------------------


def test_places() -> None:
    assert check_offload(None) == ()
    assert check_offload("cpu") == (Place(folder=None, most_bytes=None),)
    assert check_offload("cpu:32 GiB") == (Place(folder=None, most_bytes=32 << 30),)
    assert check_offload(["cpu:1 GiB", "disk:/a:b:2 MiB"]) == (
        Place(folder=None, most_bytes=1 << 30),
        Place(folder="/a:b", most_bytes=2 << 20),
    )


@pytest.mark.parametrize("asked", [[], "cpu:", "cpu:much", "cpu:0 B", ["cpu", 3], b"cpu", {"cpu": 1}, 3, ["cpu", "cpu:1 GiB"]])
def test_no_places(asked: Any) -> None:
    with pytest.raises(UsageError, match="asked to offload to"):
        punar.Remat(budget="min", offload=asked)


def test_the_computers_memory_is_no_place_for_what_is_there() -> None:
    with pytest.raises(UsageError, match="found a step on cpu; its tensors are in the computer's memory already: give a disk"):
        train(wide, steps=2, remat=punar.Remat(budget=0.5, offload="cpu"))


def test_places_that_do_not_serve_the_device_are_left_out(tmp_path: Path) -> None:
    expected = train(wide, steps=3)
    remat = punar.Remat(budget="min", offload=["cpu:1 GiB", f"disk:{tmp_path}"])
    assert_same(expected, train(wide, steps=3, remat=remat))
    assert remat._session.movers.offload is not None
    assert [channel.name for channel in remat._session.movers.offload.channels] == [f"disk:{tmp_path}"]


@pytest.fixture
def a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeStreams]]:
    """Steps here are taken for a CUDA device's: what is opened for one gets fake streams."""
    made: list[FakeStreams] = []

    def streams(device: torch.device) -> FakeStreams:
        made.append(FakeStreams("random"))
        return made[-1]

    monkeypatch.setattr(places, "CudaStreams", streams)
    monkeypatch.setattr(Place, "serves", lambda place, device: place.folder is None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield made
    assert made
    assert all(streams.violations == [] for streams in made)


def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStreams, "elapsed_ns", lambda self, start, end: 1000 if end.place % 3 == 0 else 100_000)


def test_remat_with_the_computers_memory(a_device: list[FakeStreams], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way from the argument to the report, the tier opened and measured when the first plan is made."""
    fast(monkeypatch)
    expected = train(wide, steps=4)
    remat = punar.Remat(budget=0.6, offload="cpu:1 GiB")
    assert not a_device
    assert_same(expected, train(wide, steps=4, remat=remat))
    assert remat.plan is not None
    assert remat.plan.moves
    assert remat.plan.channels[0].name == "cpu"
    assert remat.plan.channels[0].capacity_bytes == 1 << 30
    assert remat.stats[-1].moved_bytes == remat.plan.moved_bytes
    assert remat.stats[-1].measured_peak_bytes == remat.plan.peak_bytes
    assert "moved, both ways" in str(remat.report())


def test_measured() -> None:
    streams = FakeStreams("late")
    streams.elapsed_ns = lambda start, end: {1: 2_010_000, 2: 1_010_000, 0: 10_000}[end.place % 3]  # type: ignore[method-assign]
    found = measured(streams, 1 << 30, block_bytes=1 << 20)
    assert streams.violations == []
    assert found == Channel(
        name="cpu",
        capacity_bytes=1 << 30,
        write_bytes_per_s=(1 << 20) * 500,
        read_bytes_per_s=(1 << 20) * 1000,
        latency_ns=10_000,
    )


def test_no_pinned_memory_at_all(a_device: list[FakeStreams], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned without moves, and said once."""
    monkeypatch.setattr(FakeStreams, "pinned_bytes", refused)
    expected = train(wide, steps=3)
    remat = punar.Remat(budget=0.6, offload="cpu")
    with pytest.warns(UserWarning, match="no pinned memory here") as told:
        found = train(wide, steps=3, remat=remat)
    assert len(told) == 1
    assert_same(expected, found)
    assert remat.plan is not None
    assert not remat.plan.moves


def refused(self: FakeStreams, nbytes: int) -> Tensor:
    raise HostMemoryFull("no pinned memory here", asked_bytes=nbytes)


def test_a_plan_that_moves_is_obeyed_where_there_is_such_a_place(a_device: list[FakeStreams], monkeypatch: pytest.MonkeyPatch) -> None:
    fast(monkeypatch)
    step = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))), torch.randn(512, 256), mean_square
    plan = punar.solve(punar.profile(*step), budget=0.6, offload="cpu")
    assert plan.moves
    with pytest.raises(UsageError, match="offloads to cpu, found nowhere to"):
        punar.Remat(plan=plan)
    with pytest.raises(UsageError, match="offloads to cpu, found only disk:/"):
        punar.Remat(plan=plan, offload="disk:/")
    remat = punar.Remat(plan=plan, offload="cpu")
    tier = tier_of(remat._session.movers.offload)  # type: ignore[arg-type]
    assert tier.streams is None  # until the first tensor says on which device
    tier.bind(FakeStreams("late"))
    with remat:
        mean_square(*step[:2]).backward()
    assert remat.stats[-1].moved_bytes == plan.moved_bytes
    assert tier.streams.violations == []  # type: ignore[attr-defined]


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def test_a_tensor_on_another_device_is_kept() -> None:
    count, tier = MoveCount(), HostTier(ROOM)
    with pytest.warns(UserWarning, match="asked to offload a tensor on cpu"):
        assert tier.send(torch.ones(4), count) is None


def test_a_step_on_a_device_without_one() -> None:
    with pytest.raises(UsageError, match="found no CUDA device here"):
        places.opened(check_offload("cpu"), "cuda:0")
    with pytest.raises(UsageError, match=r"asked to offload to disk:/, found a step on xpu; nothing can be offloaded from there"):
        places.opened(check_offload("disk:/"), "xpu")


def test_nothing_refers_in_circles() -> None:
    """Copies, pools and tiers die by their reference counts."""
    with no_garbage_collection():
        streams = FakeStreams("late")
        tier = HostTier(ROOM, streams)
        copy = begun_copy(streams, tier, is_coming_back=True)
        copy.arrive()
        del tier, copy
        gc.collect()
        assert not [found for found in gc.get_objects() if type(found) in (HostTier, HostCopy, PinnedPool)]


# -- the real streams ----------------------------------------------------------------------------------------------------------


class NoEvent:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, log: list[tuple[str, ...]], *, enable_timing: bool = False) -> None:
        self.log = log

    def record(self, stream: NoStream) -> None:
        self.log.append(("record on", stream.name))

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.log.append(("host waits",))


class NoStream:
    """Stands for ``torch.cuda.Stream``."""

    def __init__(self, name: str, log: list[tuple[str, ...]]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: NoEvent) -> None:
        self.log.append(("wait on", self.name))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the real streams ask of ``torch.cuda``, in order."""
    log: list[tuple[str, ...]] = []
    empty = torch.empty

    @contextmanager
    def within(stream: NoStream) -> Iterator[None]:
        log.append(("copies on", stream.name))
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: NoStream("copy", log))
    monkeypatch.setattr(torch.cuda, "Event", lambda **how: NoEvent(log, **how))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: NoStream("compute", log))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **how: empty(*size, **how))
    return log


def test_the_real_streams_in_order(calls: list[tuple[str, ...]]) -> None:
    """Torch's own copies, one after the other, and what was asked of ``torch.cuda`` around them."""
    tier = HostTier(ROOM, CudaStreams(torch.device("cpu")))
    source = torch.randn(70_001)
    copy = tier.send(source, MoveCount())
    assert copy is not None
    assert len(copy.block.pieces) > 1
    begin = [("record on", "compute"), ("wait on", "copy"), ("copies on", "copy"), ("record on", "copy")]
    assert calls == begin
    assert copy.land()
    assert calls[4:] == [("wait on", "compute")]
    back = copy.fetch()
    assert calls[5:] == begin
    copy.arrive()
    assert calls[9:] == [("wait on", "compute")]
    assert torch.equal(back.view(torch.float32), source)
    assert back._version > 0  # what holds it must look at its version after the copy


def test_pinned_memory_that_the_system_refuses() -> None:
    streams = object.__new__(CudaStreams)
    with pytest.raises(HostMemoryFull, match=r'the system refused it: .*allow less of it \("cpu:8 GiB"\)'):
        streams.pinned_bytes(1 << 20)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_on_a_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tier = HostTier(ROOM, CudaStreams(device))
    source = torch.randn(7_000_001, device=device)
    expected = source.clone()
    copy = tier.send(source, MoveCount())
    assert copy is not None
    copy.land()
    source.zero_()  # after the copy, in the compute stream's order
    back = copy.fetch()
    copy.arrive()
    assert torch.equal(back.view(torch.float32), expected)
    tier.streams.give_back_pinned()  # type: ignore[union-attr]
    assert measured(CudaStreams(device), ROOM).read_bytes_per_s > 1 << 30
