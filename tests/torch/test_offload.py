"""Does a step whose activations go to disk and come back compute what the plain step does, in the memory that was predicted, whatever the disk does?"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import punar
from punar.errors import BlockCorrupted, OffloadError, UsageError
from punar.ir import EventKind, Trace
from punar.plan import Plan, make_plan
from punar.plan.moves import Channel, Move
from punar.solvers.movable import movable
from punar.tiers import OperatingSystem, Spool
from punar.torch.offload import DiskTier, Offload
from tests.torch.harness import RandomRemat, assert_nothing_lives, last_peaks, no_garbage_collection, train
from tests.torch.models import plain_step, stepping
from tests.torch.programs import Program, programs
from tests.torch.test_random_programs import generator_state, maker, plain

EXAMPLES = int(os.environ.get("PUNAR_EXAMPLES", "60"))

SLOW = Channel(name="disk", capacity_bytes=1 << 40, write_bytes_per_s=1 << 30, read_bytes_per_s=1 << 30)


class FaultyDisk(OperatingSystem):
    """Calls fail from the ``nth`` on that ``fails`` names, in the way that it says."""

    def __init__(self, fails: str = "", how: int = errno.ENOSPC, nth: int = 0) -> None:
        self.fails, self.how, self.left = fails, how, nth

    def is_hit(self, call: str) -> bool:
        if call != self.fails:
            return False
        self.left -= 1
        return self.left < 0

    def reserve(self, fd: int, start: int, size: int) -> None:
        if self.is_hit("reserve"):
            raise OSError(self.how, os.strerror(self.how))
        super().reserve(fd, start, size)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if self.is_hit("write"):
            raise OSError(self.how, os.strerror(self.how))
        if self.is_hit("worker"):
            raise SystemExit("killed")
        return super().write(fd, data, offset)

    def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        if self.is_hit("read"):
            raise OSError(self.how, os.strerror(self.how))
        count = super().read(fd, buffers, offset)
        if self.is_hit("corrupt"):
            buffers[0][0] ^= 1
        return count


def offload_to(folder: Path, files: OperatingSystem | None = None) -> Offload:
    return Offload([DiskTier(Spool(folder, files=files))], (SLOW,))


class RandomOffload(RandomRemat):
    """Obeys a random plan that also moves some of the values that can move, away and back at random times."""

    def __init__(self, seed: int, hold: float, offload: Offload, share: float = 0.6) -> None:
        super().__init__(seed, hold)
        self._session.movers.offload = self.offload = offload
        self.share = share

    def _make_plan(self, trace: Trace, *_: int) -> Plan:
        plan = super()._make_plan(trace)
        draw = random.Random(self.seed)
        drawn = [random_move(trace, v, draw) for v in movable(trace, 1) if draw.random() < self.share]
        moves = [replace(move, tier=draw.randrange(len(self.offload.tiers))) for move in drawn if move is not None]
        hold = list(plan.hold_from)
        for move in moves:
            hold[move.value] = 0
        return make_plan(trace, hold, solver="random", budget_bytes=0, moves=moves, channels=self.offload.channels)


def random_move(trace: Trace, value: int, draw: random.Random) -> Move | None:
    ran = [id for kind, id in trace.events if kind == EventKind.RUN]
    maker = trace.values[value].producer
    later = [op for op in ran[ran.index(maker) + 1 :] if not trace.ops[op].is_backward and trace.ops[op].outputs]
    if not later:
        return None
    return Move(value=value, land=draw.choice(later[:8]), fetch=draw.randint(0, trace.demand_rank[value]))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Offload]:
    offload = offload_to(tmp_path_factory.mktemp("spool"))
    yield offload
    offload.tiers[0].spool.close()


moved_in: list[int] = []


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs(), seed=st.integers(0, 1 << 16), hold=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
def test_random_programs_compute_the_same(program: Program, seed: int, hold: float, disk: Offload) -> None:
    expected = plain(program)
    remat = RandomOffload(seed, hold, disk)
    found = train(maker(program), steps=len(expected), remat=remat, extra=generator_state)
    moved_in.append(sum(stats.moved_bytes for stats in remat.stats))
    assert [wanted.differences(got) for wanted, got in zip(expected, found, strict=True)] == [[]] * len(expected)


def test_much_was_moved() -> None:
    """The test above would say nothing if plans moved nothing."""
    if moved_in:
        assert sum(size > 0 for size in moved_in) > len(moved_in) // 3, moved_in


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs(is_straight=True), seed=st.integers(0, 1 << 16), hold=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
def test_random_programs_take_the_predicted_bytes(program: Program, seed: int, hold: float, disk: Offload) -> None:
    names = [instruction.name for instruction in program.instructions]
    assume("dirty" not in names)  # what custom functions mark as written shows a version that no operator made, and is kept
    try:
        train(maker(program), steps=1)
    except RuntimeError:
        assume(False)
    remat = RandomOffload(seed, hold, disk)
    predicted, measured = last_peaks(maker(program), remat, keeps_graphs=program.replaces_what_outlives_a_step)
    stats = remat.stats[-1]
    assert stats.plan is not None
    note(f"predicted {predicted} B, measured {measured} B, {len(stats.plan.moves)} moves")
    assert 0 <= predicted - measured <= program.outliving_bytes
    if not program.outliving_bytes:
        assert stats.moved_bytes == stats.plan.moved_bytes


class LandingAtFull(RandomOffload):
    """Has all that can move be away by the time that the step's one ``torch.full`` runs."""

    def _make_plan(self, trace: Trace, *_: int) -> Plan:
        full = next(op.id for op in trace.ops if op.name.startswith("aten.full"))
        values = [value for value in movable(trace, 1) if trace.values[value].producer < full]
        moves = [Move(value=value, land=full, fetch=trace.demand_rank[value]) for value in values]
        return make_plan(trace, [0] * len(trace.values), solver="late", budget_bytes=0, moves=moves, channels=self.offload.channels)


