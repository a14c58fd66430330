"""The judge on steps small enough to work out by hand, and on what must hold of every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from punar.ir import Trace
from punar.ir.lineage import NEVER, close, lineage_of
from punar.plan import simulate
from punar.plan.simulate import alive_at
from tests.solvers.problems import small_traces
from tests.synthetic import Step, chain, trace_of

RESIDENT = 1 << 12

few = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def test_a_chain_of_three_by_hand() -> None:
    """x -> a -> b -> c, each saves its input. Plain: a, b and c are alive when backward begins, and the gradient of b joins them."""
    trace = chain([100, 100, 100], [1000, 1000, 1000])
    plain = simulate(trace, [0] * len(trace.values))
    assert plain.peak_bytes == RESIDENT + 400
    assert plain.time_ns == 9000
    assert plain.kept_bytes == 200
    assert plain.replayed_ops == 0


def test_dropping_a_value_replays_its_operator_once() -> None:
    trace = chain([100] * 4, [1000, 2000, 4000, 1000])
    a, b = (trace.ops[k].outputs[0] for k in (0, 1))
    hold = [0] * len(trace.values)
    hold[b] = 1
    seen = simulate(trace, hold)
    assert (seen.replayed_ops, seen.recomputed_bytes) == (1, 100)
    assert seen.time_ns == trace.plain_time_ns + 2000
    assert seen.kept_bytes == 200
    hold[a] = 1
    both = simulate(trace, hold)
    assert both.replayed_ops == 2
    assert both.kept_bytes == 100


def test_a_value_that_is_never_held_is_made_for_each_demand() -> None:
    trace = chain([100] * 5, [1000] * 5)
    seen = simulate(trace, [NEVER] * len(trace.values))
    assert seen.replayed_ops == 3 + 2 + 1


def test_a_value_held_from_a_later_demand_is_made_twice() -> None:
    trace = chain([100] * 5, [1000] * 5)
    first, second = (trace.ops[k].outputs[0] for k in (0, 1))
    hold = [1] * len(trace.values)
    hold[first] = trace.demand_rank[first]
    hold[second] = trace.demand_rank[second]
    assert simulate(trace, hold).replayed_ops == 6
    assert simulate(trace, [1] * len(trace.values)).replayed_ops == 3


def test_what_backward_asks_for_at_once_is_held() -> None:
    """Of x -> a -> b -> c, each saving its input, b is there when c runs and when its backward does, and nothing runs in between."""
    trace = chain([100] * 3, [1000] * 3)
    a, b = (trace.ops[k].outputs[0] for k in (0, 1))
    closed = close(trace, [NEVER] * len(trace.values))
    assert (closed[a], closed[b]) == (NEVER, 0)


@few
@given(small_traces(has_writes=True), st.data())
def test_holding_what_is_asked_for_at_once_raises_no_peak(trace: Trace, data: st.DataObject) -> None:
    hold = data.draw(st.lists(st.sampled_from([0, NEVER]), min_size=len(trace.values), max_size=len(trace.values)))
    seen, dropping = simulate(trace, hold), replace(trace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("punar.ir.lineage._idle", lambda trace, freed, released: set())
        lineage_of(dropping)
    other = simulate(dropping, hold)
    assert seen.peak_bytes <= other.peak_bytes
    assert seen.time_ns <= other.time_ns


def test_what_cannot_be_replayed_is_held() -> None:
    program = [
        Step(name="a", reads=(-1,), bytes=8, saves_output=True, is_replayable=False),
        Step(name="b", reads=(0,), bytes=8, saves_output=True),
    ]
    trace = trace_of(program)
    assert close(trace, [5] * len(trace.values))[trace.ops[0].outputs[0]] == 0


def test_a_replay_needs_its_operators_scratch() -> None:
    trace = trace_of(
        [
            Step(name="a", reads=(-1,), bytes=64, time_ns=10, saves_output=True, scratch=1000),
            Step(name="b", reads=(0,), bytes=8, time_ns=10, saves_inputs=True),
        ]
    )
    hold = [1] * len(trace.values)
    assert simulate(trace, hold).peak_bytes >= RESIDENT + 8 + 64 + 1000


@few
@given(small_traces(), st.data())
def test_nothing_is_lost_and_nothing_is_left(trace: Trace, data: st.DataObject) -> None:
    hold = data.draw(st.lists(st.sampled_from([0, 1, 2, 4, NEVER]), min_size=len(trace.values), max_size=len(trace.values)))
    seen = simulate(trace, hold)
    runs: list[bool] = []
    highest: list[int] = []

    def note(place: int, bytes: int, is_replay: bool) -> None:
        runs.append(is_replay)
        highest.append(bytes)

    again = simulate(trace, hold, on_run=note)
    assert again == seen
    assert max(highest) == seen.peak_bytes
    assert sum(runs) == seen.replayed_ops
    assert len(runs) - sum(runs) == len(trace.ops)
    assert seen.time_ns >= trace.plain_time_ns
    assert simulate(trace, close(trace, hold), is_closed=True) == seen
    outlives = sum(
        s.bytes
        for s in trace.storages
        if not s.is_source and all((e.kind, e.id) != (4, s.id) for e in trace.events) and _is_made(trace, s.id)
    )
    assert sum(size for _, size in alive_at(trace, hold, len(trace.events))) == outlives


def _is_made(trace: Trace, storage: int) -> bool:
    return any(v.storage == storage and v.producer >= 0 for v in trace.values)


@few
@given(small_traces())
def test_holding_everything_is_the_plain_step(trace: Trace) -> None:
    plain = simulate(trace, [0] * len(trace.values))
    assert plain.time_ns == trace.plain_time_ns
    assert plain.recomputed_bytes == plain.replayed_ops == 0


@few
@given(small_traces())
def test_close_is_settled_after_once(trace: Trace) -> None:
    closed = close(trace, [2] * len(trace.values))
    assert close(trace, closed) == closed
    line = lineage_of(trace)
    assert all(closed[v] == 0 for v in range(len(trace.values)) if line.is_saved[v] and not line.can_replay[v])
