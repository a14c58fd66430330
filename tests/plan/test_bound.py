"""The lower bound: below every plan, and as high as its linear programme."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from punar.ir import Trace
from punar.ir.lineage import NEVER, close, lineage_of
from punar.plan import simulate
from punar.plan.bound import bound, items_of
from punar.plan.pressure import pressure_of
from tests.solvers.problems import BUILDERS, named, small_traces
from tests.synthetic import Step, trace_of

MOST_PLANS = 2000

few = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@few
@given(small_traces(), st.data())
def test_no_plan_of_any_kind_is_faster(trace: Trace, data: st.DataObject) -> None:
    choice = st.sampled_from([0, 0, 1, 2, 3, 5, NEVER])
    hold = data.draw(st.lists(choice, min_size=len(trace.values), max_size=len(trace.values)))
    seen = simulate(trace, hold)
    assert bound(trace, seen.peak_bytes) <= seen.time_ns


@settings(few, max_examples=40)
@given(small_traces(most=7, has_writes=True))
def test_no_plan_at_all_is_faster_where_storages_are_written_into(trace: Trace) -> None:
    """Every way to hold each value from forward on, from its first replay on, from its own demand on, or never."""
    line = lineage_of(trace)
    free = [v for v, hold in enumerate(close(trace, [1] * len(trace.values))) if hold == 1]
    assume(len(free) <= 6)
    choices = [sorted({0, 1, max(trace.demand_rank[v], 1), NEVER}) if line.is_saved[v] else [0, 1, NEVER] for v in free]
    fastest: dict[int, int] = {}
    for choice in itertools.islice(itertools.product(*choices), MOST_PLANS):
        hold = [0] * len(trace.values)
        for v, from_demand in zip(free, choice, strict=True):
            hold[v] = from_demand
        seen = simulate(trace, hold)
        fastest[seen.peak_bytes] = min(seen.time_ns, fastest.get(seen.peak_bytes, seen.time_ns))
    for peak, time in fastest.items():
        assert bound(trace, peak) <= time


def test_a_kept_version_does_not_make_the_others_dear() -> None:
    """A dear version is kept until its use; only the cheap one is made again, which gives the storage back between their demands."""
    trace = trace_of(
        [
            Step(name="allocate", reads=(-1,), bytes=1024, time_ns=10),
            Step(name="cheap", reads=(0,), writes=0, bytes=1024, time_ns=10, saves_output=True),
            Step(name="scratchy", reads=(-1,), bytes=8, time_ns=10, scratch=8192),
            Step(name="dear", reads=(1, 2), writes=1, bytes=1024, time_ns=1_000_000, saves_output=True),
        ],
        overhead_ns=0,
    )
    hold = [0] * len(trace.values)
    hold[trace.ops[0].outputs[0]] = hold[trace.ops[1].outputs[0]] = 1
    seen = simulate(trace, hold)
    assert seen.peak_bytes < simulate(trace, [0] * len(trace.values)).peak_bytes
    assert bound(trace, seen.peak_bytes) <= seen.time_ns == trace.plain_time_ns + 20


def test_a_version_is_held_for_nothing_in_a_storage_that_is_saved_anyway() -> None:
    """The large value is made again from a version whose storage an earlier saved version keeps alive."""
    trace = trace_of(
        [
            Step(name="saved", reads=(-1,), bytes=64, time_ns=1_000, saves_output=True),
            Step(name="write", reads=(0,), writes=0, bytes=64, time_ns=1_000, is_replayable=False),
            Step(name="large", reads=(1,), bytes=1024, time_ns=100_000, saves_output=True),
            Step(name="scratchy", reads=(1, 2), bytes=256, time_ns=1_000, scratch=4096),
        ],
        overhead_ns=0,
    )
    hold = [0] * len(trace.values)
    hold[trace.ops[2].outputs[0]] = 1
    seen = simulate(trace, hold)
    assert seen.peak_bytes == simulate(trace, [0] * len(trace.values)).peak_bytes - 1024
    assert bound(trace, seen.peak_bytes) <= seen.time_ns


def test_a_version_that_cannot_be_made_again_may_be_released_before_the_others_are_asked_for() -> None:
    """Autograd saves the second version and never asks for it: once that is released, the first can be away until its own demand."""
    trace = trace_of(
        [
            Step(name="first", reads=(-1,), bytes=1024, time_ns=20_000, saves_output=True),
            Step(name="write", reads=(0,), writes=0, bytes=1024, time_ns=20_000, is_replayable=False),
            Step(name="narrow", reads=(1,), bytes=64, time_ns=1_000),
            Step(name="scratchy", reads=(2,), bytes=64, time_ns=100_000, saves_inputs=True, scratch=4096),
            Step(name="unasked", reads=(1, 3), bytes=64, time_ns=1_000, saves_inputs=True, is_asked=False),
        ],
        overhead_ns=0,
    )
    hold = [0] * len(trace.values)
    hold[trace.ops[0].outputs[0]] = 1
    seen = simulate(trace, hold)
    assert seen.peak_bytes < simulate(trace, [0] * len(trace.values)).peak_bytes
    assert bound(trace, seen.peak_bytes) <= seen.time_ns


@pytest.mark.parametrize("problem", BUILDERS)
def test_less_budget_is_never_a_lower_bound(problem: str) -> None:
    trace = named(problem)
    high = max(pressure_of(trace).peak)
    found = [bound(trace, trace.resident_bytes + (high - trace.resident_bytes) * k // 20) for k in range(20, 4, -1)]
    slack = trace.plain_time_ns // 10_000
    assert found[0] == trace.plain_time_ns
    assert all(later >= earlier - slack for earlier, later in itertools.pairwise(found))


@pytest.mark.parametrize("problem", BUILDERS)
@pytest.mark.parametrize("fraction", [0.4, 0.6, 0.8])
def test_the_ascent_reaches_the_programmes_optimum(problem: str, fraction: float) -> None:
    highspy = pytest.importorskip("highspy")
    trace = named(problem)
    plain = max(pressure_of(trace).peak)
    budget = int(trace.resident_bytes + (plain - trace.resident_bytes) * fraction)
    items, granted = items_of(trace)
    model = highspy.Highs()
    model.silent()
    for item in items:
        model.addCol(item.cost_ns / 1e3, 0.0, 1.0, 0, [], [])
    for cell, (peak, free) in enumerate(zip(pressure_of(trace).peak, granted, strict=True)):
        entries = {j: item.at(cell) / 1024 for j, item in enumerate(items) if item.at(cell)}
        if peak - budget - free > 0:
            model.addRow((peak - budget - free) / 1024, float("inf"), len(entries), list(entries), list(entries.values()))
    model.run()
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        pytest.skip("no plan at all fits this budget")
    best = model.getInfo().objective_function_value * 1e3
    found = bound(trace, budget) - trace.plain_time_ns
    assert found <= best * (1 + 1e-6) + 1
    assert found >= best - 0.005 * trace.plain_time_ns