@pytest.mark.parametrize("is_last", [False, True])
def test_what_was_to_be_gone_at_an_operator_that_does_not_run_is_gone(is_last: bool, disk: Offload) -> None:
    """As where a loss scaler makes its scale in the first step alone."""
    torch.manual_seed(0)
    model, batch = make_wide(), torch.randn(512, 256)
    remat = LandingAtFull(0, 0.0, disk)
    for number in range(2):
        with remat:
            loss = model(batch).square().mean()
            if number == 0:
                torch.full((1,), 2.0)
            if not is_last:
                loss = loss * 2.0
            loss.backward()
        model.zero_grad()
        del loss
    stats = remat.stats[-1]
    assert stats.plan is not None
    assert stats.measured_peak_bytes is not None
    assert stats.moved_bytes == stats.plan.moved_bytes > 0
    assert 0 <= stats.plan.peak_bytes - stats.measured_peak_bytes <= 64


# -- faults --------------------------------------------------------------------------------------------------------------


def make_narrow() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.Dropout(0.1)) for _ in range(6))
    )


def make_wide() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))


narrow = stepping(plain_step, make_narrow, rows=128)
wide = stepping(plain_step, make_wide, rows=512, width=256)

KEEPING = {
    "full at once": FaultyDisk("reserve"),
    "full at the third write": FaultyDisk("write", nth=9),
    "quota": FaultyDisk("write", errno.EDQUOT, nth=4),
    "write error": FaultyDisk("write", errno.EIO, nth=6),
    "killed worker": FaultyDisk("worker", nth=5),
}


@pytest.mark.parametrize("fault", KEEPING)
def test_what_cannot_be_written_is_kept(fault: str, tmp_path: Path) -> None:
    files = KEEPING[fault]
    expected = train(narrow, steps=4)
    with no_garbage_collection():
        remat = RandomOffload(1, 0.3, offload_to(tmp_path, files), share=1.0)
        with pytest.warns(UserWarning, match="asked to (offload|write)|worker that copies"):
            found = train(narrow, steps=4, remat=remat)
        assert sum(stats.unmoved_values for stats in remat.stats) > 0
        assert_nothing_lives(remat)
    assert [wanted.differences(got) for wanted, got in zip(expected, found, strict=True)] == [[]] * 4


@pytest.mark.parametrize(("fault", "error"), [("read", OffloadError), ("corrupt", BlockCorrupted)])
def test_what_cannot_be_read_is_an_error(fault: str, error: type[OffloadError], tmp_path: Path) -> None:
    remat = RandomOffload(1, 0.3, offload_to(tmp_path, FaultyDisk(fault, errno.EIO, nth=2)), share=1.0)
    with pytest.raises(error, match="asked to read"):
        train(narrow, steps=4, remat=remat)


def test_a_step_that_raises_between_leaving_and_coming_back(disk: Offload) -> None:
    used = disk.tiers[0].spool.used_bytes

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
    with no_garbage_collection():
        remat = RandomOffload(3, 0.3, disk, share=1.0)
        found = train(make, steps=5, remat=remat)
        disk.tiers[0].bury()
        assert_nothing_lives(remat)
    assert [wanted.differences(got) for wanted, got in zip(expected, found, strict=True)] == [[]] * 5
    assert disk.tiers[0].spool.used_bytes == used


