"""Where the plain step needs memory, and for which of those moments each value could give some back.

NOTE. Terms.

1. A *cell* is a stretch of events in which no storage that a forward operator made is freed, asked for or released: what can be dropped is
   the same all through it, so that only its highest operator matters.
2. A held value presses on memory from its *start*, when the step's own last reference to it is gone, to its last release.
   Saved versions of one storage press together: each stands for the storage.
3. Where it is dropped instead it gives its bytes back until it is made again, which is at its first demand, or earlier where a replay
   of something else needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from punar.ir.derived import derived
from punar.ir.trace import EventKind, Trace
from punar.plan.simulate import highest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """The cells of a trace, and when each value presses (Rules 1 and 2). Times are cells.

    ``cell[event]``; ``peak[cell]``: bytes of the plain step; ``seal``: in which backward begins. For values: ``start``; ``asked``: the first
    demand, and of a value that was not saved the latest first demand for what is made of it; ``windows``: the spans [demand, release) in which
    backward has it at hand; ``released``: the last release.
    """

    cell: tuple[int, ...]
    peak: tuple[int, ...]
    seal: int
    start: tuple[int, ...]
    asked: tuple[int, ...]
    windows: tuple[tuple[tuple[int, int], ...], ...]
    released: tuple[int, ...]

    def profile(self, trace: Trace, hold_from: Sequence[int], *, is_closed: bool = False) -> list[int]:
        """The highest bytes in each cell under a plan, replays included."""
        return highest(trace, hold_from, self.cell, is_closed=is_closed)[1]

    def gaps(self, value: int) -> list[tuple[int, int]]:
        """The spans of cells in which a value that is not held need not be there: before, and between, its windows."""
        spans, begin = [], self.start[value]
        for demand, release in self.windows[value]:
            if demand > begin:
                spans.append((begin, demand))
            begin = max(begin, release)
        return spans


@derived
def pressure_of(trace: Trace) -> Pressure:
    """Derives the cells and spans; computed once a trace. Complexity: one simulation, and linear in the events."""
    cell, at = [], 0
    matters = _matters(trace)
    for kind, id in trace.events:
        if kind == EventKind.FREE:
            at += matters[id]
        elif kind in (EventKind.DEMAND, EventKind.RELEASE):
            at += matters[trace.values[trace.saves[id].value].storage]
        cell.append(at)
    freed = [at + 1] * len(trace.storages)
    released = [0] * len(trace.storages)
    demands: list[list[tuple[int, int]]] = [[] for _ in trace.storages]
    pending: dict[int, int] = {}
    seal = at
    for place, (kind, id) in enumerate(trace.events):
        if kind == EventKind.FREE and matters[id]:
            freed[id] = cell[place]
        elif kind == EventKind.DEMAND:
            seal = min(seal, cell[place])
            pending.setdefault(id, cell[place])
        elif kind == EventKind.RELEASE:
            storage = trace.values[trace.saves[id].value].storage
            released[storage] = cell[place]
            if id in pending:
                demands[storage].append((pending.pop(id), cell[place]))
    by_storage = [tuple(sorted(spans)) for spans in demands]
    windows = tuple(by_storage[value.storage] for value in trace.values)
    return Pressure(
        cell=tuple(cell),
        peak=tuple(highest(trace, (0,) * len(trace.values), cell)[1]),
        seal=seal,
        start=tuple(freed[value.storage] for value in trace.values),
        asked=_asked(trace, [spans[0][0] if spans else -1 for spans in windows]),
        windows=windows,
        released=tuple(released[value.storage] for value in trace.values),
    )


def _matters(trace: Trace) -> list[bool]:
    """For each storage whether a forward operator made it: only those can be held or dropped."""
    matters = [False] * len(trace.storages)
    for value in trace.values:
        if value.producer >= 0 and not trace.ops[value.producer].is_backward and not trace.storages[value.storage].is_source:
            matters[value.storage] = True
    return matters


def _asked(trace: Trace, demand: list[int]) -> tuple[int, ...]:
    """The first demands, -1 where there is none, completed for what was not saved."""
    asked = list(demand)
    for op in reversed(trace.ops):
        last = max((asked[v] for v in op.outputs), default=-1)
        for u in op.inputs:
            if demand[u] < 0 and last > asked[u]:
                asked[u] = last
    return tuple(asked)
