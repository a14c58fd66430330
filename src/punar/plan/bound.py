"""A lower bound on the time of any plan at a budget.

NOTE. What is proved, and for which plans.

1. The family: every schedule that runs the trace's operators in the trace's order and, while backward goes on, may run any forward
   operator again, any number of times, at any moment, whole and from its inputs; it may hold any value over any span. It is wider than
   the plans that ``hold_from`` can write. Not in it: other operators, parts of operators, moving bytes elsewhere, compression.
2. Call a value that autograd saved *kept* where it is there without interruption from forward to its last use. Where it is not,
   its producer runs again at least once. A kept value presses on memory in all its gaps (``Pressure.gaps``); one that is not kept still
   does while backward has it at hand, which the gaps leave out.
3. Let R be the operators of a piece (``pieces.py``) that run again at least once. At a moment in the gaps of the piece's saved values, what is
   there must suffice to make them with R alone: at least the bytes of a least cut given R. Where these gaps end together, the
   least time to free b bytes at such a moment is on or above the piece's hull of flips, and the same flips serve all the moments.
4. Where they do not end together, the piece is granted the relief of the smaller ones for nothing, if they are small. If they are not,
   only Rule 2 is used for the piece: each unit for its own saved outputs, at the time of what writes the cheapest of their storages. At moments at
   which some values of a piece are still the step's own, the piece is granted all its relief for nothing.
5. To hold a version of a storage of which autograd saved another one is granted for nothing: the storage may be there anyway. A storage with
   several saved versions is there while any version of it is. Until backward first asks for one, all are still to come: the
   storage is given back only where everything that writes it runs again, from its allocation to the last saved version. Later, some
   version may have been kept and the others made again: the storage is granted for nothing. So is one of which some versions can be made again
   and some cannot, as these may be released first; and what is saved beyond the last demand for it.
6. A value that counts as free (``lineage.py``) is taken to be kept. Where it is asked for again at once, a schedule in which it is not has as much in memory
   when it is there as one that keeps it has in the gap.
7. So any plan that fits gives numbers 0 <= z <= 1, one an item, with sum(cost * z) at most its extra time and, at every moment,
   sum(relief * z) at least the plain step's excess over the budget. The least sum(cost * z) under these is a linear programme; any prices
   on the moments give a lower bound of it, and the best prices reach it. Ours are found by ascent (``ascent.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from punar.ir.derived import derived
from punar.ir.lineage import lineage_of
from punar.ir.trace import Trace
from punar.plan.pieces import Piece, by_operator, flips_of_piece, has_versions, pieces_of, writers
from punar.plan.pressure import pressure_of

if TYPE_CHECKING:
    from punar.plan.ascent import Table

SMALL = 8
"""How many times the bytes of a piece's other saved values its main ones have, for the others to be given away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something that can be dropped: ``cost_ns`` for ``bytes`` given back in each of the ``spans`` of cells, as (bytes, start, end)."""

    cost_ns: int
    spans: tuple[tuple[int, int, int], ...]

    def at(self, moment: int) -> int:
        return sum(size for size, start, end in self.spans if start <= moment < end)


def bound(trace: Trace, budget_bytes: int) -> int:
    """A proved lower bound, in ns, on the whole step's time under any plan whose peak is at most ``budget_bytes`` (see the NOTE).

    Complexity: O(items log items) for each of a few dozen prices tried.

    Source: Lagrangian relaxation; Geoffrion 1974, doi:10.1007/BFb0120690. The family is that of Jain et al. 2020, Checkmate,
    arXiv:1910.02653; the programme is ours.
    """
    from punar.plan.ascent import Ascent  # here, as NumPy is slow to import and most of what imports us needs no bound

    granted = items_of(trace)[1]
    excess = [peak - budget_bytes - free for peak, free in zip(pressure_of(trace).peak, granted, strict=True)]
    return trace.plain_time_ns + max(0, int(Ascent(_table_of(trace), excess).climb() * (1 - 1e-9)))


@derived
def _table_of(trace: Trace) -> Table:
    from punar.plan.ascent import Table

    return Table(items_of(trace)[0])


@derived
def items_of(trace: Trace) -> tuple[tuple[Item, ...], tuple[int, ...]]:
    """The items of the linear programme, and for each cell the bytes that Rule 4 grants for nothing."""
    table = _Table(trace)
    for number, piece in enumerate(pieces_of(trace)):
        table.add(number, piece)
    table.grant_ends()
    return tuple(table.items), tuple(accumulate(table.granted[:-1]))


