"""A mixed-integer programme in HiGHS: columns between 0 and 1, and rows with a lower limit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from punar.errors import MissingDependency, UsageError

TICK_NS = 1000
"""Nanoseconds in a unit of the objective; the gaps at which HiGHS stops are far below one nanosecond of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run of HiGHS found.

    ``values``: of the columns in the best solution, empty where none was found. ``bound_ns``: no solution costs less; infinite where there is none.
    """

    values: Sequence[float]
    bound_ns: float


class Programme:
    """Columns and rows as they are added; minimizes the sum of the columns' costs."""

    def __init__(self, solver: str) -> None:
        self.solver = solver
        self.highs = _highs(solver)
        self.highspy = _highspy(solver)
        self.columns = self.rows = 0
        self.column(0.0, is_integer=False)  # HiGHS does not solve a model without columns

    def column(self, cost_ns: float = 0.0, *, is_integer: bool) -> int:
        """A new column between 0 and 1; its number."""
        self.highs.addCol(cost_ns / TICK_NS, 0.0, 1.0, 0, [], [])
        if is_integer:
            self.highs.changeColIntegrality(self.columns, self.highspy.HighsVarType.kInteger)
        self.columns += 1
        return self.columns - 1

    def row(self, low: float, entries: Mapping[int, float]) -> None:
        """sum(coefficient * column) >= low."""
        kept = {index: value for index, value in entries.items() if value}
        self.highs.addRow(low, float("inf"), len(kept), list(kept), list(kept.values()))
        self.rows += 1

    def run(self, *, seconds: float) -> Outcome:
        """Looks for the best solution for so long."""
        kinds, highs = self.highspy.HighsModelStatus, self.highs
        highs.setOptionValue("time_limit", max(seconds, 0.01))
        status = self.status_of_run()
        if status == kinds.kNotset:  # HiGHS was used with another number of threads in this process
            highs.resetGlobalScheduler(True)
            status = self.status_of_run()
        if status == kinds.kInfeasible:
            return Outcome(values=(), bound_ns=float("inf"))
        if status not in (kinds.kOptimal, kinds.kTimeLimit):
            raise UsageError(
                f"solver {self.solver!r} asked HiGHS for an optimum, it ended with {highs.modelStatusToString(status)}; use 'auto'"
            )
        info = highs.getInfo()
        is_found = info.primal_solution_status == self.highspy.SolutionStatus.kSolutionStatusFeasible
        return Outcome(values=tuple(highs.getSolution().col_value) if is_found else (), bound_ns=max(info.mip_dual_bound * TICK_NS, 0.0))

    def status_of_run(self) -> Any:
        self.highs.clearSolver()
        self.highs.run()
        return self.highs.getModelStatus()


def _highs(solver: str) -> Any:
    with _banner_on_stderr():
        highs = _highspy(solver).Highs()
    highs.silent()
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("mip_rel_gap", 0.0)
    highs.setOptionValue("mip_abs_gap", 0.4 / TICK_NS)
    highs.setOptionValue("random_seed", 0)
    return highs


@contextmanager
def _banner_on_stderr() -> Iterator[None]:
    """HiGHS greets on the process's standard output when it is first made; ours is for data."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _highspy(solver: str) -> Any:
    try:
        import highspy
    except ImportError as error:
        raise MissingDependency(
            f"solver {solver!r} was asked for, which needs the package highspy; it is not installed here; run 'pip install highspy'"
        ) from error
    return highspy
