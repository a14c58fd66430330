"""The verbs of the solvers."""

from __future__ import annotations

from punar.ir import Trace
from punar.plan import Plan, lower_bound
from punar.solvers.auto import frontier_of
from punar.solvers.registry import find
from punar.solvers.search import Point


def solve(trace: Trace, budget_bytes: int, solver: str = "auto") -> Plan:
    """Finds a plan for a traced step whose predicted peak, of the whole step, is at most ``budget_bytes``.

    Raises:
        InfeasibleBudget: the solver knows no plan that fits; the error says which budget would do.
        UnknownSolver: there is no such solver.
    """
    return find(solver).solve(trace, budget_bytes)


def least(trace: Trace) -> Plan:
    """The plan of least predicted peak that ``auto`` finds worth its time: of about one extra forward pass at most.

    A lower budget may still be met when it is asked for, by plans that make values again more often.
    """
    return frontier_of(trace).sensible().least()


def frontier(trace: Trace) -> tuple[Plan, ...]:
    """The whole curve of ``auto``, from the least peak to the plain step's: each plan is faster and larger than the one before it."""
    return frontier_of(trace).sensible().plans()


def frontier_points(trace: Trace) -> tuple[tuple[Point, int], ...]:
    """The same curve without its plans written up: each judged point, with the lower bound in ns at its peak."""
    points = frontier_of(trace).sensible().points
    return tuple((point, min(lower_bound(trace, point.peak_bytes), point.time_ns)) for point in points)
