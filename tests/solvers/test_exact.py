"""The integer programme against the search of everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, assume, given, settings

from punar.errors import InfeasibleBudget, UsageError
from punar.ir import Trace
from punar.ir.lineage import lineage_of
from punar.plan import simulate
from punar.plan.bound import bound
from punar.solvers import solve
from punar.solvers.milp import candidates
from tests.solvers.problems import named, small_traces
from tests.synthetic import chain

pytest.importorskip("highspy")

MOST = 8


def every_plan(trace: Trace) -> list[tuple[int, int]]:
    """(peak, time) of every way to hold or drop each value."""
    free = candidates(trace, lineage_of(trace))
    found = []
    for choice in itertools.product((0, 1), repeat=len(free)):
        hold = [0] * len(trace.values)
        for value, is_dropped in zip(free, choice, strict=True):
            hold[value] = is_dropped
        seen = simulate(trace, hold)
        found.append((seen.peak_bytes, seen.time_ns))
    return found


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(small_traces(most=6))
def test_the_programme_finds_what_the_search_of_everything_finds(trace: Trace) -> None:
    assume(len(candidates(trace, lineage_of(trace))) <= MOST)
    plans = every_plan(trace)
    peaks = sorted({peak for peak, _ in plans})
    for budget in (peaks[0], peaks[len(peaks) // 2], peaks[-1]):
        fastest = min(time for peak, time in plans if peak <= budget)
        assert solve(trace, budget, "milp").time_ns == fastest
        assert bound(trace, budget) <= fastest
    with pytest.raises(InfeasibleBudget, match="solver 'milp' found none"):
        solve(trace, peaks[0] - 1, "milp")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(small_traces(most=6))
def test_the_bound_is_below_every_plan(trace: Trace) -> None:
    assume(len(candidates(trace, lineage_of(trace))) <= MOST)
    for peak, time in every_plan(trace):
        assert bound(trace, peak) <= time


def test_it_works_after_highs_was_used_with_other_threads() -> None:
    highspy = pytest.importorskip("highspy")
    highspy.Highs.resetGlobalScheduler(True)
    other = highspy.Highs()
    other.silent()
    other.setOptionValue("threads", 2)
    other.addCol(1.0, 0.0, 1.0, 0, [], [])
    other.run()
    trace = chain((64, 64, 64))
    assert solve(trace, simulate(trace, (0,) * len(trace.values)).peak_bytes, "milp").time_ns == trace.plain_time_ns


def test_steps_too_large_for_it_are_refused() -> None:
    with pytest.raises(UsageError, match="meant for at most 5"):
        solve(named("chain"), 1 << 40, "milp{values=5}")