def test_a_loss_without_backward_leaves_nothing(tmp_path: Path) -> None:
    disk = offload_to(tmp_path)
    model, step = narrow()
    remat = RandomOffload(3, 0.3, disk, share=1.0)
    for _ in range(2):
        with remat:
            step()
    with remat:
        model(torch.randn(128, 32)).square().mean()
    remat = None  # type: ignore[assignment]
    disk.close()
    disk.tiers[0].bury()
    assert disk.tiers[0].spool.used_bytes == 0


class RoomFor(OperatingSystem):
    """A disk that is full from the ``nth`` reservation on, but for those that measure it."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data, offset)


def test_a_disk_that_has_failed_is_planned_without(tmp_path: Path) -> None:
    expected = train(wide, steps=6)
    remat = punar.Remat(budget=0.6)
    remat._session.movers.offload = offload_to(tmp_path, RoomFor(3))
    with pytest.warns(UserWarning, match="No space left"):
        found = train(wide, steps=6, remat=remat)
    assert [wanted.differences(got) for wanted, got in zip(expected, found, strict=True)] == [[]] * 6
    failed = [stats.unmoved_values > 0 for stats in remat.stats]
    assert failed == [False, True, False, False, False, False]
    assert remat.plan is not None
    assert not remat.plan.moves
    assert remat.plan.peak_bytes <= remat.plan.budget_bytes
    assert remat.stats[-1].predicted_peak_bytes == remat.plan.peak_bytes


def test_a_forked_child_keeps_what_its_parent_moves(disk: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(narrow, steps=3)
    monkeypatch.setattr(disk.tiers[0].spool, "_process", 0)
    monkeypatch.setattr(disk.tiers[0], "is_told", False)
    with pytest.warns(UserWarning, match="forked from"):
        found = train(narrow, steps=3, remat=RandomOffload(1, 0.3, disk, share=1.0))
    assert [wanted.differences(got) for wanted, got in zip(expected, found, strict=True)] == [[]] * 3


# -- asking for it -------------------------------------------------------------------------------------------------------


def test_remat_with_a_disk(tmp_path: Path) -> None:
    expected = train(wide, steps=4)
    remat = punar.Remat(budget="min", offload=f"disk:{tmp_path}:2 GiB")
    found = train(wide, steps=4, remat=remat)
    assert [wanted.differences(got) for wanted, got in zip(expected, found, strict=True)] == [[]] * 4
    assert remat.plan is not None
    assert remat.stats[-1].measured_peak_bytes == remat.stats[-1].plan.peak_bytes  # type: ignore[union-attr]
    assert list(tmp_path.iterdir()) == []
    reported = remat.report().plan  # that of the last step: times were learned after it, and another plan may be in force since
    assert reported is not None
    assert ("moved, both ways" in str(remat.report())) == bool(reported.moves)
    again = Plan.from_json(remat.plan.to_json())
    assert again == remat.plan
    if again.moves:
        with pytest.raises(UsageError, match="found nowhere to"):
            punar.Remat(plan=again)


@pytest.mark.parametrize("asked", ["disk:", "tape:/dev/null", 3, ""])
def test_nonsense(asked: object) -> None:
    with pytest.raises(UsageError, match="asked to offload to"):
        punar.Remat(budget="min", offload=asked)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("missing", "file"):
        with pytest.raises(OffloadError, match="give a folder that exists"):
            punar.Remat(budget="min", offload=f"disk:{tmp_path / folder}")


def test_verified_and_planned_beforehand(tmp_path: Path) -> None:
    step = make_wide(), torch.randn(512, 256), lambda model, batch: model(batch).square().mean()
    place = f"disk:{tmp_path}"
    found = punar.verify(*step, offload=place)
    assert found.is_identical
    assert 0 <= found.plan.peak_bytes - found.measured_peak_bytes <= 4  # the loss of the profiled step
    (tmp_path / "plan.json").write_text(found.plan.to_json())
    again = punar.verify(*step, plan=Plan.load(tmp_path / "plan.json"), offload=place)
    assert again.is_identical


def test_a_step_on_another_device(tmp_path: Path) -> None:
    profile = punar.profile(*made())
    elsewhere = punar.Profile(trace=replace(profile.trace, device="xpu:0"))
    with pytest.raises(UsageError, match="found a step on xpu:0"):
        punar.solve(elsewhere, budget="min", offload=f"disk:{tmp_path}")


def made() -> tuple[nn.Module, Tensor, Callable[[nn.Module, Tensor], Tensor]]:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8), lambda model, batch: model(batch).sum()


def test_only_auto_offloads(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="plans recomputation alone"):
        train(wide, steps=2, remat=punar.Remat(budget=0.5, solver="full", offload=f"disk:{tmp_path}"))
