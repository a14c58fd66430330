"""Does what goes from a device to a disk through pinned memory come back as it was, whatever is late, full or broken?"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from punar.arguments import check_offload
from punar.errors import BlockCorrupted, OffloadError
from punar.tiers import Spool
from punar.torch import places
from punar.torch.host import LEAST_PIECE, PinnedPool
from punar.torch.offload import DiskTier, MoveCount, Offload
from punar.torch.staged import StagedCopy, StagedTier
from tests.torch.fake_streams import MODES, FakeEvent, FakeStreams, Mode
from tests.torch.harness import Outcome, assert_nothing_lives, no_garbage_collection, train
from tests.torch.programs import Program, programs
from tests.torch.test_host import STEPS, assert_same
from tests.torch.test_offload import EXAMPLES, KEEPING, SLOW, FaultyDisk, RandomOffload, narrow, offload_to
from tests.torch.test_random_programs import generator_state, maker, plain

ROOM = 1 << 30


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with Spool(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spool")


def through(spool: Spool, streams: FakeStreams, capacity_bytes: int = ROOM) -> Offload:
    return Offload([StagedTier(spool, capacity_bytes, streams)], (SLOW,))


def tier_of(offload: Offload) -> StagedTier:
    tier = offload.tiers[0]
    assert isinstance(tier, StagedTier)
    return tier


written_in: list[int] = []


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    program=programs(),
    seed=st.integers(0, 1 << 16),
    hold=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    mode=st.sampled_from(MODES),
    pieces=st.sampled_from([1, 2, 5, 1 << 10]),
)
def test_random_programs_compute_the_same(program: Program, seed: int, hold: float, mode: Mode, pieces: int, folder: Path) -> None:
    expected = plain(program)
    streams = FakeStreams(mode, seed=seed)
    with Spool(folder) as spool:
        remat = RandomOffload(seed, hold, through(spool, streams, pieces * LEAST_PIECE))
        found = train(maker(program), steps=len(expected), remat=remat, extra=generator_state)
        written_in.append(spool._reserved)
    assert_same(expected, found)
    assert streams.violations == []
    assert streams.pinned_total <= pieces * LEAST_PIECE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pieces", [2, 6, 1 << 10])
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, mode: Mode, pieces: int, spool: Spool) -> None:
    """Bit-identical, nothing left alive, and no more pinned memory than is allowed."""
    expected = train(STEPS[name], steps=4)
    streams = FakeStreams(mode)
    capacity = pieces * (1 << 19)
    with no_garbage_collection():
        offload = through(spool, streams, capacity)
        remat = RandomOffload(1, 0.3, offload, share=1.0)
        found = train(STEPS[name], steps=4, remat=remat)
        assert streams.copied_bytes > 0
        offload.close()
        offload.bury()
        assert_nothing_lives(remat)
        assert tier_of(offload).pool.used_bytes == 0
    assert_same(expected, found)
    assert streams.violations == []
    assert streams.pinned_total <= capacity
    assert not any(stats.unmoved_values for stats in remat.stats)


def test_little_pinned_memory_is_used_again_and_again(spool: Spool) -> None:
    """All of it goes to the disk where copies are done early; in the end nothing is there."""
    streams = FakeStreams("early")
    offload = through(spool, streams, 2 << 19)
    remat = RandomOffload(1, 0.3, offload, share=1.0)
    used: list[int] = []
    train(narrow, steps=3, remat=remat, extra=lambda model: used.append(spool.used_bytes))
    assert spool._reserved > streams.pinned_total
    assert remat.stats[-1].plan is not None
    assert remat.stats[-1].moved_bytes == remat.stats[-1].plan.moved_bytes


# -- one copy ------------------------------------------------------------------------------------------------------------


def sent(tier: StagedTier, elements: int = 1 << 18) -> tuple[StagedCopy, Tensor]:
    base = torch.randint(1 << 30, (elements,), dtype=torch.int32)
    copy = tier.send(base, MoveCount())
    assert isinstance(copy, StagedCopy)
    return copy, base.clone()


def back(copy: StagedCopy) -> Tensor:
    tensor = copy.fetch()
    copy.arrive()
    return tensor.view(torch.int32)


def gone_to_disk(tier: StagedTier, streams: FakeStreams, copy: StagedCopy) -> None:
    assert copy.land()
    streams.run_until(streams.begun)
    while tier.free_some():
        pass
    assert copy.block is None
    assert tier.pool.used_bytes == 0


def test_what_is_on_disk_comes_back(spool: Spool) -> None:
    streams = FakeStreams("late")
    tier = StagedTier(spool, ROOM, streams)
    copy, expected = sent(tier)
    tier.bury()
    assert not tier.writes  # nothing is in pinned memory yet
    gone_to_disk(tier, streams, copy)
    assert spool.used_bytes >= expected.nbytes
    assert torch.equal(back(copy), expected)
    del copy
    tier.bury()
    assert spool.used_bytes == tier.pool.used_bytes == 0
    assert streams.violations == []


def test_what_has_not_left_pinned_memory_is_not_read_from_the_disk(spool: Spool) -> None:
    streams = FakeStreams("late")
    tier = StagedTier(spool, ROOM, streams)
    copy, expected = sent(tier)
    copy.land()
    tier.bury()
    assert copy.write is not None
    tensor = copy.fetch()
    assert not copy.reads
    while tier.free_some():
        pass
    copy.arrive()
    assert torch.equal(tensor.view(torch.int32), expected)
    del copy
    tier.bury()
    assert spool.used_bytes == tier.pool.used_bytes == 0


def test_a_piece_that_a_copy_still_reads_is_not_read_into(spool: Spool) -> None:
    """The first copy's bytes are on their way to the device from the pinned memory that the second one's are read into."""
    streams = FakeStreams("late")
    tier = StagedTier(spool, 1 << 20, streams)
    second, expected = sent(tier)
    gone_to_disk(tier, streams, second)
    first, others = sent(tier)
    first.land()
    coming = first.fetch()
    first.tensor = None  # as when it has arrived: the device waits for the copy, the host does not
    first.event = streams.copy_event()
    del first
    assert streams.done < streams.begun
    assert torch.equal(back(second), expected)
    assert torch.equal(coming.view(torch.int32), others)


@pytest.mark.parametrize("when", ["on its way out", "written", "on disk", "read", "come back"])
def test_a_copy_that_dies_leaves_nothing(when: str, spool: Spool) -> None:
    streams = FakeStreams("late")
    tier = StagedTier(spool, ROOM, streams)
    copy, _ = sent(tier)
    if when != "on its way out":
        copy.land()
        tier.bury()
    if when in ("on disk", "read", "come back"):
        gone_to_disk(tier, streams, copy)
    if when in ("read", "come back"):
        copy.fetch()
    if when == "come back":
        copy.arrive()
    del copy
    streams.run_until(streams.begun)
    tier.close()
    tier.bury()
    assert tier.pool.used_bytes == 0
    assert not tier.retired
    assert not tier.abandoned
    assert not tier.writes
    assert streams.violations == []
    assert spool._extents.used == 0 or spool.used_bytes == 0


def test_reads_do_without_pinned_memory_where_there_is_none(spool: Spool) -> None:
    streams = FakeStreams("late")
    tier = StagedTier(spool, 1 << 20, streams)
    first, expected = sent(tier)
    gone_to_disk(tier, streams, first)
    second, others = sent(tier)
    second.land()
    second.is_returning = True  # it stays in pinned memory, all of which it has
    assert torch.equal(back(first), expected)
    assert torch.equal(back(second), others)
    assert streams.violations == []
    assert streams.pinned_total <= 1 << 20


# -- faults --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", KEEPING)
def test_what_the_disk_does_not_take_stays_in_pinned_memory(fault: str, mode: Mode, tmp_path: Path) -> None:
    expected = train(narrow, steps=3)
    kind = KEEPING[fault]
    streams = FakeStreams(mode)
    with Spool(tmp_path, files=FaultyDisk(kind.fails, kind.how, nth=0 if kind.fails == "reserve" else 2)) as spool:
        offload = through(spool, streams)
        remat = RandomOffload(1, 0.3, offload, share=1.0)

        def run() -> list[Outcome]:
            found = train(narrow, steps=3, remat=remat)
            while tier_of(offload).free_some():
                pass
            return found

        with pytest.warns(UserWarning, match="asked to (offload|write)|worker that copies"):
            found = run()
    assert_same(expected, found)
    assert streams.violations == []


@pytest.mark.parametrize(("fault", "error"), [("read", OffloadError), ("corrupt", BlockCorrupted)])
def test_what_cannot_be_read_is_an_error(fault: str, error: type[OffloadError], tmp_path: Path) -> None:
    streams = FakeStreams("late")
    with Spool(tmp_path, files=FaultyDisk(fault, errno.EIO)) as spool:
        tier = StagedTier(spool, ROOM, streams)
        copy, _ = sent(tier)
        gone_to_disk(tier, streams, copy)
        with pytest.raises(error, match="asked to read"):
            back(copy)


# -- what the tests above would see ------------------------------------------------------------------------------------------


def written_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "query", lambda event: True)


def taken_while_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PinnedPool.take
    monkeypatch.setattr(PinnedPool, "take", lambda pool, nbytes, **_: right(pool, nbytes))


@pytest.mark.parametrize(
    ("mutate", "test"),
    [
        (written_before_it_is_there, test_what_is_on_disk_comes_back),
        (taken_while_copied, test_a_piece_that_a_copy_still_reads_is_not_read_into),
    ],
)
def test_a_tier_that_is_wrong_is_seen(
    mutate: Callable[[pytest.MonkeyPatch], None], test: Callable[[Spool], None], spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        test(spool)


# -- asking for it -------------------------------------------------------------------------------------------------------


def test_a_disk_takes_what_comes_first(tmp_path: Path) -> None:
    offload = places.opened(check_offload(f"disk:{tmp_path}"), "cuda:0")
    assert offload is not None
    disk = offload.tiers[0]
    assert isinstance(disk, places.Disk)
    assert disk.send(torch.ones(1 << 16), MoveCount()) is not None
    assert isinstance(disk.tier, DiskTier)
    offload.close()
    assert offload_to(tmp_path) is not None


def test_how_much_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "physical_bytes", lambda: 64 << 30)
    assert places.staging_bytes() == 8 << 30


def test_much_was_written() -> None:
    """The random programs would say nothing if all stayed in pinned memory."""
    if written_in:
        assert max(written_in) > 0
