"""The exact solver for small steps: an integer programme that is corrected by the simulator until both agree.

NOTE. What is exact, and how.

1. The family: every value is either held from forward on, or dropped and held once it was made again (``hold_from`` 0 or 1).
2. The programme knows for each value whether it is dropped, for each operator whether it runs again, and for each value and cell of the
   step (``plan/pressure.py``) whether it is away. A dropped value is away until it is asked for, or until something that reads it and is dropped
   as well is back. Time is what runs again; memory in a cell is the plain step's less what is away, and where a value is made again for
   its own demand, its operator needs its room.
3. It leaves out what else replays need, so that its optimum is a lower bound for the family. The simulator judges the plan; where
   the plan does not fit, or is slower than the programme thought, it is excluded, and the programme is solved again.
4. The best judged plan is optimal once the programme's optimum is no less than its time.

Source: the formulation follows Jain et al. 2020, Checkmate, arXiv:1910.02653, section 4, with one variable a value instead of one a value and
stage; the loop is logic-based Benders decomposition, Hooker, Ottosson 2003, doi:10.1007/s10107-003-0375-9.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from punar.errors import MissingDependency, UsageError
from punar.ir import EventKind, Trace
from punar.ir.lineage import Lineage, lineage_of
from punar.plan import Plan, make_plan
from punar.plan.pressure import pressure_of
from punar.plan.simulate import simulate
from punar.solvers.base import infeasible


@dataclass(frozen=True, slots=True)
class Milp:
    """Finds the fastest plan of the family; for steps of up to about ``values`` droppable values, within ``rounds`` corrections."""

    values: int = 400
    rounds: int = 400
    name: ClassVar[str] = "milp"
    source: ClassVar[str] = "Jain et al. 2020, Checkmate, arXiv:1910.02653; Hooker, Ottosson 2003, doi:10.1007/s10107-003-0375-9"

    def solve(self, trace: Trace, budget_bytes: int) -> Plan:
        programme = _Programme(trace, budget_bytes)
        if len(programme.free) > self.values:
            raise UsageError(
                f"solver 'milp' was asked for a step with {len(programme.free)} values that could be dropped; it is meant for at most {self.values}, "
                f"since its time grows exponentially; use 'auto', or 'milp{{values={len(programme.free)}}}' to wait"
            )
        best: tuple[int, list[int]] | None = None
        least: tuple[int, list[int]] | None = None
        if not programme.free:
            kept = simulate(trace, (0,) * len(trace.values))
            fitting = (kept.time_ns, [0] * len(trace.values)) if kept.peak_bytes <= budget_bytes else None
            return _answer(trace, budget_bytes, fitting, (kept.peak_bytes, [0] * len(trace.values)))
        for _ in range(self.rounds):
            found = programme.optimum()
            if found is None or (best is not None and found[0] >= best[0] - trace.plain_time_ns - 0.5):
                return _answer(trace, budget_bytes, best, least)
            hold = found[1]
            seen = simulate(trace, hold)
            if least is None or seen.peak_bytes < least[0]:
                least = (seen.peak_bytes, hold)
            if seen.peak_bytes <= budget_bytes and (best is None or seen.time_ns < best[0]):
                best = (seen.time_ns, hold)
            programme.exclude(hold)
        raise UsageError(
            f"solver 'milp' made {self.rounds} corrections without a proof that its plan is the fastest; ask for more with "
            f"'milp{{rounds={4 * self.rounds}}}', or use 'auto'"
        )


def _answer(trace: Trace, budget_bytes: int, best: tuple[int, list[int]] | None, least: tuple[int, list[int]] | None) -> Plan:
    if best is not None:
        return make_plan(trace, best[1], solver="milp", budget_bytes=budget_bytes)
    hold = least[1] if least is not None else [1] * len(trace.values)
    plan = make_plan(trace, hold, solver="milp", budget_bytes=budget_bytes)
    raise infeasible(trace, plan, hint="or ask 'auto', which also makes values again several times")


class _Programme:
    """The integer programme in HiGHS. Columns: ``away[v]`` that a value is dropped, ``again[op]`` that an operator runs, ``gone[v, cell]``."""

    def __init__(self, trace: Trace, budget_bytes: int) -> None:
        self.trace, self.line, self.pressure = trace, lineage_of(trace), pressure_of(trace)
        self.free = candidates(trace, self.line)
        self.made_of = readers(self.line, trace, self.free)
        self.highs = _highs()
        self.column(0.0, is_integer=False)  # HiGHS does not solve a model without columns
        self.away = {v: self.column(0.0, is_integer=True) for v in self.free}
        ops = sorted({self.line.producer[v] for v in self.free})
        self.again = {op: self.column(trace.ops[op].time_ns + trace.overhead_ns, is_integer=False) for op in ops}
        self.tie_operators()
        columns = self.tie_memory(budget_bytes)
        self.tie_replays(budget_bytes, columns)

    def column(self, cost: float, *, is_integer: bool) -> int:
        index = int(self.highs.getNumCol())
        self.highs.addCol(cost, 0.0, 1.0, 0, [], [])
        if is_integer:
            self.highs.changeColIntegrality(index, _integer())
        return index

    def row(self, low: float, entries: Sequence[tuple[int, float]]) -> None:
        """sum(coefficient * column) >= low."""
        merged: dict[int, float] = {}
        for index, value in entries:
            merged[index] = merged.get(index, 0.0) + value
        self.highs.addRow(low, float("inf"), len(merged), list(merged), list(merged.values()))

    def tie_operators(self) -> None:
        """A saved value that is dropped is made again; so is what an operator that runs again reads, unless it is held."""
        for v in self.free:
            if self.line.is_saved[v]:
                self.row(0.0, [(self.again[self.line.producer[v]], 1.0), (self.away[v], -1.0)])
        for op, again in self.again.items():
            for u in self.line.reads[op]:
                if u in self.away:
                    self.row(-1.0, [(self.again[self.line.producer[u]], 1.0), (again, -1.0), (self.away[u], -1.0)])

    def tie_memory(self, budget_bytes: int) -> dict[int, dict[int, int]]:
        """In each cell the excess of the plain step is away."""
        gone = self.gone_columns(budget_bytes)
        for cell, columns in gone.items():
            entries = [(column, self.line.bytes[v] / 1024) for v, column in columns.items()]
            need = self.pressure.peak[cell] - budget_bytes
            if entries or need > 0:
                self.row(need / 1024, entries)
        return gone

    def tie_replays(self, budget_bytes: int, gone: dict[int, dict[int, int]]) -> None:
        """Where a value is still away when it is first asked for, its operator needs its room there, beside what is not away."""
        for cell, live in first_demands(self.trace).items():
            columns = gone.get(cell - 1, {})
            for v in columns:
                if self.pressure.asked[v] == cell:
                    need = live - self.line.bytes[v] + self.trace.ops[self.line.producer[v]].peak_bytes - budget_bytes
                    if need > 0:
                        others = [(column, self.line.bytes[u] / 1024) for u, column in columns.items() if u != v]
                        self.row(0.0, [*others, (columns[v], -need / 1024)])

    def gone_columns(self, budget_bytes: int) -> dict[int, dict[int, int]]:
        """For each cell over the budget, a column for each saved value that may be away there, tied to what is asked for first."""
        line, found = self.line, dict[int, dict[int, int]]()
        saved = [v for v in self.free if line.is_saved[v]]
        spans = {v: self.pressure.gaps(v)[:1] for v in saved if self.counts(v)}
        chains = {v: list(self.remakers(v)) for v in spans}
        for cell, peak in enumerate(self.pressure.peak):
            if peak <= budget_bytes:
                continue
            columns = {v: self.column(0.0, is_integer=False) for v, gaps in spans.items() if any(a <= cell < b for a, b in gaps)}
            found[cell] = columns
            for v, column in columns.items():
                self.row(0.0, [(self.away[v], 1.0), (column, -1.0)])
                for dropped, last in chains[v]:
                    self.tie_return(cell, column, dropped, last, columns)
        return found

    def remakers(self, value: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """What brings a value back before it is asked for: (all that must be dropped for it, the saved value that is made again)."""
        stack: list[tuple[int, tuple[int, ...]]] = [(value, ())]
        while stack:
            u, dropped = stack.pop()
            for w in self.made_of.get(u, ()):
                if self.line.is_saved[w]:
                    yield (*dropped, w), w
                else:
                    stack.append((w, (*dropped, w)))

    def tie_return(self, cell: int, column: int, dropped: tuple[int, ...], last: int, columns: dict[int, int]) -> None:
        """gone[value] <= gone[last], if all of ``dropped`` are; nothing is known of a value that is never away alone."""
        entries = [(column, -1.0), *((self.away[w], -1.0) for w in dropped)]
        if last in columns:
            entries.append((columns[last], 1.0))
        elif cell < self.pressure.asked[last]:
            return
        self.row(-1.0 * len(dropped), entries)

    def counts(self, value: int) -> bool:
        """Whether a value stands for its storage: the last of its saved versions does."""
        same = [v for v in self.free if self.line.storage[v] == self.line.storage[value] and self.line.is_saved[v]]
        return value == max(same)

    def exclude(self, hold: Sequence[int]) -> None:
        """At least one value is decided otherwise than in ``hold``."""
        ones = [self.away[v] for v in self.free if hold[v]]
        zeros = [self.away[v] for v in self.free if not hold[v]]
        self.row(1.0 - len(ones), [(c, 1.0) for c in zeros] + [(c, -1.0) for c in ones])

    def optimum(self) -> tuple[float, list[int]] | None:
        """The least extra time that the programme thinks possible, with ``hold_from``; None where nothing is feasible."""
        self.highs.run()
        status = self.highs.getModelStatus()
        if status == _highspy().HighsModelStatus.kNotset:  # HiGHS was used with another number of threads in this process
            self.highs.resetGlobalScheduler(True)
            self.highs.run()
            status = self.highs.getModelStatus()
        if status == _infeasible():
            return None
        if status != _optimal():
            raise UsageError(
                f"solver 'milp' asked HiGHS for an optimum, it ended with {self.highs.modelStatusToString(status)}; use 'auto'"
            )
        solution = self.highs.getSolution().col_value
        hold = [0] * len(self.trace.values)
        for v in self.free:
            hold[v] = int(solution[self.away[v]] > 0.5)
        return float(self.highs.getInfo().mip_dual_bound), hold


def first_demands(trace: Trace) -> dict[int, int]:
    """For each cell that begins with a demand, the bytes that are live just before it in the plain step."""
    pressure, line = pressure_of(trace), lineage_of(trace)
    live, found = trace.resident_bytes, dict[int, int]()
    references: dict[int, int] = {}
    for place, (kind, id) in enumerate(trace.events):
        if kind == EventKind.RUN:
            for storage, size in line.makes[id]:
                references[storage] = 1
                live += size
            continue
        storage = id if kind == EventKind.FREE else line.storage[trace.saves[id].value]
        if storage not in references:
            continue
        if kind == EventKind.DEMAND:
            found.setdefault(pressure.cell[place], live)
        references[storage] += {EventKind.SAVE: 1, EventKind.DEMAND: 0, EventKind.RETURN: 0}.get(kind, -1)
        if not references[storage]:
            live -= trace.storages[storage].bytes
    return found


def candidates(trace: Trace, line: Lineage) -> list[int]:
    """The values whose ``hold_from`` matters: those that replays may make."""
    found: set[int] = set()
    stack = [v for v in trace.saved_values() if line.can_replay[v] and not line.is_free[v]]
    while stack:
        v = stack.pop()
        if v in found or not line.can_replay[v] or line.is_free[v]:
            continue
        found.add(v)
        stack.extend(line.reads[line.producer[v]])
    return sorted(found)


def readers(line: Lineage, trace: Trace, free: Sequence[int]) -> dict[int, list[int]]:
    """For each value what is made of it, among the free ones."""
    made_of: dict[int, list[int]] = {}
    for w in free:
        for u in line.reads[line.producer[w]]:
            made_of.setdefault(u, []).append(w)
    return made_of


def _highs() -> Any:
    with _banner_on_stderr():
        highs = _highspy().Highs()
    highs.silent()
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("mip_rel_gap", 0.0)
    highs.setOptionValue("random_seed", 0)
    return highs


def _infeasible() -> Any:
    return _highspy().HighsModelStatus.kInfeasible


def _optimal() -> Any:
    return _highspy().HighsModelStatus.kOptimal


def _integer() -> Any:
    return _highspy().HighsVarType.kInteger


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


def _highspy() -> Any:
    try:
        import highspy
    except ImportError as error:
        raise MissingDependency(
            "solver 'milp' was asked for, which needs the package highspy; it is not installed here; run 'pip install highspy'"
        ) from error
    return highspy
