"""The named solvers against numbers that others printed or computed."""

from __future__ import annotations

import pytest

from punar.plan import simulate
from punar.solvers import solve
from punar.solvers.chen import greedy_cuts
from punar.solvers.revolve import extra_steps, revolved
from punar.solvers.rotor import Chain, Table
from tests.solvers.problems import named
from tests.synthetic import chain


@pytest.mark.parametrize("steps", range(1, 30))
@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 8, 29])
def test_revolve_takes_as_few_steps_as_checkpoint_schedules(steps: int, snapshots: int) -> None:
    multistage = pytest.importorskip("checkpoint_schedules.multistage")
    if snapshots <= steps:
        assert extra_steps(steps, snapshots) == multistage.optimal_extra_steps(steps, snapshots)


def test_revolve_reverses_the_example_of_its_paper() -> None:
    """Griewank and Walther 2000, section 2: with s snapshots and r repetitions comb(s + r, s) steps can be reversed."""
    assert extra_steps(10, 3) == 15
    assert extra_steps(56, 5) == 3 * 56 - 28
    assert extra_steps(1, 1) == 0


@pytest.mark.parametrize("snapshots", range(1, 12))
def test_the_tape_replays_no_more_than_revolve_counts(snapshots: int) -> None:
    """Our forward pass is the first sweep, and a block whose input alone was saved need not run again itself."""
    steps = 24
    trace = chain([100] * steps)
    replayed = simulate(trace, revolved(trace, snapshots)).replayed_ops
    assert replayed <= extra_steps(steps, snapshots)
    assert replayed >= extra_steps(steps, snapshots) - steps


def reversal(chain: Chain, low: int, high: int, room: int) -> float:
    """The same recursion written down as in the paper, without a table."""
    if low > high:
        return 0.0
    best = chain.times[low] + reversal(chain, low + 1, high, room - chain.inners[low]) if room >= chain.inners[low] else float("inf")
    for middle in range(low + 1, high + 1):
        if room >= chain.inputs[middle]:
            passed = sum(chain.times[low:middle])
            left = reversal(chain, low, middle - 1, room)
            best = min(best, passed + reversal(chain, middle, high, room - chain.inputs[middle]) + left)
    return best


@pytest.mark.parametrize("room", range(2, 18, 3))
def test_rotor_fills_its_table_as_its_recursion_says(room: int) -> None:
    blocks = Chain(inputs=(1, 1, 2, 1, 1), inners=(3, 4, 2, 5, 3), times=(3.0, 1.0, 4.0, 1.0, 5.0))
    assert Table(blocks, room).time[0][4][room] == reversal(blocks, 0, 4, room)


def test_rotor_holds_everything_where_there_is_room_and_reverts_to_revolve_where_blocks_are_equal() -> None:
    equal = Chain(inputs=(1,) * 10, inners=(1,) * 10, times=(1.0,) * 10)
    assert Table(equal, 10).time[0][9][10] == 10
    unit = Chain(inputs=(1,) * 10, inners=(0,) * 10, times=(1.0,) * 10)
    for slots in range(4):
        assert Table(unit, slots).time[0][9][slots] <= 10 + extra_steps(10, slots + 1)


def test_chen_cuts_where_enough_was_made() -> None:
    trace = chain([10] * 12)
    assert greedy_cuts(trace, 30) == (0, 4, 8, 12)
    assert greedy_cuts(trace, 0) == tuple(range(13))
    assert greedy_cuts(trace, 1000) == (0, 12)


def test_dtr_reverses_a_chain_in_the_root_of_its_memory_in_linear_time() -> None:
    """Kirisame et al. 2021, Theorem 1: a feedforward network of N layers, with room for O(sqrt N), in O(N) operators."""
    for layers in (16, 36, 64, 100):
        trace = chain([100] * layers, overhead_ns=0)
        room = trace.resident_bytes + int(5 * layers**0.5) * 100
        assert solve(trace, room, "dtr").replayed_ops <= 2 * layers


def test_selective_holds_the_dear_ones() -> None:
    trace = named("transformer")
    plan = solve(trace, 1 << 60, "selective")
    for value in trace.values:
        if trace.ops[value.producer].kind == "matmul" and not trace.ops[value.producer].is_backward:
            assert plan.hold_from[value.id] == 0 or trace.ops[value.producer].name == "down"
    assert plan.replayed_ops > 0