class _Table:
    """The items as they are collected; ``granted`` as changes from cell to cell."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.pressure, self.line = trace, pressure_of(trace), lineage_of(trace)
        self.known: dict[tuple[object, ...], list[frozenset[int]]] = {}
        self.items: list[Item] = []
        self.granted = [0] * (len(self.pressure.peak) + 1)
        self.latest = {self.line.storage[v]: v for v in sorted(trace.saved_values()) if trace.demand_rank[v]}

    def add(self, number: int, piece: Piece) -> None:
        groups = self.groups(piece)
        first, rest = groups[0], [v for group in groups[1:] for v in group]
        is_small = sum(self.line.bytes[v] for v in rest) * SMALL < sum(self.line.bytes[v] for v in first)
        if not piece.between or not is_small:
            self.add_units(piece)
            return
        start = max(self.pressure.start[v] for v in (*first, *piece.between))
        fine = by_operator(self.trace, piece, first)
        spans = [(max(a, start), b) for a, b in self.pressure.gaps(first[0]) if b > start]
        if any(has_versions(self.trace, writers(self.trace, piece, v), v) for v in first):
            spans = self.before_demand(first[0], spans)
            for v in first:
                self.grant_later(v)
        for flip in flips_of_piece(self.trace, number, fine, self.known):
            self.items.append(Item(cost_ns=flip.cost_ns, spans=tuple((flip.bytes, a, b) for a, b in spans)))
        for v in first:
            self.grant(v, 0, start)
        for v in rest:
            self.grant(v, 0, len(self.pressure.peak))

    def grant_ends(self) -> None:
        """Grants storages of which only some versions can be made again, and what others give back once nothing of them is asked for."""
        saved: dict[int, list[int]] = {}
        for v in self.trace.saved_values():
            saved.setdefault(self.line.storage[v], []).append(v)
        for values in saved.values():
            if len(values) > 1 and not all(self.line.can_replay[v] and not self.line.is_free[v] for v in values):
                self.grant(values[0], 0, len(self.pressure.peak))
            asked = max((end for _, end in self.pressure.windows[values[0]]), default=0)
            self.grant_span(values[0], max(asked, self.pressure.start[values[0]]), self.pressure.released[values[0]])

    def asked_for(self, piece: Piece) -> list[list[int]]:
        """For each unit the saved values that backward asks for, the latest version of each storage."""
        return [[self.latest[self.line.storage[v]] for v in row if self.line.storage[v] in self.latest] for row in piece.saved]

    def groups(self, piece: Piece) -> list[list[int]]:
        """The saved values by when their gaps end, those of most bytes first."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for v in (v for row in self.asked_for(piece) for v in row):
            groups.setdefault(tuple(end for _, end in self.pressure.gaps(v)), []).append(v)
        return sorted(groups.values(), key=lambda group: (-sum(self.line.bytes[v] for v in group), group)) or [[]]

    def grant(self, value: int, since: int, until: int) -> None:
        """Grants a value's relief in its gaps, from the cell ``since`` to ``until - 1``."""
        for start, end in self.pressure.gaps(value):
            self.grant_span(value, max(start, since), min(end, until))

    def grant_span(self, value: int, start: int, end: int) -> None:
        if start < end:
            self.granted[start] += self.line.bytes[value]
            self.granted[end] -= self.line.bytes[value]

    def before_demand(self, value: int, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of a value's gaps that end by the first demand for its storage."""
        return [(start, end) for start, end in spans if end <= self.asked(value)]

    def grant_later(self, value: int) -> None:
        """Grants the relief of a storage from its first demand on: some of its versions may have been kept until then (Rule 5)."""
        self.grant(value, self.asked(value), len(self.pressure.peak))

    def asked(self, value: int) -> int:
        """The cell of backward's first demand for a value's storage."""
        return min((demand for demand, _ in self.pressure.windows[value]), default=len(self.pressure.peak))

    def add_units(self, piece: Piece) -> None:
        """Each unit for its own saved outputs, at the time of what writes the cheapest of their storages."""
        for saved in filter(None, self.asked_for(piece)):
            chains = {v: writers(self.trace, piece, v) for v in saved}
            cost = min(sum(self.trace.ops[op].time_ns + self.trace.overhead_ns for op in chain) for chain in chains.values())
            gaps = {v: self.pressure.gaps(v) for v in saved}
            for v in (v for v in saved if has_versions(self.trace, chains[v], v)):
                self.grant_later(v)
                gaps[v] = self.before_demand(v, gaps[v])
            self.items.append(Item(cost_ns=cost, spans=tuple((self.line.bytes[v], *span) for v in saved for span in gaps[v])))
