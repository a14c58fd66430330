"""The paper's programme: is it a bound for every plan, does it agree with ours, and what does it refuse?"""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from punar.errors import InfeasibleBudget, UsageError
from punar.ir import Trace
from punar.ir.lineage import NEVER, lineage_of
from punar.plan import Simulation, simulate
from punar.plan.bound import bound
from punar.solvers import solve
from punar.solvers.checkmate import Checkmate, Graph, Schedule
from punar.solvers.stages import candidates
from tests.plan.test_in_place import gates
from tests.solvers.problems import ladder_net, named, small_traces, unrolled
from tests.synthetic import chain

pytest.importorskip("highspy")

PLANS = 300


def some_plans(trace: Trace, random: Random) -> list[Simulation]:
    """Plans of all ranks: every one where there are at most ``PLANS``, else so many drawn at random."""
    free = candidates(trace, lineage_of(trace))
    choices = (0, NEVER, *range(1, max(trace.demand_rank, default=0) + 1))
    if len(choices) ** len(free) <= PLANS:
        rows = list(itertools.product(choices, repeat=len(free)))
    else:
        rows = [tuple(random.choices(choices, k=len(free))) for _ in range(PLANS)]
    plans = [dict(zip(free, row, strict=True)) for row in rows]
    return [simulate(trace, [plan.get(v, 0) for v in range(len(trace.values))]) for plan in plans]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(small_traces(most=6), st.integers(0, 1 << 20))
def test_its_optimum_is_below_every_plan_of_any_rank(trace: Trace, seed: int) -> None:
    random = Random(seed)
    seen = some_plans(trace, random)
    budget = random.choice(seen).peak_bytes
    fastest = min(one.time_ns for one in seen if one.peak_bytes <= budget)
    outcome = Schedule(Graph(trace), budget).programme.run(seconds=60)
    assert trace.plain_time_ns + outcome.bound_ns <= fastest + 0.5
    assert bound(trace, budget) <= fastest
    try:
        plan = solve(trace, budget, "checkmate")
    except InfeasibleBudget as error:
        assert error.least_bytes > budget  # noqa: PT017 - decoding may miss the budget, which is allowed
    else:
        assert plan.bound_ns <= plan.time_ns == simulate(trace, plan.hold_from).time_ns
        assert plan.peak_bytes <= budget


@pytest.mark.parametrize("length", [6, 9])
@pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
def test_it_agrees_with_ours_on_chains_where_each_value_is_made_again_once(length: int, share: float) -> None:
    trace = chain([1000] * length, overhead_ns=100)
    plain = simulate(trace, [0] * len(trace.values)).peak_bytes
    budget = trace.resident_bytes + int((plain - trace.resident_bytes) * share)
    theirs, ours = solve(trace, budget, "checkmate"), solve(trace, budget, "milp")
    assert theirs.time_ns == theirs.bound_ns == ours.time_ns == ours.bound_ns > trace.plain_time_ns


def test_it_agrees_with_ours_on_a_net_with_skips() -> None:
    trace = ladder_net(2)
    plain = simulate(trace, [0] * len(trace.values)).peak_bytes
    budget = trace.resident_bytes + (plain - trace.resident_bytes) * 3 // 4
    theirs, ours = solve(trace, budget, "checkmate"), solve(trace, budget, "milp")
    assert theirs.time_ns == theirs.bound_ns == ours.time_ns == ours.bound_ns


def test_it_finds_plans_that_make_values_again_more_often_than_once() -> None:
    """A cheap state that is made again at each of its uses saves holding it, or running the dear gates again: no plan of 0 and 1 does that."""
    trace = unrolled(3)
    budget = 45_568
    theirs, ours = solve(trace, budget, "checkmate"), solve(trace, budget, "milp")
    assert theirs.bound_ns <= theirs.time_ns < ours.time_ns == ours.bound_ns
    assert max(min(r, NEVER - 1) for r in theirs.hold_from if r != NEVER) > 1 or NEVER in theirs.hold_from


def test_a_budget_below_what_any_schedule_needs_is_refused() -> None:
    trace = chain([1000] * 6)
    with pytest.raises(InfeasibleBudget, match="solver 'checkmate' found none") as caught:
        solve(trace, trace.resident_bytes + 1500, "checkmate")
    assert Checkmate().graph(trace)
    assert solve(trace, caught.value.least_bytes, "checkmate").peak_bytes <= caught.value.least_bytes


def test_where_time_runs_out_it_has_the_plans_without_choice() -> None:
    trace = chain([1000] * 9)
    plan = solve(trace, 1 << 40, "checkmate{seconds=0.000001}")
    assert plan.time_ns == trace.plain_time_ns


@pytest.mark.parametrize(
    ("trace", "spelling", "message"),
    [
        (named("chain"), "checkmate", r"a step of \d+ operators and demands; it is meant for at most 60"),
        (named("chain"), "checkmate{nodes=9}", "meant for at most 9"),
        (gates(2), "checkmate", "a step with in-place writes"),
        (named("chain"), "checkmate{seconds=0}", r"asked to take 0\.0 seconds"),
    ],
)
def test_what_it_is_not_meant_for_is_refused(trace: Trace, spelling: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        solve(trace, 1 << 40, spelling)
