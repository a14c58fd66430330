"""Is a step that runs out of memory repeated as if it had never failed, and told where it cannot be?"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import random
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ExponentialLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils._python_dispatch import TorchDispatchMode

import punar
from punar.errors import OutOfMemory, UsageError
from punar.torch import replay
from punar.torch.reach import reached_by
from punar.torch.rescue import MOST_PATIENCE, PATIENCE, Ladder, is_out_of_memory
from punar.torch.state import StateSnapshot
from tests.torch.harness import Outcome, outcome, seed_all
from tests.torch.models import make_blocks

TOLD = pytest.mark.filterwarnings("ignore:a step ran out of memory")


class Failing(TorchDispatchMode):
    """Operator number ``at`` fails once, before it runs or after."""

    def __init__(self, at: int, *, is_after: bool = False) -> None:
        super().__init__()
        self.at, self.is_after, self.count = at, is_after, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_due = self.count == self.at
        self.count += 1
        if is_due and not self.is_after:
            raise MemoryError(f"before {func}")
        out = func(*args, **(kwargs or {}))
        if is_due:
            raise MemoryError(f"after {func}")
        return out


class Eventful(nn.Module):
    """Changes all that a step can change: running statistics, a cache, counters, every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)
        self.register_buffer("cache", torch.zeros(8))
        self.generator = torch.Generator().manual_seed(3)
        self.calls, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(random.random())
        noise = torch.rand(x.shape, generator=self.generator) * float(np.random.rand())
        hidden = nn.functional.dropout(self.norm(self.first(x + noise)).relu(), 0.3)
        out = self.second(hidden).tanh()
        self.cache.add_(out.detach().mean(0))
        self.cache = self.cache * 0.5
        return out


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """Each rescue collects garbage: what the other tests left need not be searched."""
    gc.freeze()
    yield
    gc.unfreeze()


def eventful_step(model: Eventful, x: Tensor) -> Tensor:
    """Two backward passes, the first of which writes into gradients that may be there already."""
    model(x[:16]).square().mean().backward()
    loss = model(x[16:]).square().mean()
    loss.backward()
    return loss


class Bench:
    """A model whose step can be run again and again from one state, plain and by a ``Remat``."""

    def __init__(self, budget: float | None) -> None:
        seed_all(0)
        self.model, self.x = Eventful(), torch.randn(40, 8)
        self.remat = punar.Remat(budget)
        eventful_step(self.model, self.x)
        self.before, self.state = StateSnapshot.take(self.model), self.model.generator.get_state()
        self.plain, self.operators = self.run(lambda step: step(), Failing(-1))

    def reset(self) -> None:
        self.before.restore(self.model)
        self.model.generator.set_state(self.state)
        self.model.calls, self.model.seen = 0, []

    def run(self, by: Callable[[Callable[[], Tensor]], Tensor], failing: Failing) -> tuple[Outcome, int]:
        """What a step leaves, and how many operators it had."""
        self.reset()
        model, x = self.model, self.x

        def step() -> Tensor:
            with failing:
                return eventful_step(model, x)

        loss = by(step)
        state = torch.Generator.get_state(model.generator).tolist()
        return outcome(model, loss, (model.calls, list(model.seen), state)), failing.count

    def fail(self, at: int, *, is_after: bool) -> list[str]:
        """Fails once, by a loose plan, and says what differs from a step that did not fail."""
        self.remat._ladder = Ladder()
        self.remat._session.loosen()
        found, _ = self.run(self.remat.step, Failing(at, is_after=is_after))
        assert self.remat.stats[-1].rescues == 1
        return found.differences(self.plain)


@TOLD
@pytest.mark.parametrize(("budget", "is_after"), [(None, False), (0.9, True)])
def test_a_failure_at_any_operator_leaves_what_a_step_leaves_that_did_not_fail(budget: float | None, is_after: bool) -> None:
    bench = Bench(budget)
    for _ in range(10):  # until its operators' times are learned, so that one frontier serves all
        assert bench.run(bench.remat.step, Failing(-1))[0].differences(bench.plain) == []
    found = {at: bench.fail(at, is_after=is_after) for at in range(bench.operators)}
    assert len(found) > 80
    assert {at: differences for at, differences in found.items() if differences} == {}


