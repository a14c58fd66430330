"""Drops saved values in the order of the bytes that a second of recomputation frees."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from punar.ir import Trace
from punar.ir.blocks import layout_of
from punar.ir.derived import derived
from punar.ir.lineage import Lineage, lineage_of
from punar.plan import Plan, make_plan
from punar.solvers.base import infeasible
from punar.solvers.patience import GIVEN_UP, judged

RUNGS = 24
"""Into how many steps of equal bytes the order of drops is divided; a quarter of them for long steps."""

LONG = 20_000
"""From how many events on a step counts as long."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """Drops the values with most bytes per second of recomputation first, until the budget is met, in steps of a 24th of their bytes (a 6th for long steps)."""

    name: ClassVar[str] = "greedy"
    source: ClassVar[str] = (
        "the ratio rule of knapsack problems; Dantzig 1957, Discrete-Variable Extremum Problems, doi:10.1287/opre.5.2.266"
    )

    def solve(self, trace: Trace, budget_bytes: int) -> Plan:
        tried = ladder(trace)
        fitting = [step for step in tried if step.peak_bytes <= budget_bytes]
        best = min(fitting, key=lambda step: step.time_ns) if fitting else min(tried, key=lambda step: step.peak_bytes)
        plan = make_plan(trace, dropping(trace, drop_order(trace)[: best.count]), solver=self.name, budget_bytes=budget_bytes)
        if not fitting:
            raise infeasible(trace, plan, hint="or ask 'auto', which reaches lower budgets")
        return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """What dropping the first ``count`` values costs."""

    count: int
    peak_bytes: int
    time_ns: int


@derived
def ladder(trace: Trace) -> tuple[Rung, ...]:
    """Prefixes of the drop order of evenly spaced bytes, judged; bounded in number, so that long steps plan fast."""
    order, line = drop_order(trace), lineage_of(trace)
    freed = list(accumulate((line.bytes[v] for v in order), initial=0))
    rungs = RUNGS if len(trace.events) < LONG else RUNGS // 4
    counts = sorted({bisect_left(freed, freed[-1] * k // rungs) for k in range(rungs + 1)} | {len(order)})
    seen = [(count, judged(trace, dropping(trace, order[:count]))) for count in counts]
    return tuple(Rung(count=count, peak_bytes=step.peak_bytes, time_ns=step.time_ns) for count, step in seen if step is not GIVEN_UP)


def dropping(trace: Trace, dropped: Sequence[int]) -> list[int]:
    """``hold_from`` of the plan that drops the given values, and holds each once it was made again for its latest user."""
    layout = layout_of(trace)
    hold = [0] * len(trace.values)
    for value in dropped:
        hold[value] = max(layout.clock[layout.last_use[value]], 1)
    return hold


@derived
def drop_order(trace: Trace) -> tuple[int, ...]:
    """The saved values that can be dropped, most bytes per second of recomputation first, each from the nearest saved ones."""
    line = lineage_of(trace)
    droppable = [v for v in trace.saved_values() if line.can_replay[v] and not line.is_free[v] and line.bytes[v]]
    return tuple(sorted(droppable, key=lambda v: (-line.bytes[v] / cost_ns(trace, line, v), v)))


def cost_ns(trace: Trace, line: Lineage, value: int) -> int:
    """Time to make a value again from sources and the nearest saved values."""
    ops: set[int] = set()
    stack = [value]
    while stack:
        op = line.producer[stack.pop()]
        if op not in ops:
            ops.add(op)
            stack.extend(u for u in line.reads[op] if line.can_replay[u] and not line.is_saved[u])
    return sum(trace.ops[op].time_ns + trace.overhead_ns for op in ops) or 1
