"""Is a plan made for other sizes taken where it fits on these, and only there?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from punar.ir import Trace
from punar.plan import simulate
from punar.plan.nearby import NEARBY, nearby_plan, plans_of_other_sizes
from punar.plan.plan import Plan, make_plan, plain_plan
from punar.solvers import solve
from tests.solvers.problems import small_traces
from tests.synthetic import transformer


def resized(trace: Trace, factor: float) -> Trace:
    """The same step on other sizes: all that its operators make is so much larger."""
    storages = tuple(s if s.is_source else replace(s, bytes=int(s.bytes * factor)) for s in trace.storages)
    ops = tuple(replace(op, peak_bytes=int(op.peak_bytes * factor) + 1, signature=f"{op.signature} x {factor}") for op in trace.ops)
    return replace(trace, storages=storages, ops=ops)


def plain_peak(trace: Trace) -> int:
    return simulate(trace, (0,) * len(trace.values)).peak_bytes


@given(small_traces(), st.floats(0.3, 3), st.floats(0, 1.1))
def test_what_is_taken_fits_and_is_the_fastest(trace: Trace, factor: float, share: float) -> None:
    other = resized(trace, factor)
    plans = [plain_plan(trace), make_plan(trace, [1] * len(trace.values), solver="all", budget_bytes=0)]
    peak = plain_peak(other)
    budget = other.resident_bytes + int(share * (peak - other.resident_bytes))
    found = nearby_plan(other, plans, budget)
    judged = [simulate(other, plan.hold_from, is_closed=True) for plan in plans]
    fitting = [each.time_ns for each in judged if each.peak_bytes <= budget]
    assert (found is None) == (not fitting)
    if found is not None:
        assert (found.solver, found.budget_bytes, found.fingerprint) == (NEARBY, budget, other.fingerprint)
        assert found.peak_bytes == simulate(other, found.hold_from, is_closed=True).peak_bytes <= budget
        assert found.time_ns == min(fitting)
        assert Plan.from_json(found.to_json()) == found


def test_a_plan_for_a_longer_step_serves_a_shorter_one_and_not_the_other_way_round() -> None:
    trace = transformer(6)
    budget = (plain_peak(trace) + trace.resident_bytes) // 2
    plan = solve(trace, budget)
    shorter, longer = resized(trace, 0.9), resized(trace, 1.6)
    assert nearby_plan(shorter, [plan], budget) is not None
    assert nearby_plan(longer, [plan], budget) is None
    assert nearby_plan(shorter, [], budget) is None


def _with_op(trace: Trace, **changes: object) -> Trace:
    (middle, *_), rest = trace.ops[3:], trace.ops
    return replace(trace, ops=(*rest[:3], replace(middle, **changes), *rest[4:]))


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (lambda trace: resized(trace, 2), True),
        (lambda trace: replace(trace, resident_bytes=trace.resident_bytes + 1, meta={"optimizer_bytes": "8"}), True),
        (lambda trace: _with_op(trace, time_ns=1, module="another"), True),
        (lambda trace: _with_op(trace, name="another"), False),
        (lambda trace: _with_op(trace, inputs=()), False),
        (lambda trace: _with_op(trace, has_grad_mode=False), False),
        (lambda trace: _with_op(trace, is_replayable=False), False),
        (lambda trace: replace(trace, device="cuda:0"), False),
        (lambda trace: replace(trace, events=(*trace.events[:-2], *trace.events[:-3:-1])), False),
        (lambda trace: replace(trace, saves=trace.saves[:-1]), False),
        (lambda trace: transformer(5), False),
    ],
)
def test_only_sizes_times_and_what_is_resident_may_differ(change: Callable[[Trace], Trace], is_same: bool) -> None:
    trace = transformer(4)
    assert change(trace).is_resized(trace) is is_same
    assert trace.is_resized(change(trace)) is is_same


def test_the_nearest_that_differ_are_tried() -> None:
    trace, other = transformer(4), transformer(5)
    sizes = {factor: resized(trace, factor) for factor in (0.5, 0.9, 1.2, 1.3, 3.0)}
    plans = {factor: replace(plain_plan(each), moves=()) for factor, each in sizes.items()}
    holds = {0.5: (1, 0), 0.9: (2, 0), 1.2: (2, 0), 1.3: (3, 0), 3.0: (4, 0)}
    known = [(replace(plans[factor], hold_from=holds[factor]), sizes[factor]) for factor in sizes]
    known.append((replace(plain_plan(other), hold_from=(5, 0)), other))
    found = plans_of_other_sizes(trace, known, plain_peak(trace))
    assert [plan.hold_from for plan in found] == [(2, 0), (3, 0), (1, 0)]
    assert list(plans_of_other_sizes(trace, known[-1:], plain_peak(trace))) == []
