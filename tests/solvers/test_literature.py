"""The named solvers against numbers that others printed or computed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from heapq import heappop, heappush
from math import comb
from random import Random

import pytest

from punar.errors import InfeasibleBudget
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


@cache
def fewest_extra(steps: int, snapshots: int) -> int:
    """The paper's recursion, without its closed form: run to the next snapshot, reverse what is behind it, then what is before it."""
    if steps <= 1:
        return 0
    if snapshots == 1:
        return steps * (steps - 1) // 2
    return min(m + fewest_extra(steps - m, snapshots - 1) + fewest_extra(m, snapshots) for m in range(1, steps))


@pytest.mark.parametrize("snapshots", range(1, 9))
def test_revolve_takes_as_few_steps_as_the_search_of_all_places(snapshots: int) -> None:
    assert [extra_steps(n, snapshots) for n in range(1, 61)] == [fewest_extra(n, snapshots) for n in range(1, 61)]


@pytest.mark.parametrize("snapshots", range(1, 7))
@pytest.mark.parametrize("repeats", range(1, 5))
def test_one_more_step_costs_as_many_as_its_repetition_number(snapshots: int, repeats: int) -> None:
    """Griewank and Walther 2000, Theorem 1 and the table of comb(s + r, s): up to there no step runs more than r times again."""
    low, high = comb(snapshots + repeats - 1, snapshots), comb(snapshots + repeats, snapshots)
    assert {extra_steps(n + 1, snapshots) - extra_steps(n, snapshots) for n in range(low, high)} == {repeats}


@pytest.mark.parametrize("steps", [16, 64, 256])
def test_the_tape_needs_room_for_the_snapshots_and_three_more(steps: int) -> None:
    trace = chain([100] * steps, overhead_ns=0)
    for snapshots in (2, 4, 8):
        assert simulate(trace, revolved(trace, snapshots)).peak_bytes == trace.resident_bytes + (snapshots + 3) * 100


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


def dijkstra(chain: Chain, room: int) -> float:
    """The least time over all sequences of the paper's operations that delete no stored value before its use (arXiv:1911.13214, Table 1 and section 4).

    A state is (next block to reverse, what is stored, the input that is at hand). A block's forward keeps nothing, or all its inner values where
    its input is stored; an input that is at hand can be stored; a block is reversed where its inner values and its input are stored.
    """
    size = {("in", k): n for k, n in enumerate(chain.inputs)} | {("all", k): n for k, n in enumerate(chain.inners)}
    queue: list[tuple[float, int, State]] = [(0.0, 0, (len(chain.times) - 1, frozenset(), 0))]
    done: set[State] = set()
    while queue:
        time, _, state = heappop(queue)
        if state[0] < 0:
            return time
        if state not in done:
            done.add(state)
            for more, after in moves(chain, state):
                if sum(size[item] for item in after[1]) <= room:
                    heappush(queue, (time + more, len(done), after))
    return float("inf")


State = tuple[int, frozenset[tuple[str, int]], int]


def moves(chain: Chain, state: State) -> Iterator[tuple[float, State]]:
    block, stored, at = state
    inputs = {0} | {k for kind, k in stored if kind == "in"} | {k + 1 for kind, k in stored if kind == "all"}
    if ("all", block) in stored and block in inputs:
        yield 0.0, (block - 1, frozenset(item for item in stored if item[1] < block), -1)
    for place in inputs:
        yield 0.0, (block, stored, place)
    if 0 <= at <= block:
        yield chain.times[at], (block, stored, at + 1)
        if at in inputs:
            yield chain.times[at], (block, stored | {("all", at)}, at + 1)
        if at > 0:
            yield 0.0, (block, stored | {("in", at)}, at)


@pytest.mark.parametrize("seed", range(60))
def test_rotor_is_as_fast_as_the_search_of_all_sequences(seed: int) -> None:
    draw = Random(seed)
    blocks = draw.randint(2, 5)
    inputs = tuple(draw.randint(1, 3) for _ in range(blocks))
    inners = tuple(max(draw.randint(1, 6), after) for after in (*inputs[1:], 1))  # a block's output is among its inner values
    drawn = Chain(inputs=inputs, inners=inners, times=tuple(float(draw.randint(1, 9)) for _ in range(blocks)))
    for room in range(2, 15, 2):
        assert Table(drawn, room).time[0][-1][room] == dijkstra(drawn, room)


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


@pytest.mark.parametrize("layers", [16, 36, 64, 100, 144, 256])
def test_chen_reverses_equal_layers_in_the_root_of_their_memory_with_one_extra_forward_pass(layers: int) -> None:
    """Chen et al. 2016, section 4.1: 2 sqrt(n) at the cost of one additional forward pass; we allow a quarter more."""
    trace = chain([100] * layers, overhead_ns=0)
    plan = solve(trace, trace.resident_bytes + int(2.5 * layers**0.5) * 100, "chen-greedy")
    assert (layers - 1) // 2 <= plan.replayed_ops <= layers  # what the last layer reads is there when its backward begins
    with pytest.raises(InfeasibleBudget, match="solver 'chen-greedy' found none"):
        solve(trace, trace.resident_bytes + int(1.5 * layers**0.5) * 100, "chen-greedy")


@pytest.mark.parametrize("layers", [16, 36, 64, 100, 144, 256])
def test_dtr_reverses_a_chain_in_the_root_of_its_memory_in_linear_time(layers: int) -> None:
    """Kirisame et al. 2021, Theorem 3.1: a feedforward network of N layers, with room for Omega(sqrt N), in O(N) operators."""
    trace = chain([100] * layers, overhead_ns=0)
    for roots in (3, 5):
        plan = solve(trace, trace.resident_bytes + roots * int(layers**0.5) * 100, "dtr")
        assert plan.replayed_ops <= layers
    if layers >= 36:
        assert plan.replayed_ops > 0


def test_selective_holds_the_dear_ones() -> None:
    trace = named("transformer")
    plan = solve(trace, 1 << 60, "selective")
    for value in trace.values:
        if trace.ops[value.producer].kind == "matmul" and not trace.ops[value.producer].is_backward:
            is_unneeded = value.id not in trace.saved_values() and trace.ops[value.producer].name in ("down", "logits")
            assert plan.hold_from[value.id] == 0 or is_unneeded
    assert plan.replayed_ops > 0
