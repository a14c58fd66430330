"""The default: the fastest of many judged plans that fits.

NOTE. How the plans are found.

1. Pieces (``plan/pieces.py``) say what each saved value costs to make again, in steps of least time per byte; on their own, and equal pieces once.
2. A cover (``cover.py``) takes those that relieve every moment of the step to the budget at least time, given when each dropped
   value will be made again.
3. The simulator judges the plan. Where the peak is missed, or the values are made again earlier than was assumed, the cover is repeated with what
   the simulator saw.
4. Splits (``splits.py``) keep replays from running far back; several are tried for each budget, until one comes near the lower bound (``plan/bound.py``).
5. This is done for a grid of budgets, refined where the time changes most. All judged plans, those of the simpler solvers among
   them, form the frontier, and every budget is answered from it: more budget never gives a slower plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from punar.ir import Trace
from punar.ir.blocks import cuts_of
from punar.plan import Plan, make_plan
from punar.plan.moves import Channel
from punar.plan.simulate import simulate
from punar.solvers.base import infeasible
from punar.solvers.greedy import drop_order, dropping, ladder
from punar.solvers.offload import bound_with, points_with_moves
from punar.solvers.revolve import revolved
from punar.solvers.search import Point, Search, undominated
from punar.solvers.segments import grouped
from punar.solvers.selective import selected

PASSES = 1.0
"""How many extra forward passes the plans of the frontier take at most; a lower budget is still answered when it is asked for."""

NEAR, MUCH, STEEP = 0.12, 0.03, 3.0
"""Plans at the low end are left out where one of at most ``NEAR`` more bytes (in parts of the least plan's, resident ones aside) is faster
by ``MUCH`` of the plain step, and by ``STEEP`` times that part of the plain step for each part of the plain step's bytes."""

NEARLY_PROVED = 0.045
"""How far from the lower bound, in parts of the plain step, a plan at the low end may be, if one of at most ``NEAR`` more bytes is nearer."""


@dataclass(frozen=True, slots=True)
class Auto:
    """Judges plans of many kinds once a trace, and answers each budget with the fastest that fits."""

    name: ClassVar[str] = "auto"
    source: ClassVar[str] = "this project; see docs/planning.md"

    def solve(self, trace: Trace, budget_bytes: int, channels: tuple[Channel, ...] = ()) -> Plan:
        return frontier_of(trace, channels).at(budget_bytes)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The judged plans that no other judged plan beats in both peak and time, by rising peak and falling time."""

    trace: Trace
    points: tuple[Point, ...]
    channels: tuple[Channel, ...] = ()

    def sensible(self) -> Frontier:
        """Only the plans of about one extra forward pass at most, and none at the low end that pays, or may pay, much time for little memory."""
        trace = self.trace
        forward = sum(op.time_ns + trace.overhead_ns for op in trace.forward_ops)
        points = [point for point in self.points if point.time_ns <= trace.plain_time_ns + PASSES * forward]
        if any(not channel.is_codec for channel in self.channels):
            return replace(self, points=tuple(points))
        full = simulate(trace, grouped(trace, 1)).peak_bytes
        highest = min(points[0].peak_bytes + NEAR * (points[0].peak_bytes - trace.resident_bytes), full - 1)
        first = _first_worthwhile(points, trace.resident_bytes, highest)
        return replace(self, points=tuple(points[_first_proved(self, points, first, highest) :]))

    def bound(self, budget_bytes: int) -> int:
        """A lower bound on the time of any plan, with moves by the channels or without (see ``bound_with``)."""
        return bound_with(self.trace, self.channels, budget_bytes)

    def at(self, budget_bytes: int) -> Plan:
        """The fastest plan that fits, be it sensible or not."""
        fitting = [point for point in self.points if point.peak_bytes <= budget_bytes]
        if not fitting:
            raise infeasible(self.trace, self.plan(self.points[0], budget_bytes), hint="no solver here reaches less")
        return self.plan(fitting[-1], budget_bytes)

    def least(self) -> Plan:
        return self.plan(self.points[0], self.points[0].peak_bytes)

    def plans(self) -> tuple[Plan, ...]:
        return tuple(self.plan(point, point.peak_bytes) for point in self.points)

    def plan(self, point: Point, budget_bytes: int) -> Plan:
        plan = make_plan(self.trace, point.hold_from, solver="auto", budget_bytes=budget_bytes, moves=point.moves, channels=self.channels)
        return replace(plan, bound_ns=min(self.bound(budget_bytes), plan.time_ns))


@lru_cache(maxsize=8)
def frontier_of(trace: Trace, channels: tuple[Channel, ...] = ()) -> Frontier:
    """Searches the whole frontier of a trace, with values moved to ``channels`` where there are some; computed once a trace."""
    if channels:
        found = [*frontier_of(trace).points, *points_with_moves(trace, channels)]
        return Frontier(trace, undominated(found), channels)
    search = Search(trace)
    for hold in others(trace, is_long=search.is_long):
        search.judge(hold)
    search.run()
    return Frontier(trace, undominated(search.points))


def _first_worthwhile(points: Sequence[Point], resident_bytes: int, highest_bytes: float) -> int:
    """The place of the first point that is not steep: none a little larger, up to ``highest_bytes``, is much faster."""
    whole = max(points[-1].peak_bytes - resident_bytes, 1)
    first = 0
    for at, point in enumerate(points):
        more = point.peak_bytes - points[first].peak_bytes
        faster = (points[first].time_ns - point.time_ns) / max(points[-1].time_ns, 1)
        if point.peak_bytes <= highest_bytes and faster >= max(MUCH, STEEP * more / whole):
            first = at
    return first


def _first_proved(frontier: Frontier, points: Sequence[Point], first: int, highest_bytes: float) -> int:
    """The first place from ``first`` on, up to ``highest_bytes``, of a point that is near its lower bound; ``first`` where there is none."""
    for at, point in enumerate(points[first:], start=first):
        if at > first and point.peak_bytes > highest_bytes:
            return first
        if point.time_ns - frontier.bound(point.peak_bytes) <= NEARLY_PROVED * frontier.trace.plain_time_ns:
            return at
    return first


def others(trace: Trace, *, is_long: bool) -> Iterator[list[int]]:
    """The plans of the simpler solvers: ``auto`` loses to none of them. For long steps only some of them are tried."""
    yield selected(trace)
    blocks = max(len(cuts_of(trace)) - 1, 1)
    sizes = {1, round(blocks**0.5)} if is_long else {*range(1, min(blocks, 12) + 1), round(blocks**0.5)}
    for size in sorted(sizes):
        yield grouped(trace, max(size, 1))
    for snapshots in () if is_long else (1, 2, 3, 4, 6, 8):
        yield revolved(trace, snapshots)
    order = drop_order(trace)
    for rung in ladder(trace):
        yield dropping(trace, order[: rung.count])
