"""Is it noticed when steps no longer do what their plan says, and does another plan come of it, which goes again where it is worse?"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import punar
from punar.errors import PlanError
from punar.ir import Trace
from punar.plan import Plan
from punar.torch.drift import TOLERANCE, WINDOW, Drift, Pass, Replan, Watch
from tests.torch.models import WIDTH, make_blocks


class Clock:
    """Stands for the clock: each look at it takes a microsecond, and whatever else takes time says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1_000
        return self.now


class Timed(nn.Module):
    """A model whose Python code takes ``takes_ns`` by the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.blocks, self.clock, self.takes_ns = make_blocks(2), clock, 10_000_000

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.takes_ns
        return self.blocks(x)


class Run:
    """A training run by a clock of its own, and the plain one beside it."""

    def __init__(self, clock: Clock, **options: object) -> None:
        self.model, self.plain = Timed(clock), Timed(clock)
        self.plain.load_state_dict(self.model.state_dict())
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.model, self.plain)]
        self.batch = torch.randn(256, WIDTH)
        self.remat = punar.Remat(**({"budget": 0.7} | options))  # type: ignore[arg-type]
        self.drifts = self.remat._session.drifts

    def steps(self, count: int, before: Callable[[], None] = lambda: None) -> None:
        for _ in range(count):
            state = torch.random.get_rng_state()
            self.plain(self.batch).square().mean().backward()
            torch.random.set_rng_state(state)
            before()
            with self.remat:
                self.model(self.batch).square().mean().backward()
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(self.model.parameters(), self.plain.parameters(), strict=True))
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def until(self, event: str) -> None:
        while event not in [event for _, event in self.events]:
            self.steps(1, lambda: wait(self))

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(drift.kind, drift.event) for drift in self.remat.drifts]

    def settle(self) -> None:
        """Until what steps take is known."""
        self.steps(36)
        assert self.events == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", clock)
    return clock


@pytest.fixture
def run(clock: Clock) -> Run:
    return Run(clock)


def always(plan: Callable[[], Plan]) -> Replan:
    """Has the same plan made whatever is asked."""
    return lambda trace, extra_bytes: plan


def other_plan(run: Run, **changes: object) -> Plan:
    """Another one for the same step, within its budget, that says to be faster."""
    trace, old = run.remat.trace, run.remat.plan
    assert trace is not None
    assert old is not None
    new = punar.solve(punar.Profile(trace=trace), budget=0.9)
    assert new.hold_from != old.hold_from
    return replace(new, gap_ns=0, **changes)  # type: ignore[arg-type]


def wait(run: Run) -> None:
    planning = run.drifts.planning
    if planning is not None:
        planning._thread.join(60)


def test_steps_as_predicted_are_no_drift(run: Run) -> None:
    run.settle()
    run.steps(40)
    assert run.events == []
    assert {stats.drifts for stats in run.remat.stats} == {0}


def test_slower_steps_are_told_once_measured_anew_and_planned_anew(run: Run) -> None:
    run.settle()
    run.model.takes_ns *= 2
    with pytest.warns(UserWarning, match=r"time of a step .* median of the last 9.*Operators are timed anew") as told:
        run.steps(40, lambda: wait(run))
    run.steps(10, lambda: wait(run))
    assert len(told) == 1
    assert run.events == [("time", "drifted"), ("time", "kept")]  # all of it in the model's own code: another plan is no faster
    assert sum(stats.drifts for stats in run.remat.stats) == 2
    plan = run.remat.plan
    assert plan is not None
    assert abs(run.remat.stats[-1].time_ns / plan.step_time_ns - 1) < TOLERANCE / 2  # and now is predicted
    assert "2 notes of drift, the last: step" in str(run.remat.report())
    assert run.remat.report().to_dict()["drifts"] == [str(drift) for drift in run.remat.drifts]


def test_faster_steps_are_no_reason_to_warn(run: Run) -> None:
    run.settle()
    run.drifts.replan = None
    run.model.takes_ns //= 2
    run.steps(30)
    assert run.events == [("time", "drifted")]


def test_what_operators_took_before_counts_no_more(run: Run) -> None:
    run.settle()
    script = next(iter(run.remat._session.scripts))
    ledger = run.remat._session.ledger
    assert script.trace is not None
    op = script.trace.ops[-1]
    ledger.samples.update({key: type(times)([10**9] * len(times), maxlen=27) for key, times in ledger.samples.items()})
    run.drifts.replan = None
    run.model.takes_ns *= 2
    with pytest.warns(UserWarning, match="no longer says"):
        run.steps(30)
    assert max(ledger.times_of(op)) < 10**6


def test_a_better_plan_is_obeyed_when_it_is_there_and_stays(run: Run) -> None:
    run.settle()
    old, new = run.remat.plan, other_plan(run)
    run.drifts.replan = always(lambda: new)
    run.model.takes_ns *= 2
    with pytest.warns(UserWarning, match="no longer says"):
        run.steps(20, lambda: wait(run))
    run.steps(20)
    assert run.events == [("time", "drifted"), ("time", "replanned"), ("time", "accepted")]
    assert run.remat.plan.hold_from == new.hold_from != old.hold_from


def test_no_step_waits_for_a_plan(run: Run) -> None:
    run.settle()
    is_wanted = threading.Event()
    plan = other_plan(run)

    def slow() -> Plan:
        is_wanted.wait(60)
        return plan

    run.drifts.replan = always(slow)
    run.model.takes_ns *= 2
    with pytest.warns(UserWarning, match="no longer says"):
        run.steps(30)
    assert run.events == [("time", "drifted")]
    is_wanted.set()
    wait(run)
    run.steps(1)
    assert run.events == [("time", "drifted"), ("time", "replanned")]


@pytest.mark.filterwarnings("ignore:punar's plan no longer says")
def test_what_drifts_again_while_a_plan_is_made_gets_one_by_its_last_times(run: Run, clock: Clock) -> None:
    run.settle()
    first, asked = threading.Event(), []

    def replan(trace: Trace, extra_bytes: int) -> Callable[[], Plan]:
        asked.append(trace)

        def make() -> Plan:
            assert first.wait(60)
            return replace(other_plan(run), plain_time_ns=trace.plain_time_ns)

        return make

    run.drifts.replan = replan
    run.model.takes_ns *= 4
    while not asked:
        run.steps(1)
    (script,) = run.remat._session.scripts
    run.drifts.plan_anew(script, replace(script.retimed, overhead_ns=77))
    run.steps(2)
    assert len(asked) == 1
    first.set()
    wait(run)
    before = run.remat.plan
    run.steps(1)
    assert [trace.overhead_ns == 77 for trace in asked] == [False, True]
    assert run.remat.plan.hold_from == before.hold_from  # the plan made by the older times is not obeyed
    wait(run)
    run.steps(1)
    assert run.remat.plan.hold_from != before.hold_from


def test_a_slower_plan_is_rolled_back(run: Run) -> None:
    run.settle()
    old, new = run.remat.plan, other_plan(run)
    run.drifts.replan = always(lambda: new)
    run.model.takes_ns *= 2

    def slow_down() -> None:
        wait(run)
        is_new = any(event == "replanned" for _, event in run.events)
        run.model.takes_ns = 30_000_000 if is_new and ("time", "rolled back") not in run.events else 20_000_000

    with pytest.warns(UserWarning, match="no longer says"):
        run.steps(100, slow_down)
    assert run.events[:3] == [("time", "drifted"), ("time", "replanned"), ("time", "rolled back")]
    assert run.remat.plan.hold_from == old.hold_from
    assert run.remat.stats[-1].plan.hold_from == old.hold_from


def test_a_higher_plan_is_rolled_back(run: Run) -> None:
    run.settle()
    old = run.remat.plan
    new = other_plan(run)
    low = replace(new, peak_bytes=old.peak_bytes // 2, budget_bytes=old.budget_bytes)
    run.drifts.replan = always(lambda: low)
    run.model.takes_ns *= 2
    with pytest.warns(UserWarning, match="no longer says"):
        run.steps(30, lambda: wait(run))
    assert run.events[:4] == [("time", "drifted"), ("time", "replanned"), ("peak", "drifted"), ("peak", "rolled back")]
    assert run.remat.plan.hold_from == old.hold_from


def test_a_plan_that_cannot_be_made_changes_nothing(run: Run) -> None:
    run.settle()
    old = run.remat.plan

    def fail() -> Plan:
        raise PlanError("none to be had")

    run.drifts.replan = always(fail)
    run.model.takes_ns *= 2
    with pytest.warns(UserWarning, match="no longer says"):
        run.steps(30, lambda: wait(run))
    assert run.events == [("time", "drifted"), ("time", "not replanned")]
    assert run.remat.plan.hold_from == old.hold_from


def test_one_script_is_measured_anew_ever_more_seldom(run: Run) -> None:
    run.settle()
    run.drifts.replan = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            run.model.takes_ns *= 2
            run.steps(40)
    steps = [drift.step for drift in run.remat.drifts]
    assert 2 <= len(steps) <= 3
    assert all(b - a >= 32 for a, b in pairwise(steps))


def test_a_plan_that_was_given_is_obeyed_whatever_it_takes(clock: Clock) -> None:
    plan = punar.solve(punar.profile(make_blocks(2), torch.randn(256, WIDTH), lambda m, b: m(b).square().mean()), budget=0.7)
    run = Run(clock, budget=None, plan=plan)
    run.steps(30)
    run.model.takes_ns *= 2
    run.steps(40)
    assert run.events == []


def test_what_was_rescued_is_planned_anew_under_its_ceiling(clock: Clock) -> None:
    """Where no budget was given there is still what a step that ran out of memory may reach."""
    run = Run(clock, budget=None)
    run.steps(3)
    remat, trace = run.remat, run.remat.trace
    assert trace is not None
    with pytest.raises(PlanError, match="found neither a budget nor a limit"):
        remat._replan(trace, 0)
    assert remat.plan is not None
    ceiling_bytes = int(0.8 * remat.plan.peak_bytes)
    remat._ladder.tighten(ceiling_bytes)
    plan = remat._replan(trace, 64)()
    assert remat.plan.peak_bytes > ceiling_bytes >= plan.peak_bytes
    assert plan.replayed_ops > 0


def test_a_tighter_budget_forgets_what_could_be_gone_back_to(run: Run) -> None:
    run.settle()
    new = other_plan(run)
    run.drifts.replan = always(lambda: new)
    run.model.takes_ns *= 2
    with pytest.warns(UserWarning, match="no longer says"):
        run.until("replanned")
    (script,) = run.remat._session.scripts
    assert script.trial is not None
    run.remat._session.loosen()
    assert script.trial is None


@given(
    times=st.lists(st.integers(1, 10**12), min_size=WINDOW, max_size=WINDOW),
    predicted=st.integers(1, 10**12),
    replayed=st.integers(0, 100),
    asked=st.integers(0, 100),
)
def test_drift_is_the_median_beyond_the_tolerance(times: list[int], predicted: int, replayed: int, asked: int) -> None:
    watch = Watch()
    for time_ns in times:
        watch.add(Pass(time_ns=time_ns, replayed=replayed), is_rest=True)

    class Said:
        step_time_ns, replayed_ops, moved_bytes = predicted, asked, 0

    found = {drift.kind for drift in watch.beyond(Said())}  # type: ignore[arg-type]
    middle = sorted(times)[WINDOW // 2]
    assert ("time" in found) == (middle > 1.25 * predicted or middle < 0.75 * predicted)
    assert ("replays" in found) == (abs(replayed - asked) > 0.05 * asked)
    assert "moved" not in found


def test_passes_of_the_other_kind_are_not_compared() -> None:
    watch = Watch()
    for _ in range(WINDOW - 1):
        watch.add(Pass(time_ns=1), is_rest=False)
    watch.add(Pass(time_ns=1), is_rest=True)
    assert not watch.is_full


def test_a_note_says_its_units() -> None:
    assert str(Drift(kind="peak", event="drifted", measured=2048, predicted=1024, step=7)) == (
        "step 7: peak 2.0 KiB measured, 1.0 KiB predicted: beyond the tolerance"
    )
    assert str(Drift(kind="replays", event="kept", measured=3, predicted=2)).startswith(
        "step 0: operators replayed 3 measured, 2 predicted"
    )
