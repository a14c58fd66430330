"""Are plans that move values off the device what they promise, and never slower than those that do not?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import punar
from punar.errors import InfeasibleBudget, UsageError
from punar.ir import EventKind, Trace
from punar.ir.trace import check
from punar.plan import Plan, simulate
from punar.plan.moves import Channel, Copies, Move
from punar.solvers import find, least, solve
from punar.solvers.auto import frontier_of
from punar.solvers.movable import movable
from punar.solvers.offload import chosen, placed
from punar.solvers.without import without
from tests.synthetic import transformer

FAST = Channel(name="fast", capacity_bytes=1 << 50, write_bytes_per_s=1 << 40, read_bytes_per_s=1 << 40)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return transformer(8)


def channel_of(trace: Trace, passes: float) -> Channel:
    """A channel that copies all that autograd saved, one way, in so many times the plain step's time."""
    size = sum(trace.storages[trace.values[v].storage].bytes for v in movable(trace, 1))
    speed = int(size / (passes * trace.plain_time_ns / 1e9))
    return replace(FAST, name=f"{passes} steps", write_bytes_per_s=speed, read_bytes_per_s=speed)


def test_two_copies_share_a_channel_and_hide_behind_the_computation() -> None:
    channel = Channel(name="disk", capacity_bytes=1000, write_bytes_per_s=1_000_000_000, read_bytes_per_s=500_000_000, latency_ns=10)
    copies = Copies([channel])
    copies.begin(Move(value=0, land=0, fetch=0), 100, 0, is_out=True)  # 0 to 110
    copies.begin(Move(value=1, land=0, fetch=0), 100, 50, is_out=True)  # 110 to 220
    copies.wait(0, 100)
    assert copies.stall_ns == 10
    copies.wait(1, 300)
    assert copies.stall_ns == 10
    copies.begin(Move(value=1, land=0, fetch=0), 100, 300, is_out=False)  # 310 to 520: what was lost delays it
    copies.wait(1, 300)
    assert (copies.stall_ns, copies.copy_ns, copies.moved_bytes) == (10 + 210, 110 + 110 + 210, 300)
    copies.wait(1, 300)
    assert copies.stall_ns == 220


@pytest.mark.parametrize("passes", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("share", [0.25, 0.8, 3.0])
def test_the_trace_without_the_moved_values_says_the_same_peak(trace: Trace, passes: float, share: float) -> None:
    channel = channel_of(trace, passes)
    moves = placed(trace, chosen(trace, channel, share), channel)
    other = without(trace, moves, (channel,))
    check(other)
    mine = simulate(trace, (0,) * len(trace.values), moves=moves, channels=(channel,))
    assert mine.peak_bytes == simulate(other, (0,) * len(other.values)).peak_bytes
    assert mine.moved_bytes == 2 * sum(trace.storages[trace.values[move.value].storage].bytes for move in moves)


@pytest.mark.parametrize("passes", [0.2, 1.0, 5.0, 50.0])
def test_never_slower_than_without_and_less_memory(trace: Trace, passes: float) -> None:
    channels = (channel_of(trace, passes),)
    alone, both = frontier_of(trace), frontier_of(trace, channels)
    for point in alone.points:
        assert both.at(point.peak_bytes).time_ns <= point.time_ns
    assert both.points[0].peak_bytes <= alone.points[0].peak_bytes
    if passes <= 1:
        plain_ns = trace.plain_time_ns
        middle = (alone.points[0].peak_bytes + alone.points[-1].peak_bytes) // 2
        assert both.at(middle).time_ns - plain_ns < 0.7 * (alone.at(middle).time_ns - plain_ns)


def test_a_plan_with_moves_is_judged_as_it_is_written_up(trace: Trace) -> None:
    channels = (channel_of(trace, 0.5),)
    lowest = least(trace, channels)
    plan = solve(trace, (lowest.peak_bytes + lowest.plain_peak_bytes) // 2, channels=channels)
    assert plan.moves
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.bound_ns == trace.plain_time_ns
    seen = plan.judged(trace)
    assert (seen.peak_bytes, seen.time_ns, seen.stall_ns) == (plan.peak_bytes, plan.time_ns, plan.stall_ns)
    assert Plan.from_json(plan.to_json()) == plan


def test_two_places_carry_more_than_one(trace: Trace) -> None:
    one = channel_of(trace, 1.0)
    two = (replace(one, capacity_bytes=one.write_bytes_per_s // 50), replace(one, name="other"))
    alone, both = frontier_of(trace, (one,)), frontier_of(trace, two)
    middle = (alone.points[0].peak_bytes + alone.points[-1].peak_bytes) // 2
    plan = both.at(middle)
    assert {move.tier for move in plan.moves} == {0, 1}
    assert held_at(trace, plan, 0) <= two[0].capacity_bytes
    assert plan.judged(trace).time_ns == plan.time_ns
    assert plan.time_ns <= frontier_of(trace).at(middle).time_ns


def held_at(trace: Trace, plan: Plan, tier: int) -> int:
    return sum(trace.storages[trace.values[move.value].storage].bytes for move in plan.moves if move.tier == tier)


def test_the_frontier_shows_both_curves(trace: Trace, tmp_path: Path) -> None:
    profile = punar.Profile(trace=trace)
    alone, both = punar.frontier(profile), punar.frontier(profile, offload=f"disk:{tmp_path}")
    for point in alone.points:
        assert both.at(point.peak_bytes).time_ns <= point.time_ns
    assert both.points[0].plan.peak_bytes == both.points[0].peak_bytes
    assert punar.solve(profile, budget="min", offload=f"disk:{tmp_path}").peak_bytes <= alone.points[0].peak_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_tier_holds_no_more_than_it_may(trace: Trace) -> None:
    channel = replace(FAST, capacity_bytes=sum(trace.storages[trace.values[v].storage].bytes for v in movable(trace)) // 3)
    taken = chosen(trace, channel, 9.0)
    assert 0 < sum(trace.storages[trace.values[v].storage].bytes for v in taken) <= channel.capacity_bytes


def test_only_what_is_saved_once_and_not_written_again_moves(trace: Trace) -> None:
    for v in movable(trace, 1):
        value = trace.values[v]
        assert not trace.storages[value.storage].is_source
        assert [other.id for other in trace.values if other.storage == value.storage][-1] == v
        assert any(kind == EventKind.DEMAND and trace.saves[id].value == v for kind, id in trace.events)


def test_another_solver_or_too_little_memory(trace: Trace) -> None:
    with pytest.raises(UsageError, match="plans recomputation alone"):
        solve(trace, 1 << 40, "full", (FAST,))
    with pytest.raises(InfeasibleBudget, match="no solver here reaches less"):
        find("auto").solve(trace, 1, (FAST,))
