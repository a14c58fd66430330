"""Does a playback agree with the simulator, and does what it finds at the peak add up?"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from punar.ir import Trace
from punar.ir.lineage import NEVER, close, lineage_of
from punar.plan import simulate
from punar.plan.moves import Channel, Move
from punar.plan.playback import play
from tests.solvers.problems import small_traces
from tests.synthetic import Step, chain, trace_of, transformer

few = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
DISK = Channel(name="disk:/x", capacity_bytes=1 << 40, write_bytes_per_s=10**9, read_bytes_per_s=10**9, latency_ns=1000, busy_percent=10)


@given(small_traces(), st.data())
@few
def test_what_is_alive_at_the_peak_adds_up(trace: Trace, data: st.DataObject) -> None:
    hold = [data.draw(st.sampled_from([0, 1, 2, NEVER])) for _ in trace.values]
    seen, cost = play(trace, hold), simulate(trace, hold)
    assert seen.cost == cost
    assert seen.peak.bytes == cost.peak_bytes
    assert trace.resident_bytes + seen.peak.own_bytes + sum(holding.bytes for holding in seen.peak.holdings) == seen.peak.bytes
    assert not [holding for holding in seen.peak.holdings if holding.form == "encoded" or holding.bytes < 0]
    assert max(size for _, size in seen.memory) == cost.peak_bytes


@given(small_traces(), st.data())
@few
def test_operators_follow_one_another(trace: Trace, data: st.DataObject) -> None:
    seen = play(trace, [data.draw(st.sampled_from([0, 1, NEVER])) for _ in trace.values])
    assert all(a.start_ns + a.takes_ns <= b.start_ns for a, b in zip(seen.runs, seen.runs[1:], strict=False))
    assert seen.end_ns == seen.cost.time_ns == seen.runs[-1].start_ns + seen.runs[-1].takes_ns
    assert sum(run.is_replay for run in seen.runs) == seen.cost.replayed_ops
    assert [time for time, _ in seen.memory] == sorted(time for time, _ in seen.memory)


def test_copies_run_beside_the_step() -> None:
    trace = chain([1 << 20] * 6, [5_000_000] * 6)
    value = trace.ops[1].outputs[0]
    moves = (Move(value=value, land=4, fetch=0),)
    seen = play(trace, (0,) * len(trace.values), moves=moves, channels=(DISK,))
    assert [(copy.value, copy.is_out) for copy in seen.copies] == [(value, True), (value, False)]
    assert sum(copy.takes_ns for copy in seen.copies) == seen.cost.copy_ns
    assert seen.end_ns == seen.cost.time_ns


def test_encoded_values_are_counted_as_such() -> None:
    trace = transformer(3)
    line = lineage_of(trace)
    codec = Channel(
        name="bits/float32", capacity_bytes=1 << 40, write_bytes_per_s=10**9, read_bytes_per_s=10**9, block_bytes=32, block_kept=1
    )
    value = next(v for v in trace.saved_values() if not line.is_source[v] and line.producer[v] < 8)
    moves = (Move(value=value, land=12, fetch=9),)
    seen = play(trace, close(trace, (0,) * len(trace.values)), is_closed=True, moves=moves, channels=(codec,))
    encoded = [holding for holding in seen.peak.holdings if holding.form == "encoded"]
    assert [(holding.op, holding.bytes) for holding in encoded] == [(line.producer[value], codec.kept(line.bytes[value]))]
    assert trace.resident_bytes + seen.peak.own_bytes + sum(holding.bytes for holding in seen.peak.holdings) == seen.peak.bytes


def test_a_peak_inside_a_replay_names_the_replayed_operator() -> None:
    """Its scratch is there in forward and in its backward too, but not a wide gradient beside it."""
    trace = trace_of(
        [
            Step(name="small", reads=(-1,), bytes=1000, saves_output=True),
            Step(name="made", reads=(0,), bytes=1000, scratch=9000),
            Step(name="wide", reads=(1,), bytes=5000, saves_inputs=True),
            Step(name="end", reads=(2,), bytes=10),
        ]
    )
    made = trace.ops[1].outputs[0]
    peak = play(trace, [int(value.id == made) for value in trace.values]).peak
    assert (trace.ops[peak.op].name, peak.is_replay, peak.own_bytes) == ("made", True, 10_000)
    held = sorted((trace.ops[holding.op].name, holding.bytes) for holding in peak.holdings)
    assert held == [("end", 10), ("end_backward", 5000), ("small", 1000)]
