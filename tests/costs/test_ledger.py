"""What is an operator's time taken to be, after how many measurements?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from punar.costs import Ledger
from punar.ir import Trace
from tests.synthetic import chain


@pytest.fixture
def trace() -> Trace:
    return chain([100, 200, 400, 800], times=[1_000, 2_000, 4_000, 8_000])


def test_an_empty_ledger_keeps_the_traced_times_near(trace: Trace) -> None:
    """The chain's times lie on a line, so that the model agrees with them."""
    for op, timed in zip(trace.ops, Ledger().timed(trace).ops, strict=True):
        assert timed.time_ns == pytest.approx(op.time_ns, rel=0.6)


def test_many_measurements_outweigh_the_trace_and_the_model(trace: Trace) -> None:
    ledger, op = Ledger(), trace.forward_ops[1]
    for time in [50_000, 50_100, 49_900, 400_000, 50_050]:
        ledger.add(op, time)
    assert ledger.timed(trace).ops[op.id].time_ns == pytest.approx(50_000, rel=0.05)


def test_what_was_never_measured_is_as_the_model_says(trace: Trace) -> None:
    blank = replace(trace, ops=tuple(replace(op, time_ns=0) for op in trace.ops))
    ledger, (first, *others) = Ledger(), blank.forward_ops
    for op in others:
        ledger.add(op, 3_000)
    assert ledger.timed(blank).ops[first.id].time_ns == pytest.approx(3_000, rel=0.1)


def test_nothing_known_changes_nothing(trace: Trace) -> None:
    blank = replace(trace, ops=tuple(replace(op, time_ns=0) for op in trace.ops))
    assert Ledger().timed(blank) is blank


def test_old_times_are_forgotten(trace: Trace) -> None:
    ledger, op = Ledger(), trace.ops[0]
    for time in [10] * 100 + [99] * 27:
        ledger.add(op, time)
    assert set(ledger.times_of(op)) == {99}