def test_the_differences_would_be_seen() -> None:
    """Without anything put back the same failures leave something else: the test above can fail."""
    bench = Bench(None)

    def twice(step: Callable[[], Tensor]) -> Tensor:
        with contextlib.suppress(MemoryError):
            step()
        return step()

    found, _ = bench.run(twice, Failing(60))
    kinds = {text.partition(":")[0] for text in found.differences(bench.plain)}
    assert kinds == {"loss", "gradients", "buffers", "random", "extra"}


def blocks_step(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return step


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def trained(remat: punar.Remat | None, *, count: int = 3, steps: int = 2, failing: tuple[int, Failing] | None = None) -> list[list[Tensor]]:
    """Gradients of each step of a small model; one of the steps may fail once."""
    seed_all(0)
    model, x = make_blocks(count), torch.randn(64, 32)
    step, found = blocks_step(model), []
    for number in range(steps):
        model.zero_grad()

        def run(x: Tensor, number: int = number) -> Tensor:
            with failing[1] if failing is not None and failing[0] == number else contextlib.nullcontext():
                return step(x)

        run(x) if remat is None else remat.step(run, x)
        found.append(gradients(model))
    return found


def same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(torch.equal(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


@TOLD
@pytest.mark.parametrize("at", [12, 24, 37, 60, 90])
def test_a_recording_that_fails_is_made_once_more_in_less(at: int) -> None:
    remat, plain = punar.Remat(), punar.Remat()
    found = trained(remat, steps=3, failing=(0, Failing(at)))
    assert same(found, trained(plain, steps=3))
    assert [stats.rescues for stats in remat.stats] == [1, 0, 0]
    assert [stats.is_traced for stats in remat.stats] == [True, False, False]
    assert [op.name for op in remat.trace.ops] == [op.name for op in plain.trace.ops]
    assert remat.plan.peak_bytes < plain.plan.peak_bytes
    assert remat.stats[-1].replayed_operators > 0


@TOLD
def test_a_recording_that_fails_at_its_limit_is_made_once_more_within_the_limit() -> None:
    """What it had when it failed is below the limit: what went over it was still to be made."""
    plain = punar.Remat()
    trained(plain)
    limit = plain.stats[0].measured_peak_bytes - 1
    remat = punar.Remat(limit=limit)
    trained(remat)
    assert [stats.rescues for stats in remat.stats] == [1, 0]
    assert [stats.plan.budget_bytes for stats in remat.stats if stats.plan] == [limit]


def test_a_failure_before_anything_was_recorded_is_raised() -> None:
    remat = punar.Remat()
    with pytest.raises(MemoryError, match="before aten") as caught:
        trained(remat, failing=(0, Failing(0)))
    assert "before anything was recorded" in caught.value.__notes__[0]
    assert [stats.rescues for stats in remat.stats] == [0]


@TOLD
def test_a_recording_that_fails_at_once_has_the_pass_before_it_tightened() -> None:
    """Nothing of the second pass can be dropped yet, but of the first, which obeys a plan."""

    def train(remat: punar.Remat | None, failing: Failing) -> list[Tensor]:
        seed_all(0)
        model, other, x = make_blocks(3), nn.Linear(32, 4), torch.randn(64, 32)

        def step(number: int) -> None:
            model.zero_grad()
            model(x).square().mean().backward()
            if number == 2:
                with failing:
                    scale = other.weight.exp()  # saves nothing before it has run
                loss = (other(x) * scale.sum()).square().mean()
                loss.backward()

        for number in range(3):
            step(number) if remat is None else remat.step(step, number)
        return gradients(model) + gradients(other)

    remat = punar.Remat()
    assert all(map(torch.equal, train(remat, Failing(0, is_after=True)), train(None, Failing(-1))))
    assert [stats.rescues for stats in remat.stats] == [0, 0, 1]
    assert remat.stats[-1].replayed_operators > 0


@TOLD
def test_a_failure_inside_a_replay_is_rescued(monkeypatch: pytest.MonkeyPatch) -> None:
    remat, run = punar.Remat(0.6), replay._call
    calls = iter(range(1000))

    def call(op: Any, tensors: list[Tensor]) -> Any:
        if next(calls) == 3:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )
        return run(op, tensors)

    monkeypatch.setattr(replay, "_call", call)
    assert same(trained(remat, steps=3), trained(None, steps=3))
    assert [stats.rescues for stats in remat.stats] == [0, 1, 0]


def test_memory_that_a_replayed_kernel_lacks_is_no_error_of_the_replay() -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no more")

    with torch.no_grad(), pytest.raises(MemoryError, match="no more"):
        replay._call(replay.RecordedOp(0, fail, 0), [])


# -- a limit on the CPU ------------------------------------------------------------------------------------------------------


@functools.cache
def measured() -> tuple[int, int, list[list[Tensor]]]:
    """The plain step's peak and the least, in bytes, and the plain gradients."""
    remat = punar.Remat()
    plain = trained(remat, count=6)
    traced = punar.Profile(trace=remat.trace)
    return remat.stats[-1].measured_peak_bytes, punar.solve(traced, budget="min").peak_bytes, plain


def test_a_block_beyond_its_limit_raises() -> None:
    peak_bytes, _, _ = measured()
    seed_all(0)
    model, x = make_blocks(6), torch.randn(64, 32)
    remat = punar.Remat(limit=peak_bytes // 2)
    with pytest.raises(OutOfMemory, match="give a tighter budget") as caught, remat:
        blocks_step(model)(x)
    assert caught.value.limit_bytes == peak_bytes // 2 < caught.value.needed_bytes
    assert isinstance(caught.value, MemoryError)


def test_a_block_within_its_limit_does_not_raise() -> None:
    peak_bytes, _, plain = measured()
    remat = punar.Remat(limit=peak_bytes)
    assert same(trained(remat, count=6), plain)
    assert [stats.rescues for stats in remat.stats] == [0, 0]


@TOLD
@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.floats(0.02, 0.95))
def test_steps_stay_within_any_limit_that_a_plan_reaches(share: float) -> None:
    peak_bytes, least_bytes, plain = measured()
    limit = least_bytes + int(share * (peak_bytes - least_bytes))
    remat = punar.Remat(budget=1.0)
    trained(remat, count=6, steps=1)
    remat.limit = remat._session.limit_bytes = limit
    assert same(trained(remat, count=6), plain)
    assert remat.stats[1].rescues > 0
    assert all(stats.measured_peak_bytes <= limit for stats in remat.stats[1:])


@TOLD
def test_a_limit_in_the_first_step_is_kept() -> None:
    peak_bytes, least_bytes, plain = measured()
    limit = least_bytes + (peak_bytes - least_bytes) * 3 // 4
    remat = punar.Remat(limit=limit)
    assert same(trained(remat, count=6), plain)
    assert remat.stats[0].rescues == 1
    assert all(stats.measured_peak_bytes <= limit for stats in remat.stats)


@TOLD
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.floats(0, 0.95), st.sampled_from([(64,), (16, 64)]), st.sampled_from([None, 1.0]))
def test_a_step_without_a_plan_stays_within_any_limit_that_a_plan_reaches(
    share: float, rows: tuple[int, ...], budget: float | None
) -> None:
    def train(remat: punar.Remat | None) -> list[Tensor]:
        seed_all(0)
        model = make_blocks(6)
        run = blocks_step(model)
        for count in (*rows, rows[-1]):
            x = torch.randn(count, 32)
            model.zero_grad()
            run(x) if remat is None else remat.step(run, x)
        return gradients(model)

    peak_bytes, least_bytes, _ = measured()
    limit = least_bytes + int(share * (peak_bytes - least_bytes))
    remat = punar.Remat(budget, limit=limit)
    assert all(map(torch.equal, train(remat), train(None)))
    assert sum(stats.rescues for stats in remat.stats) > 0
    assert all(stats.measured_peak_bytes <= limit for stats in remat.stats)


@TOLD
def test_a_recording_of_which_nothing_more_can_be_dropped_is_raised() -> None:
    _, least_bytes, _ = measured()
    seed_all(0)
    model, x, remat = make_blocks(6), torch.randn(64, 32), punar.Remat(limit=least_bytes // 2)
    before = StateSnapshot.take(model)
    with pytest.raises(OutOfMemory) as caught:
        remat.step(blocks_step(model), x)
    assert "dropped all that it could" in caught.value.__notes__[-1]
    assert remat.stats[-1].rescues > 0
    assert StateSnapshot.take(model).differences(before) == []


@pytest.mark.parametrize("limit", [0.5, "min", "auto", 0, "much"])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(punar.BudgetError, match=r"give|positive|bytes"):
        punar.Remat(limit=limit)


# -- where there is no tighter plan ------------------------------------------------------------------------------------------


class Always(TorchDispatchMode):
    """Every step fails at its 30th operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        if self.count % 30 == 0:
            raise MemoryError(f"failure {self.count // 30}")
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Always:
        self.count = self.count // 30 * 30 if hasattr(self, "count") else 0
        return super().__enter__()


@TOLD
def test_the_first_error_is_raised_with_what_held_the_memory_and_all_is_put_back() -> None:
    bench, always = Bench(None), Always()
    for _ in range(2):
        bench.run(bench.remat.step, Failing(-1))
    with pytest.raises(MemoryError, match=r"^failure 1\n") as caught:
        bench.run(bench.remat.step, always)
    where, note = caught.value.__notes__
    assert "in eventful_step" in where
    assert "no tighter plan than the one that failed" in note
    assert "aten." in note
    assert "are resident" in note
    assert bench.remat.stats[-1].rescues == always.count // 30 - 1 > 0
    model, seen = bench.model, (bench.model.calls, bench.model.seen, bench.model.generator.get_state().tolist())
    found = outcome(model, torch.zeros(()), seen)
    bench.reset()
    expected = outcome(model, torch.zeros(()), (0, [], bench.state.tolist()))
    assert found.differences(expected) == []


@TOLD
def test_each_failure_takes_the_next_tighter_plan() -> None:
    seed_all(0)
    model, x, failures = make_blocks(6), torch.randn(256, 32), [Failing(-1), *(Failing(60) for _ in range(2)), Failing(-1)]
    remat, plans = punar.Remat(), []

    def step(x: Tensor) -> Tensor:
        plans.append(remat.plan)
        model.zero_grad()
        with failures.pop(0):
            return blocks_step(model)(x)

    for _ in range(2):
        remat.step(step, x)
    peaks = [plan.peak_bytes for plan in plans[1:]]
    times = [plan.time_ns for plan in plans[1:]]
    assert peaks == sorted(set(peaks), reverse=True)
    assert times == sorted(times)
    assert remat.stats[-1].rescues == 2


@TOLD
def test_an_error_that_was_being_handled_before_the_step_keeps_its_traceback() -> None:
    bench = Bench(None)
    bench.run(bench.remat.step, Failing(-1))
    before = KeyError("before")

    def run_while_handling() -> None:
        try:
            raise before
        except KeyError:
            bench.run(bench.remat.step, Always())

    with pytest.raises(MemoryError) as caught:
        run_while_handling()
    assert caught.value.__context__ is before
    assert before.__traceback__ is not None


def test_a_given_plan_is_not_replaced() -> None:
    seed_all(0)
    model, x = make_blocks(2), torch.randn(64, 32)
    plan = punar.solve(punar.profile(model, x, lambda model, x: model(x).square().mean()), budget=0.8)
    remat, failing = punar.Remat(plan=plan), Failing(20)

    def step(x: Tensor) -> Tensor:
        with failing:
            return blocks_step(model)(x)

    with pytest.raises(MemoryError, match="before aten") as caught:
        remat.step(step, x)
    assert "a plan that was given" in caught.value.__notes__[0]


def test_a_process_among_others_does_not_repeat_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(MemoryError, match="before aten") as caught:
        trained(punar.Remat(), failing=(0, Failing(40)))
    assert "other processes" in caught.value.__notes__[0]


@pytest.mark.parametrize("kind", [KeyError, RuntimeError, KeyboardInterrupt])
def test_other_errors_pass_as_they_are(kind: type[BaseException]) -> None:
    remat, model, calls = punar.Remat(), make_blocks(1), []

    @remat.rescued
    def fail(x: Tensor) -> None:
        calls.append(model(x))
        raise kind("mine")

    for _ in range(2):
        with pytest.raises(kind, match=r"mine['\"]?$") as caught:
            fail(torch.randn(8, 32))
        assert not hasattr(caught.value, "__notes__")
        assert caught.traceback[-1].frame.f_locals["x"].shape == (8, 32)
    assert (fail.__name__, len(calls), len(remat.stats)) == ("fail", 2, 2)
    assert trained(remat)  # and it goes on


# -- how it goes on ----------------------------------------------------------------------------------------------------------


def test_it_is_told_once_and_looser_plans_come_back() -> None:
    seed_all(0)
    model, x = make_blocks(3), torch.randn(64, 32)
    remat = punar.Remat()
    remat._ladder.patience = 3
    fail_at: list[Failing] = []

    @remat.rescued
    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        with fail_at.pop() if fail_at else contextlib.nullcontext():
            return blocks_step(model)(x)

    for _ in range(2):
        step(x)
    fail_at.append(Failing(20))
    with pytest.warns(UserWarning, match="ran out of memory .*under a plan of .* predicted") as told:
        step(x)
    assert len(told) == 1
    tight = remat.stats[-1].predicted_peak_bytes
    for _ in range(3):
        step(x)
    step(x)
    peaks = [stats.predicted_peak_bytes for stats in remat.stats]
    assert peaks[2:6] == [tight] * 4
    assert tight < peaks[1] == peaks[6]
    fail_at.append(Failing(20))
    step(x)  # told before: a second warning would be an error here
    assert remat.stats[-1].rescues == 1
    assert remat._ladder.patience == 6


@given(st.lists(st.booleans(), max_size=200))
def test_the_ladder_loosens_after_quiet_steps_only(steps: list[bool]) -> None:
    ladder, quiet = Ladder(), 0
    for number, is_failed in enumerate(steps):
        if is_failed:
            ladder.tighten(1000 - number)
            quiet = 0
            continue
        before, quiet = len(ladder.ceilings), quiet + 1
        is_looser = ladder.rest()
        assert is_looser == (len(ladder.ceilings) < before)
        assert not is_looser or quiet >= PATIENCE
        quiet = 0 if is_looser else quiet
    assert PATIENCE <= ladder.patience <= MOST_PATIENCE


def test_a_trial_that_fails_doubles_the_patience_and_one_that_holds_ends_that() -> None:
    ladder = Ladder()
    ladder.tighten(100)
    assert [ladder.rest() for _ in range(PATIENCE)] == [False] * (PATIENCE - 1) + [True]
    assert ladder.ceiling_bytes is None
    ladder.tighten(100)
    assert (ladder.patience, ladder.ceiling_bytes) == (2 * PATIENCE, 100)
    for _ in range(4 * PATIENCE):
        ladder.rest()
    assert (ladder.patience, ladder.ceiling_bytes) == (PATIENCE, None)


@TOLD
def test_nothing_of_the_failed_attempt_lives_in_the_next_one() -> None:
    seed_all(0)
    model, x = make_blocks(3), torch.randn(64, 32)
    remat, made, alive, failing = punar.Remat(), [], [], Failing(20)

    def step(x: Tensor) -> Tensor:
        alive.append(sum(reference() is not None for reference in made))
        hidden = x * 2
        made.append(weakref.ref(hidden))

        def run() -> Tensor:  # a cleared frame still holds its function, and that what it closes over
            return blocks_step(model)(hidden)

        with failing if len(made) > 1 else contextlib.nullcontext():
            return run()

    for _ in range(2):
        remat.step(step, x)
    assert alive == [0, 0, 0]
    assert (model.zero_grad(), remat._session.meter.live) == (None, 0)


def test_an_optimizer_inside_is_refused_before_it_changes_anything() -> None:
    seed_all(0)
    model, x = make_blocks(1), torch.randn(8, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]

    def step(x: Tensor) -> None:
        blocks_step(model)(x)
        optimizer.step()

    with pytest.raises(UsageError, match=r"SGD\.step\(\) inside it.*Step the optimizer after"):
        punar.Remat().step(step, x)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.step()
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_optimizer_in_a_hook_of_backward_is_refused() -> None:
    seed_all(0)
    model, x = make_blocks(1), torch.randn(8, 32)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=1.0)
        p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with pytest.raises(UsageError, match=r"SGD\.step\(\) inside it"):
        punar.Remat().step(blocks_step(model), x)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@TOLD
def test_a_thread_beside_a_step_is_rescued_by_itself_and_may_step_its_optimizer() -> None:
    plain, found = trained(None), []
    model, other, x = make_blocks(3), nn.Linear(2, 2), torch.randn(64, 32)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    other(torch.ones(1, 2)).sum().backward()
    ours, theirs, failures = punar.Remat(), punar.Remat(), [Failing(-1), Failing(20), Failing(-1)]

    def beside() -> None:
        found.append(trained(theirs, failing=(1, Failing(30))))
        optimizer.step()

    def step(x: Tensor) -> Tensor:
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        model.zero_grad()
        with failures.pop(0):
            return blocks_step(model)(x)

    for _ in range(2):
        ours.step(step, x)
    assert ours.stats[-1].rescues == theirs.stats[1].rescues == 1
    ours_found = gradients(model)
    trained(None)
    model.zero_grad()
    blocks_step(model)(x)
    assert same([ours_found], [gradients(model)])
    assert len(found) == 3
    assert all(same(each, plain) for each in found)


class Compiled(nn.Module):
    """Changes buffers where no operator is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.rest = torch.compile(nn.Sequential(nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)), backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).sin().cos().exp().sin()
        out: Tensor = self.rest(hidden)
        return out


class Resizing(nn.Module):
    """Changes sizes of what is there, and writes through views and by ``out=``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cache, self.total = nn.Linear(8, 8), torch.ones(4, 4), torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x).sin().cos().exp()
        self.cache[1:].t().mul_(2)
        torch.cumsum(self.total * self.cache.sum(), 0, out=self.total)
        self.cache.resize_(len(self.cache) + 1, 4)[-1] = self.total
        return out * self.total.mean()


class Closed(dict[str, int]):
    """Is filled once, as some libraries' outputs are."""

    def copy(self) -> Any:
        raise TypeError("closed")

    update = clear = copy  # type: ignore[assignment]


class Recording(nn.Module):
    """Changes attributes that hold others, and draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(8, 8), {"sums": [deque([0])], "kinds": {1}}
        self.python, self.numpy, self.closed = random.Random(1), np.random.default_rng(2), Closed(a=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x * (self.python.random() + self.numpy.random())).sin().cos().exp()
        self.seen["sums"][0].append(len(self.seen["kinds"]))
        self.seen["kinds"].add(len(self.seen["sums"][0]))
        return out


@TOLD
@pytest.mark.parametrize("kind", [Compiled, Resizing, Recording])
def test_what_such_modules_change_is_put_back(kind: type[nn.Module]) -> None:
    def leave(remat: punar.Remat | None) -> list[Outcome]:
        seed_all(0)
        model, x, found = kind(), torch.randn(64, 8), []
        step = blocks_step(model)

        def run(x: Tensor, failing: Failing) -> Tensor:
            with failing:
                return step(x)

        for number in range(3):
            failing = Failing(20 if number == 2 and remat is not None else -1)
            loss = run(x, failing) if remat is None else remat.step(run, x, failing)
            others = {name: str(item) for name, item in vars(model).items() if name in ("seen", "cache", "total")}
            found.append(outcome(model, loss, others))
        return found

    remat = punar.Remat()
    assert [a.differences(b) for a, b in zip(leave(remat), leave(None), strict=True)] == [[], [], []]
    assert remat.stats[-1].rescues == 1


@TOLD
def test_what_autocast_cached_in_the_failed_attempt_is_freed() -> None:
    seed_all(0)
    model, x, live = make_blocks(3), torch.randn(64, 32), []
    remat, failures = punar.Remat(), [Failing(-1), Failing(60), Failing(-1)]

    def step(x: Tensor) -> None:
        live.append(remat._session.meter.live)
        with failures.pop(0):
            blocks_step(model)(x)

    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            remat.step(step, x)
        model.zero_grad()
    assert live == [0, 0, 0]


@TOLD
def test_batch_and_sparse_gradients_that_were_written_into_are_put_back() -> None:
    def leave(remat: punar.Remat | None) -> list[Tensor]:
        seed_all(0)
        table, batch = nn.Embedding(9, 4, sparse=True), torch.arange(6)
        weight = torch.ones(4, requires_grad=True)
        failing = Failing(26)

        def step(batch: Tensor, failing: contextlib.AbstractContextManager[Any]) -> None:
            with failing:
                batch.add_(1)
                (table(batch + 0) * weight).exp().sin().cos().square().sum().backward()

        for number in range(3):
            mode = failing if number == 2 and remat is not None else contextlib.nullcontext()
            step(batch, mode) if remat is None else remat.step(step, batch, mode)
        assert table.weight.grad is not None
        assert weight.grad is not None
        return [batch, table.weight.grad.to_dense(), weight.grad]

    remat = punar.Remat()
    assert all(torch.equal(a, b) for a, b in zip(leave(remat), leave(None), strict=True))
    assert remat.stats[-1].rescues == 1


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (OutOfMemory("limit"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_which_errors_are_out_of_memory(error: BaseException, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


NAMED = nn.Linear(1, 1)


class Trainer:
    def __init__(self) -> None:
        self.model, self.others = nn.Linear(1, 1), [nn.Linear(1, 1)]

    def step(self, batch: Tensor) -> Tensor:
        return self.model(batch)


def names_a_global(batch: Tensor) -> Tensor:
    return NAMED(batch)


def calls_another(batch: Tensor) -> Tensor:
    return (lambda: names_a_global(batch))()


def finders() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], list[nn.Module]]]:
    inner, trainer = nn.Linear(1, 1), Trainer()
    yield "closure", lambda x: inner(x), (), [inner]
    yield "argument", print, ({"model": inner},), [inner]
    yield "default", lambda x, model=inner: model(x), (), [inner]
    yield "global", names_a_global, (), [NAMED]
    yield "called", calls_another, (), [NAMED]
    yield "method", trainer.step, (), [trainer.model, trainer.others[0]]
    yield "module", inner.forward, (), [inner]
    yield "partial", functools.partial(print, inner), (), [inner]
    yield "after many", print, ([torch.ones(1) for _ in range(200)], list(range(10**6)), inner), [inner]
    yield "attribute", print, (trainer,), [trainer.model, trainer.others[0]]
    yield "none", print, (1,), []


@pytest.mark.parametrize(("function", "arguments", "expected"), [pytest.param(*case, id=name) for name, *case in finders()])
def test_modules_are_found_by_name(function: Callable[..., Any], arguments: tuple[Any, ...], expected: list[nn.Module]) -> None:
    assert set(reached_by(function, arguments).modules) == set(expected)


class Rated:
    """A trainer that has its scheduler step in the step that may be repeated."""

    def __init__(self, make: Callable[[torch.optim.Optimizer], LRScheduler]) -> None:
        seed_all(0)
        self.model = make_blocks(2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = make(self.optimizer)

    def step(self, x: Tensor) -> Tensor:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(1.0)
        else:
            self.scheduler.step()
        loss = self.model(x).square().mean()
        loss.backward()
        return loss.detach()

    def state(self) -> tuple[Any, ...]:
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups]
        return groups, self.scheduler.state_dict(), [parameter.tolist() for parameter in self.model.parameters()]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "step": lambda optimizer: StepLR(optimizer, 1),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=10),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
    "sequential": lambda optimizer: SequentialLR(optimizer, [StepLR(optimizer, 1), ExponentialLR(optimizer, 0.5)], [2]),
    "chained": lambda optimizer: ChainedScheduler([StepLR(optimizer, 1), ExponentialLR(optimizer, 0.5)]),
}


@TOLD
@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:.*verbose", "ignore:To get the last learning rate")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_steps_in_the_step_steps_once(name: str) -> None:
    rescued, plain = Rated(SCHEDULERS[name]), Rated(SCHEDULERS[name])
    remat, x = punar.Remat(), torch.randn(64, 32)
    for number in range(4):
        for trainer in (rescued, plain):
            state = torch.get_rng_state()
            trainer.model.zero_grad()
            with Failing(60) if trainer is rescued and number == 2 else contextlib.nullcontext():
                remat.step(trainer.step, x) if trainer is rescued else trainer.step(x)
            trainer.optimizer.step()
            if trainer is rescued:
                torch.set_rng_state(state)
        assert rescued.state() == plain.state()
    assert [stats.rescues for stats in remat.stats] == [0, 0, 1, 0]


class Loop:
    def __init__(self) -> None:
        self.batches = iter([torch.ones(1)])
        self.model = NAMED

    def takes(self) -> Tensor:
        return self.model(next(self.batches))

    def is_given(self, batch: Tensor) -> Tensor:
        return self.model(batch)


TAKEN = (torch.ones(1) for _ in range(2))


def takes_from_a_global() -> Tensor:
    return NAMED(next(TAKEN))


def steps_that_reach_iterators() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], int]]:
    inner = map(torch.ones, [(1,)])
    yield "argument", print, (iter([1]),), 1
    yield "in an argument", print, ({"batches": enumerate([1])},), 1
    yield "closure", lambda: NAMED(next(inner)), (), 1
    yield "global", takes_from_a_global, (), 1
    yield "attribute", Loop().takes, (), 1
    yield "attribute of no use", Loop().is_given, (torch.ones(1),), 0
    yield "list", print, ([torch.ones(1)],), 0
    yield "loader", print, (torch.utils.data.DataLoader(range(2)),), 0
    yield "iterator of a loader", print, (iter(torch.utils.data.DataLoader(range(2))),), 1
    yield "file", print, (sys.stdout, io.StringIO()), 0


@pytest.mark.parametrize(("function", "arguments", "count"), [pytest.param(*case, id=name) for name, *case in steps_that_reach_iterators()])
def test_iterators_are_found_by_name(function: Callable[..., Any], arguments: tuple[Any, ...], count: int) -> None:
    assert len(reached_by(function, arguments).iterators) == count


def test_a_step_that_takes_from_an_iterator_is_not_repeated() -> None:
    seed_all(0)
    model, failures, remat = make_blocks(3), [Failing(40), Failing(-1)], punar.Remat()

    def step(batches: Iterator[Tensor]) -> int:
        count = 0
        with failures.pop():
            for batch in batches:
                blocks_step(model)(batch)
                count += 1
        return count

    def batches() -> Iterator[Tensor]:
        yield from torch.randn(2, 16, 32)

    with pytest.warns(UserWarning, match=r"\(generator\).*give the step a list"):
        assert remat.step(step, batches()) == 2
    with pytest.raises(MemoryError) as caught:
        remat.step(step, batches())  # told before: a second warning would be an error here
    assert "would train on others" in caught.value.__notes__[-1]


class Box:
    """Keeps its model where it is not found."""

    def __init__(self, model: Eventful) -> None:
        self.hidden = {1: weakref.ref(model)}

    def __call__(self, x: Tensor, failing: Failing) -> Tensor:
        model = self.hidden[1]()
        assert model is not None
        with failing:
            return eventful_step(model, x)


@TOLD
@pytest.mark.parametrize(("is_named", "calls"), [(True, 4), (False, 5)])
def test_modules_that_are_not_found_are_named(is_named: bool, calls: int) -> None:
    seed_all(0)
    model = Eventful()
    box, remat = Box(model), punar.Remat(modules=model if is_named else ())
    for failing in (Failing(-1), Failing(60)):
        remat.step(box, torch.randn(40, 8), failing)
    assert (remat.stats[-1].rescues, model.calls) == (1, calls)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(UsageError, match=r"found something of type int among them; give torch\.nn\.Modules"):
        punar.Remat(modules=[3])  # type: ignore[list-item]


def test_warnings_are_left_as_they_were() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trained(punar.Remat())
    assert seen == []


async def coroutine() -> None: ...


def generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("function", "said"),
    [(5, "something of type int"), (None, "something of type NoneType"), (coroutine, "runs nothing yet"), (generator, "runs nothing yet")],
)
def test_what_is_no_step_is_refused(function: Any, said: str) -> None:
    remat = punar.Remat()
    for run in (remat.step, remat.rescued):
        with pytest.raises(UsageError, match=said):
            run(function)


@pytest.mark.parametrize("limit", [0, -1, 0.5, "min", "auto", "much"])
def test_a_limit_is_bytes(limit: Any) -> None:
    with pytest.raises(punar.BudgetError, match=r"limit .* is no positive number of bytes; give an int"):
        punar.Remat(limit=limit)
