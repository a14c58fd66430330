"""Which flips of which pieces meet a budget at least time, when each gives memory back over its own span.

NOTE. The problem and the method.

1. Every cell of the step (``pressure.py``) whose bytes in the plain step exceed the budget must be relieved by its excess. A flip (``pieces.py``)
   relieves the cells from its values' start to their entry, where they are made again, and costs its time once.
2. On a chain the spans all hold the moment at which backward begins, and those of earlier blocks reach further: the sets of flips that can
   relieve a cell grow towards that moment. Going from the last cell to the first and taking the flip of least time per byte that
   reaches the cell is then optimal but for the last flip's rounding. On other graphs it is a heuristic.
3. Where the values are made again, depends on what else is dropped: the caller repeats with the entries of the plan found.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from punar.ir import Trace
from punar.ir.lineage import lineage_of
from punar.plan.pieces import Flip, flips_of
from punar.plan.pressure import pressure_of

LOOSENED = 64
"""How many taken flips are tried to be given back where the last one relieved more than was needed."""


@dataclass
class Cover:
    """One pass of the method.

    ``excess[cell]``: bytes to relieve; ``entry[value]``: the cell in which it is made again if it is dropped; ``forced``: values to hold.
    """

    trace: Trace
    excess: Sequence[int]
    entry: Sequence[int]
    forced: frozenset[int] = frozenset()
    level: list[int] = field(init=False)
    heap: list[tuple[float, int, int]] = field(init=False, default_factory=list)
    change: list[int] = field(init=False)
    relief: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.sizes = lineage_of(self.trace).bytes
        self.start = pressure_of(self.trace).start
        self.flips = flips_of(self.trace)
        self.level = [0] * len(self.flips)
        self.change = [0] * (len(self.excess) + 1)

    def run(self) -> bool:
        """Finds the levels; says whether all cells could be relieved."""
        arriving = self.arrivals()
        change, excess = self.change, self.excess
        for cell in range(len(excess) - 1, -1, -1):
            if change[cell]:
                self.relief += change[cell]
            for piece in arriving.get(cell, ()):
                self.offer(piece)
            if self.relief < excess[cell] and not self.meet(cell):
                return False
        self.loosen()
        return True

    def arrivals(self) -> dict[int, list[int]]:
        """For each cell, from the last to the first, the pieces that can relieve it and none after it."""
        arriving: dict[int, list[int]] = {}
        entry = self.entry
        for piece, flips in enumerate(self.flips):
            if flips:
                arriving.setdefault(max([entry[v] for v in flips[0].freed]) - 1, []).append(piece)
        return arriving

    def offer(self, piece: int) -> None:
        flips, level = self.flips[piece], self.level[piece]
        if level < len(flips) and self.forced.isdisjoint(flips[level].freed):
            heapq.heappush(self.heap, (flips[level].ratio, piece, level))

    def meet(self, cell: int) -> bool:
        """Takes flips until the cell is relieved; says whether there were enough."""
        while self.relief < self.excess[cell]:
            if not self.heap:
                return False
            _, piece, level = heapq.heappop(self.heap)
            flip = self.flips[piece][level]
            if all(self.start[v] > cell for v in flip.freed):
                continue
            self.level[piece] = level + 1
            for size, start, end in self.spans(flip):
                self.press(cell, start, end, size)
            self.offer(piece)
        return True

    def spans(self, flip: Flip) -> list[tuple[int, int, int]]:
        """What a flip relieves, as (bytes, first cell, cell after the last)."""
        sizes, start, entry = self.sizes, self.start, self.entry
        freed = [(sizes[v], start[v], entry[v]) for v in flip.freed if start[v] < entry[v]]
        return freed + [(-sizes[v], start[v], entry[v]) for v in flip.taken if start[v] < entry[v]] if flip.taken else freed

    def press(self, cell: int, start: int, end: int, size: int) -> None:
        """Notes a relief over the cells from ``start`` to ``end - 1``, at ``cell`` on the way down."""
        if start > cell:
            return
        if end > cell:
            self.relief += size
        else:
            self.change[end - 1] += size
        self.change[start - 1] -= size

    def reliefs(self) -> list[int]:
        """What the taken flips relieve in each cell."""
        change = [0] * (len(self.excess) + 1)
        for flips, level in zip(self.flips, self.level, strict=True):
            for flip in flips[:level]:
                for size, start, end in self.spans(flip):
                    change[start] += size
                    change[end] -= size
        return list(accumulate(change[:-1]))

    def loosen(self) -> None:
        """Gives back what is dear and, because of the rounding, no longer needed."""
        slack = [got - need for got, need in zip(self.reliefs(), self.excess, strict=True)]
        taken = [(flips[level - 1], piece) for piece, (flips, level) in enumerate(zip(self.flips, self.level, strict=True)) if level]
        spare = min(slack[pressure_of(self.trace).seal :], default=0)
        likely = sorted((f for f in taken if f[0].bytes <= max(spare, 0) * 4), key=lambda f: (-f[0].cost_ns, f[1]))
        for flip, piece in likely[:LOOSENED]:
            spans = self.spans(flip)
            if all(size <= min(slack[start:end]) for size, start, end in spans):
                self.level[piece] -= 1
                for size, start, end in spans:
                    slack[start:end] = [s - size for s in slack[start:end]]
