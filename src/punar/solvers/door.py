"""The verbs of the solvers."""

from __future__ import annotations

from itertools import accumulate

from punar.errors import UsageError
from punar.ir import Trace
from punar.plan import Plan
from punar.plan.moves import Channel
from punar.solvers.auto import Auto, frontier_of
from punar.solvers.registry import find
from punar.solvers.search import Point


def solve(trace: Trace, budget_bytes: int, solver: str = "auto", channels: tuple[Channel, ...] = ()) -> Plan:
    """Finds a plan for a traced step whose predicted peak, of the whole step, is at most ``budget_bytes``.

    ``channels``: where values may be moved meanwhile; ``auto`` alone makes use of them.

    Raises:
        InfeasibleBudget: the solver knows no plan that fits; the error says which budget would do.
        UnknownSolver: there is no such solver.
        UsageError: another solver than ``auto`` was given channels.
    """
    found = find(solver)
    if not channels:
        return found.solve(trace, budget_bytes)
    if not isinstance(found, Auto):
        raise UsageError(f"asked solver {solver!r} to offload; it plans recomputation alone: ask 'auto', or leave `offload` out")
    return found.solve(trace, budget_bytes, channels)


def least(trace: Trace, channels: tuple[Channel, ...] = ()) -> Plan:
    """The plan of least predicted peak that ``auto`` finds worth its time: of about one extra forward pass at most.

    A lower budget may still be met when it is asked for, by plans that make values again more often.
    """
    return frontier_of(trace, channels).sensible().least()


def least_peak(trace: Trace, channels: tuple[Channel, ...] = ()) -> int:
    """The least peak of any plan that ``auto`` knows, whatever time it takes: a lower budget is infeasible. Units: bytes."""
    return frontier_of(trace, channels).points[0].peak_bytes


def frontier(trace: Trace) -> tuple[Plan, ...]:
    """The whole curve of ``auto``, from the least peak to the plain step's: each plan is faster and larger than the one before it."""
    return frontier_of(trace).sensible().plans()


def frontier_points(trace: Trace, channels: tuple[Channel, ...] = ()) -> tuple[tuple[Point, int], ...]:
    """The same curve without its plans written up: each judged point, with the lower bound in ns at its peak, or at a higher one where that is more.

    A plan that fits fits in more memory too, so that what is proved there holds here; the ascent does not reach every point's best value.
    """
    found = frontier_of(trace, channels).sensible()
    bounds = accumulate((found.bound(point.peak_bytes) for point in reversed(found.points)), max)
    return tuple((point, min(bound_ns, point.time_ns)) for point, bound_ns in zip(found.points, reversed(list(bounds)), strict=True))
