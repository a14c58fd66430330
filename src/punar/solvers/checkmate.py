"""Checkmate's integer programme over the whole graph of a step, forward and backward: for comparison, on small steps.

NOTE. The programme, and how far it is the paper's.

1. Nodes are the step's operators in their order, and backward's demands for values that can be made again (no bytes, no time): the stages.
   In stage t the nodes up to t may run again in their order, and node t runs for the first time. ``again[t, i]`` (there R) says that operator i does,
   ``kept[t, v]`` (there S) that a value is there when the stage begins. Here an operator may have several values, each kept on its own.
2. What runs again finds what it reads: it runs again itself or is kept. What is kept was kept before, or was made in the stage before. Node t finds
   what the trace says is there then: what it reads, what the step itself still refers to, what backward has at hand, and what cannot be made again.
3. Memory goes from node to node within a stage (there U): plus what a node makes, less what is freed after it. ``freed[t, v, k]`` (there FREE): node k ran,
   nothing later in the stage reads the value, and it is not kept. The paper bounds it by one sum of these hazards, we by each of them, which
   is the same for integers and tighter between them. While an operator runs, it has its room (``peak_bytes``, scratch included).
4. Backward's operators run once (in the paper all may run again): our runtime has no way to repeat them. A second run costs ``overhead_ns`` more.
5. Any ``hold_from`` plan that fits gives a solution of its time: take what its simulation runs again and has there. So the programme's lower bound is one for
   all those plans, those that make a value again several times included. That holds for steps without in-place writes; others are refused.
6. Decoding. A value that is kept when backward begins is held (0). One that runs again is held from its last run that keeps it over the end of
   its stage on, or never (``NEVER``). So the schedule is not obeyed where it keeps a value for a while, drops it and makes it again, where
   it runs an operator again in forward, and where it makes a value again before anything asks for it. Three more readings are judged by the simulator: what is
   kept, but runs again later, is dropped; and what is dropped is held from its first repetition on, in either. The fastest that fits is the plan; where none
   does, the error says so, though the schedule would.

Measured on one core of 2023 that was shared, HiGHS 1.16: at 3 and 5 eighths of the way from ``auto``'s least peak to the plain one, 26 nodes in 0.3 to 1.2 s,
41 of a transformer block in 8 to 21 s, 59 of a chain in 9 to 19 s, 72 of two blocks not in 60 s; at the least peak itself 26 nodes in 9 s, 35 not in 60 s.

Source: Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez 2020, Checkmate: Breaking the memory wall with optimal tensor rematerialization,
MLSys, arXiv:1910.02653, sections 4.2 to 4.7: equations 1 to 9, with the frontier-advancing stages of 4.6.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from punar.errors import UsageError
from punar.ir import EventKind, Trace
from punar.ir.lineage import NEVER, lineage_of
from punar.plan import Plan, make_plan
from punar.solvers.base import fastest
from punar.solvers.highs import Outcome, Programme
from punar.solvers.stages import candidates


@dataclass(frozen=True, slots=True)
class Checkmate:
    """Solves the paper's programme for steps of at most ``nodes`` nodes, in ``seconds`` at most, and judges the plan nearest to its schedule."""

    nodes: int = 60
    seconds: float = 60.0
    name: ClassVar[str] = "checkmate"
    source: ClassVar[str] = "Jain et al. 2020, Checkmate, arXiv:1910.02653"

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"solver 'checkmate' was asked to take {self.seconds} seconds; give it some, as in 'checkmate{{seconds=60}}'")

    def solve(self, trace: Trace, budget_bytes: int) -> Plan:
        graph = self.graph(trace)
        schedule = Schedule(graph, budget_bytes)
        outcome = schedule.programme.run(seconds=self.seconds)
        plan = fastest(trace, self.plans(schedule, outcome, budget_bytes), budget_bytes)
        return replace(plan, bound_ns=min(plan.time_ns, trace.plain_time_ns + int(outcome.bound_ns * (1 - 1e-9) + 0.5)))

    def graph(self, trace: Trace) -> Graph:
        """The graph of a step that is small enough and writes nothing in place."""
        if any(value.version for value in trace.values):
            raise UsageError(
                "solver 'checkmate' was asked for a step with in-place writes; its graph has none; use 'milp', which models them, or 'auto'"
            )
        graph = Graph(trace)
        if len(graph.nodes) > self.nodes:
            raise UsageError(
                f"solver 'checkmate' was asked for a step of {len(graph.nodes)} operators and demands; it is meant for at most {self.nodes}, since "
                f"it decides for each pair of them; use 'milp' or 'auto', or 'checkmate{{nodes={len(graph.nodes)}}}' to wait"
            )
        return graph

    def plans(self, schedule: Schedule, outcome: Outcome, budget_bytes: int) -> Iterator[Plan]:
        """The readings of Rule 6; plans without choice where there is no schedule."""
        if outcome.values:
            read = [schedule.decoded(outcome.values, drops_repeated=drops) for drops in (False, True)]
            holds = [*read, *([min(r, 1) for r in hold] for hold in read)]
        else:
            holds = [[r] * len(schedule.trace.values) for r in (0, 1, NEVER)]
        for hold in holds:
            yield make_plan(schedule.trace, hold, solver=self.name, budget_bytes=budget_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An operator, or (-1) a demand for ``value``. ``finds``: the values that are there when it runs for the first time; ``clock``: backward's then."""

    op: int
    value: int
    finds: frozenset[int]
    clock: int


class Graph:
    """The nodes of a trace, and what may run again (Rules 1, 2 and 4)."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.line = trace, lineage_of(trace)
        self.free = set(candidates(trace, self.line))
        self.of_storage = {value.storage: value.id for value in trace.values if value.producer >= 0}
        self.nodes = list(self.walk())
        self.node_of = {node.op: t for t, node in enumerate(self.nodes) if node.op >= 0}
        self.ops = sorted({self.line.producer[v] for v in self.free})
        self.values = [v for v in self.of_storage.values() if self.line.bytes[v] and not trace.storages[self.line.storage[v]].is_source]
        self.reads = {op: [u for u in self.line.reads[op] if self.line.producer[u] >= 0] for op in self.ops}
        self.readers: dict[int, list[int]] = defaultdict(list)
        for op in self.ops:
            for u in self.reads[op]:
                self.readers[u].append(op)
        self.last = self.last_uses()

    def walk(self) -> Iterator[Node]:
        used, saved, lent, clock = set[int](), list[int](), list[int](), 0
        for kind, id in self.trace.events:
            value = id if kind in (EventKind.RUN, EventKind.FREE) else self.trace.saves[id].value
            match kind:
                case EventKind.RUN:
                    found = {u for u in self.line.reads[id] if self.line.producer[u] >= 0}
                    yield Node(op=id, value=-1, finds=self.present(used, saved, lent) | found, clock=clock)
                    used.update(self.line.storage[v] for v in self.line.creates[id])
                case EventKind.FREE:
                    used.discard(id)
                case EventKind.SAVE:
                    saved.append(value)
                case EventKind.DEMAND:
                    clock = max(clock, self.trace.demand_rank[value])
                    lent.append(value)
                    if value in self.free:
                        yield Node(op=-1, value=value, finds=self.present(used, saved, lent), clock=clock)
                case EventKind.RELEASE:
                    saved.remove(value)
            if kind in (EventKind.RELEASE, EventKind.RETURN) and value in lent:
                lent.remove(value)

    def present(self, used: set[int], saved: list[int], lent: list[int]) -> frozenset[int]:
        """What the step refers to, what backward has at hand, and what is saved and cannot be made again."""
        there = {self.of_storage[s] for s in used if s in self.of_storage} | set(lent) | {v for v in saved if v not in self.free}
        return frozenset(v for v in there if self.line.producer[v] >= 0)

    def last_uses(self) -> dict[int, int]:
        """For each value the last stage that may want it there."""
        last: dict[int, int] = dict.fromkeys(range(len(self.trace.values)), -1)
        for t, node in enumerate(self.nodes):
            last.update(dict.fromkeys(node.finds, t))
        for op in reversed(self.ops):
            end = max((last[v] for v in self.trace.ops[op].outputs), default=-1)
            last.update({u: max(last[u], end) for u in self.reads[op]})
        return last


class Schedule:
    """The programme of a graph and a budget."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph, self.trace, self.line = graph, graph.trace, graph.line
        self.room = max(budget_bytes - graph.trace.resident_bytes, 1)
        self.programme = Programme("checkmate")
        self.again: dict[tuple[int, int], int] = {}
        self.kept: dict[tuple[int, int], int] = {}
        for t in range(len(graph.nodes)):
            self.add_columns(t)
        for t in range(len(graph.nodes)):
            self.tie_values(t)
            self.tie_memory(t)

    def add_columns(self, t: int) -> None:
        graph = self.graph
        for op in graph.ops:
            if graph.node_of[op] < t and t <= max(graph.last[v] for v in self.trace.ops[op].outputs):
                cost = self.trace.ops[op].time_ns + self.trace.overhead_ns
                self.again[t, op] = self.programme.column(cost, is_integer=True)
        for v in graph.values:
            if graph.node_of[self.line.producer[v]] < t <= graph.last[v]:
                self.kept[t, v] = self.programme.column(is_integer=True)

    def made(self, t: int, value: int) -> dict[int, float]:
        """Whether a value is made in a stage, as a sum of columns; the first time is left out."""
        column = self.again.get((t, self.line.producer[value]))
        return {} if column is None else {column: 1.0}

    def there(self, t: int, value: int) -> dict[int, float]:
        """Whether a value is kept at the beginning of a stage or made in it."""
        column = self.kept.get((t, value))
        return self.made(t, value) | ({} if column is None else {column: 1.0})

    def tie_values(self, t: int) -> None:
        """Rule 2."""
        graph, row = self.graph, self.programme.row
        weighs = set(graph.values)
        for v in graph.nodes[t].finds:
            if v in weighs and graph.node_of[self.line.producer[v]] < t:
                row(1.0, self.there(t, v))
        for op in graph.ops:
            for u in graph.reads[op] if (t, op) in self.again else ():
                if u in weighs:
                    row(0.0, {**self.there(t, u), self.again[t, op]: -1.0})
        for v in graph.values:
            if (t, v) in self.kept and graph.node_of[self.line.producer[v]] < t - 1:
                row(0.0, {**self.there(t - 1, v), self.kept[t, v]: -1.0})

    def tie_memory(self, t: int) -> None:
        """Rule 3, in parts of the budget that is left beside what was there before the step."""
        graph, programme = self.graph, self.programme
        used = programme.column(is_integer=False)
        programme.row(0.0, {used: 1.0, **{self.kept[t, v]: -self.size(v) for v in graph.values if (t, v) in self.kept}})
        for op in (op for op in graph.ops if (t, op) in self.again):
            programme.row(-1.0, {used: -1.0, self.again[t, op]: -self.trace.ops[op].peak_bytes / self.room})
            after = programme.column(is_integer=False)
            programme.row(0.0, {after: 1.0, used: -1.0, **self.changes(t, op)})
            used = after
        first = graph.nodes[t].op
        if first >= 0:
            programme.row(self.trace.ops[first].peak_bytes / self.room - 1.0, {used: -1.0})

    def changes(self, t: int, op: int) -> dict[int, float]:
        """What is freed after an operator that runs again, less what it makes."""
        weighs = set(self.graph.values)
        outputs = [v for v in self.trace.ops[op].outputs if v in weighs]
        entries: dict[int, float] = {}
        for v in outputs:
            made = self.programme.column(is_integer=False)
            kept = {self.kept[t, v]: 1.0} if (t, v) in self.kept else {}
            self.programme.row(0.0, {made: 1.0, self.again[t, op]: -1.0, **kept})
            entries[made] = -self.size(v)
        for v in (*outputs, *(u for u in self.graph.reads[op] if u in weighs)):
            if v not in self.graph.nodes[t].finds:
                entries[self.freed(t, v, op)] = self.size(v)
        return entries

    def freed(self, t: int, value: int, op: int) -> int:
        """The column that says whether a value is freed after an operator, with its hazards."""
        column = self.programme.column(is_integer=False)
        self.programme.row(0.0, {self.again[t, op]: 1.0, column: -1.0})
        later = [self.again[t, reader] for reader in self.graph.readers[value] if reader > op and (t, reader) in self.again]
        for hazard in (*later, *([self.kept[t + 1, value]] if (t + 1, value) in self.kept else [])):
            self.programme.row(-1.0, {hazard: -1.0, column: -1.0})
        return column

    def size(self, value: int) -> float:
        return self.line.bytes[value] / self.room

    def decoded(self, values: Sequence[float], *, drops_repeated: bool) -> list[int]:
        """``hold_from`` of the nearest plan (Rule 6); ``drops_repeated``: what runs again later is not held from forward on, even if it was kept."""
        graph, hold = self.graph, [0] * len(self.trace.values)
        seal = next((t for t, node in enumerate(graph.nodes) if node.clock), len(graph.nodes))
        for v in graph.free:
            op = self.line.producer[v]
            stages = [t for t in range(seal, len(graph.nodes)) if (t, op) in self.again and values[self.again[t, op]] > 0.5]
            is_kept = (seal, v) in self.kept and values[self.kept[seal, v]] > 0.5
            if is_kept and not (drops_repeated and stages):
                continue
            lasting = [t for t in stages if (t + 1, v) in self.kept and values[self.kept[t + 1, v]] > 0.5]
            hold[v] = graph.nodes[lasting[-1]].clock if lasting else NEVER
        return hold
