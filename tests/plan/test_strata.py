"""Do the kinds of bytes add up to what the simulator counts, at every moment?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from punar.ir import Trace
from punar.ir.lineage import NEVER, lineage_of
from punar.plan import simulate
from punar.plan.moves import Channel, Move
from punar.plan.playback import play
from punar.plan.strata import sort_bytes
from punar.reporting.explain.gradients import gradients_of
from tests.solvers.problems import small_traces
from tests.synthetic import Step, chain, trace_of, transformer

few = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
DISK = Channel(name="disk:/x", capacity_bytes=1 << 40, write_bytes_per_s=10**9, read_bytes_per_s=10**9, latency_ns=1000, busy_percent=10)
BITS = Channel(name="bits/float32", capacity_bytes=1 << 40, write_bytes_per_s=10**9, read_bytes_per_s=10**9, block_bytes=32, block_kept=1)


@given(small_traces(), st.data())
@few
def test_the_kinds_add_up_to_what_the_simulator_counts(trace: Trace, data: st.DataObject) -> None:
    hold = [data.draw(st.sampled_from([0, 1, 2, NEVER])) for _ in trace.values]
    check(trace, hold)


def check(trace: Trace, hold: Sequence[int], moves: Sequence[Move] = (), channels: Sequence[Channel] = ()) -> None:
    strata = sort_bytes(trace, hold, gradients=gradients_of(trace), moves=moves, channels=channels)
    assert (
        trace.resident_bytes + max(stratum.bytes for stratum in strata) == simulate(trace, hold, moves=moves, channels=channels).peak_bytes
    )
    assert all(size >= 0 for stratum in strata for size in stratum[3:])
    assert [stratum.time_ns for stratum in strata] == sorted(stratum.time_ns for stratum in strata)
    highest = max(strata, key=lambda stratum: stratum.bytes)
    seen = play(trace, hold, moves=moves, channels=channels)
    sizes: Counter[str] = Counter()
    for holding in seen.peak.holdings:
        is_backward = holding.form == "original" and trace.ops[holding.op].is_backward
        sizes["backward" if is_backward else holding.form] += holding.bytes
    assert (highest.kept, highest.recomputed, highest.compressed) == (sizes["original"], sizes["recomputed"], sizes["encoded"])
    assert highest.gradients + highest.passing == sizes["backward"] + seen.peak.own_bytes


def test_what_is_encoded_is_counted_apart() -> None:
    trace = transformer(3)
    line = lineage_of(trace)
    value = next(v for v in trace.saved_values() if not line.is_source[v] and line.producer[v] < 8)
    moves = (Move(value=value, land=12, fetch=9),)
    hold = (0,) * len(trace.values)
    check(trace, hold, moves, (BITS,))
    strata = sort_bytes(trace, hold, gradients=gradients_of(trace), moves=moves, channels=(BITS,))
    assert max(stratum.compressed for stratum in strata) == BITS.kept(line.bytes[value])
    assert (strata[-1].compressed, {stratum.away for stratum in strata}) == (0, {0})


def test_what_leaves_the_device_is_no_part_of_the_sum() -> None:
    trace = chain([1 << 20] * 6, [5_000_000] * 6)
    value = trace.ops[1].outputs[0]
    moves = (Move(value=value, land=4, fetch=0),)
    hold = (0,) * len(trace.values)
    check(trace, hold, moves, (DISK,))
    strata = sort_bytes(trace, hold, gradients=gradients_of(trace), moves=moves, channels=(DISK,))
    assert {stratum.away for stratum in strata} == {0, 1 << 20}
    assert strata[-1].away == 0


def test_parameters_gradients_are_told_from_those_of_activations() -> None:
    trace = trace_of([Step(name=f"s{i}", reads=(i - 1,), bytes=1000, saves_inputs=True, gradient_bytes=300) for i in range(4)])
    strata = sort_bytes(trace, (0,) * len(trace.values), gradients=gradients_of(trace))
    assert strata[-1].gradients == 4 * 300
    assert max(stratum.passing for stratum in strata) >= 1000


def test_scratch_is_there_until_its_operator_has_run() -> None:
    trace = chain([1000] * 3, [10_000] * 3)
    first, *_ = (stratum for stratum in sort_bytes(trace, (0,) * len(trace.values), gradients=()) if stratum.passing)
    after = next(stratum for stratum in sort_bytes(trace, (0,) * len(trace.values), gradients=()) if stratum.kept)
    assert after.time_ns - first.time_ns == 10_000
