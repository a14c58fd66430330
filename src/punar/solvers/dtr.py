"""Dynamic tensor rematerialization: what an online heuristic would have dropped, simulated on the trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from punar.ir import EventKind, Trace
from punar.ir.lineage import lineage_of
from punar.plan import Plan, make_plan
from punar.plan.simulate import simulate
from punar.solvers.base import fastest
from punar.solvers.segments import dropped_late

LEVELS = 12
"""How many limits on the forward pass are tried: what backward makes again needs room as well."""


@dataclass(frozen=True, slots=True)
class Dtr:
    """Runs the forward pass under a limit; at each excess evicts the value of least time per byte and staleness. The highest limit that fits wins."""

    name: ClassVar[str] = "dtr"
    source: ClassVar[str] = (
        "Kirisame et al. 2021, Dynamic Tensor Rematerialization, arXiv:2006.09616, heuristic h_DTR with evicted neighbourhoods' cost"
    )

    def solve(self, trace: Trace, budget_bytes: int) -> Plan:
        holds = dict.fromkeys(tuple(dropped_late(trace, evicted(trace, limit))) for limit in limits(trace, budget_bytes))
        plans = (make_plan(trace, hold, solver=self.name, budget_bytes=budget_bytes) for hold in holds)
        return fastest(trace, plans, budget_bytes)


def limits(trace: Trace, budget_bytes: int) -> Iterator[int]:
    """From the budget down to what the step needs at least."""
    high = min(budget_bytes, simulate(trace, [0] * len(trace.values)).peak_bytes)
    for level in range(LEVELS, -1, -1):
        yield trace.resident_bytes + (high - trace.resident_bytes) * level // LEVELS


def evicted(trace: Trace, limit_bytes: int) -> set[int]:
    """The saved values that the heuristic has dropped when backward begins."""
    pool = _Pool(trace, limit_bytes)
    for clock, (kind, id) in enumerate(trace.events):
        if kind == EventKind.DEMAND:
            break
        pool.pass_event(clock, kind, id)
    return pool.evicted


class _Pool:
    """The live storages of the forward pass under a limit."""

    def __init__(self, trace: Trace, limit_bytes: int) -> None:
        self.trace, self.line, self.limit = trace, lineage_of(trace), limit_bytes
        self.live = trace.resident_bytes
        self.used: dict[int, int] = {}
        self.is_user_alive = [False] * len(trace.storages)
        self.evicted: set[int] = set()

    def pass_event(self, clock: int, kind: EventKind, id: int) -> None:
        if kind == EventKind.RUN:
            self.run(clock, id)
        elif kind == EventKind.SAVE:
            self.used[self.trace.saves[id].value] = clock
        elif kind == EventKind.FREE and self.is_user_alive[id]:
            self.is_user_alive[id] = False
            if not any(self.line.storage[v] == id for v in self.used):
                self.live -= self.trace.storages[id].bytes
            self.shrink(clock, 0)

    def run(self, clock: int, op: int) -> None:
        for v in self.line.reads[op]:
            if v in self.used:
                self.used[v] = clock
        self.shrink(clock, self.trace.ops[op].peak_bytes)
        for v in self.line.creates[op]:
            self.is_user_alive[self.line.storage[v]] = True
            self.live += self.line.bytes[v]

    def shrink(self, clock: int, extra: int) -> None:
        """Evicts what is held for backward alone until ``extra`` more bytes fit."""
        while self.live + extra > self.limit:
            candidates = [v for v in self.used if self.is_evictable(v)]
            if not candidates:
                return
            value = min(candidates, key=lambda v: (self.cost_ns(v) / (self.line.bytes[v] * (clock - self.used[v] + 1)), v))
            self.live -= self.line.bytes[value]
            self.evicted.add(value)
            del self.used[value]

    def is_evictable(self, value: int) -> bool:
        line = self.line
        return bool(
            line.can_replay[value] and not line.is_free[value] and line.bytes[value] and not self.is_user_alive[line.storage[value]]
        )

    def cost_ns(self, value: int) -> int:
        """Time to make a value again from what has not been evicted: its own, and its evicted ancestors'."""
        ops, stack = set[int](), [value]
        while stack:
            op = self.line.producer[stack.pop()]
            if op not in ops:
                ops.add(op)
                stack.extend(u for u in self.line.reads[op] if u in self.evicted or (self.line.can_replay[u] and not self.line.is_saved[u]))
        return sum(self.trace.ops[op].time_ns + self.trace.overhead_ns for op in ops)
