"""Every solver, every problem: what a plan says is what the simulator finds, and it fits."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from punar.errors import InfeasibleBudget
from punar.ir import Trace
from punar.plan import Plan, simulate
from punar.plan.bound import bound
from punar.solvers import frontier, frontier_points, least, solve
from tests.solvers.problems import BUILDERS, named, small_traces
from tests.synthetic import chain

SIMPLE = ("none", "full", "every:2", "every:3", "sqrt", "selective", "greedy", "chen-greedy")
ALL = (*SIMPLE, "auto", "revolve", "rotor{units=20}", "dtr")
FRACTIONS = (0.25, 0.5, 0.75, 1.0)

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def budgets(trace: Trace) -> list[int]:
    plain = simulate(trace, [0] * len(trace.values)).peak_bytes
    return [int(trace.resident_bytes + (plain - trace.resident_bytes) * f) for f in FRACTIONS]


def answer(trace: Trace, budget: int, solver: str) -> Plan | None:
    """The plan, checked against the simulator and the bound; or None where the solver has none, and says that it needs more."""
    plain = simulate(trace, [0] * len(trace.values)).peak_bytes
    try:
        plan = solve(trace, budget, solver)
    except InfeasibleBudget as error:
        needed, asked = error.least_bytes, error.budget_bytes
    else:
        judged = simulate(trace, plan.hold_from)
        assert plan.peak_bytes == judged.peak_bytes <= budget
        assert plan.time_ns == judged.time_ns >= bound(trace, budget)
        assert plan.plain_peak_bytes == plain
        return plan
    assert needed > asked == budget
    return None


@pytest.mark.parametrize("problem", BUILDERS)
@pytest.mark.parametrize("solver", ALL)
def test_a_plan_fits_its_budget_and_is_judged_by_the_simulator(problem: str, solver: str) -> None:
    trace = named(problem)
    answers = [answer(trace, budget, solver) for budget in budgets(trace)]
    if solver in ("none", "greedy", "auto", "revolve", "rotor{units=20}", "dtr"):
        assert answers[-1] is not None


@pytest.mark.parametrize("problem", BUILDERS)
def test_auto_loses_to_none_of_the_others(problem: str) -> None:
    trace = named(problem)
    for budget in budgets(trace):
        for solver in SIMPLE:
            try:
                other = solve(trace, budget, solver)
            except InfeasibleBudget:
                continue
            assert solve(trace, budget).time_ns <= other.time_ns, (solver, budget)


@pytest.mark.parametrize("problem", BUILDERS)
def test_more_budget_is_never_slower(problem: str) -> None:
    trace = named(problem)
    low, high = least(trace).peak_bytes, simulate(trace, [0] * len(trace.values)).peak_bytes
    times = [solve(trace, low + (high - low) * k // 40).time_ns for k in range(41)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == trace.plain_time_ns


@pytest.mark.parametrize("problem", BUILDERS)
def test_the_frontier_rises_in_peak_and_falls_in_time(problem: str) -> None:
    plans = frontier(named(problem))
    peaks, times = [p.peak_bytes for p in plans], [p.time_ns for p in plans]
    assert peaks == sorted(set(peaks))
    assert times == sorted(set(times), reverse=True)
    assert plans[0] == least(named(problem))
    assert plans[-1].time_ns == plans[-1].plain_time_ns


@pytest.mark.parametrize("problem", BUILDERS)
def test_planning_is_deterministic(problem: str) -> None:
    first, second = BUILDERS[problem](), BUILDERS[problem]()
    assert first is not second
    assert frontier(first) == frontier(second)


@few
@given(small_traces(), st.sampled_from(ALL), st.floats(0.3, 1.0))
def test_on_random_graphs(trace: Trace, solver: str, fraction: float) -> None:
    plain = simulate(trace, [0] * len(trace.values)).peak_bytes
    plan = answer(trace, int(plain * fraction), solver)
    assert plan is not None or fraction < 1 or solver in SIMPLE[1:] or solver == "revolve"


@pytest.mark.parametrize("seed", range(12))
def test_plans_a_byte_apart_end_the_search(seed: int) -> None:
    """Between them there is no budget to look at."""
    draw = random.Random(seed)
    trace = chain([draw.randrange(1, 40) for _ in range(draw.randrange(3, 14))], overhead_ns=draw.choice([0, 500]))
    assert frontier_points(trace)
