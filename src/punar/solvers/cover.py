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
from operator import ge, sub

from punar.ir import Trace
from punar.ir.derived import derived
from punar.ir.lineage import lineage_of
from punar.plan.pieces import Flip, flips_of, stages_of
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
        self.pieces = [piece for piece, flips in enumerate(self.flips) if flips]
        self.level = [0] * len(self.flips)
        self.change = [0] * (len(self.excess) + 1)

    def run(self) -> bool:
        """Finds the levels; says whether all cells could be relieved."""
        last, order = self.arrivals()
        order.append(-1)
        last.append(-1)
        change, excess = self.change, self.excess
        next_one = 0
        for cell in range(len(excess) - 1, -1, -1):
            if change[cell]:
                self.relief += change[cell]
            while last[order[next_one]] > cell:
                self.offer(self.pieces[order[next_one]])
                next_one += 1
            if self.relief < excess[cell] and not self.meet(cell):
                return False
        return True

    def arrivals(self) -> tuple[list[int], list[int]]:
        """For each of ``pieces`` the cell after the last that it can relieve, and their places by falling cell."""
        entry = self.entry
        last = [entry[freed[0]] if len(freed) == 1 else max([entry[v] for v in freed]) for freed in first_freed(self.trace)]
        return last, sorted(range(len(last)), key=last.__getitem__, reverse=True)

    def offer(self, piece: int) -> None:
        flips, level = self.flips[piece], self.level[piece]
        if level < len(flips) and not (self.forced and not self.forced.isdisjoint(flips[level].freed)):
            heapq.heappush(self.heap, (flips[level].ratio, piece, level))

    def meet(self, cell: int) -> bool:
        """Takes flips until the cell is relieved; says whether there were enough."""
        heap, start = self.heap, self.start
        while self.relief < self.excess[cell]:
            if not heap:
                return False
            _, piece, level = heapq.heappop(heap)
            flips = self.flips[piece]
            freed, taken = flips[level].freed, flips[level].taken
            if start[freed[0]] > cell and all(start[v] > cell for v in freed):
                continue
            self.level[piece] = level + 1
            self.press(cell, freed, 1)
            if taken:
                self.press(cell, taken, -1)
            if level + 1 < len(flips):
                self.offer(piece)
        return True

    def press(self, cell: int, values: Sequence[int], sign: int) -> None:
        """Notes what some values relieve from their start to their entry, at ``cell`` on the way down."""
        change, begin, entry, sizes = self.change, self.start, self.entry, self.sizes
        for v in values:
            start, end = begin[v], entry[v]
            if start > cell or start >= end:
                continue
            size = sign * sizes[v]
            if end > cell:
                self.relief += size
            else:
                change[end - 1] += size
            change[start - 1] -= size

    def spans(self, flip: Flip) -> list[tuple[int, int, int]]:
        """What a flip relieves, as (bytes, first cell, cell after the last)."""
        sizes, start, entry = self.sizes, self.start, self.entry
        freed = [(sizes[v], start[v], entry[v]) for v in flip.freed if start[v] < entry[v]]
        return freed + [(-sizes[v], start[v], entry[v]) for v in flip.taken if start[v] < entry[v]] if flip.taken else freed

    def reliefs(self) -> list[int]:
        """What the taken flips relieve in each cell."""
        change = [0] * (len(self.excess) + 1)
        begin, entry = self.start, self.entry
        for stages, level in zip(stages_of(self.trace), self.level, strict=True):
            if level:
                for size, v in stages[level].change:
                    start, end = begin[v], entry[v]
                    if start < end:
                        change[start] += size
                        change[end] -= size
        return list(accumulate(change[:-1]))

    def holds(self) -> bool:
        """Whether the taken flips relieve every cell by its excess, with the entries there are now."""
        return all(map(ge, self.reliefs(), self.excess))

    def loosen(self) -> bool:
        """Gives back what is dear and, because of the rounding, no longer needed; says whether there was something."""
        slack = list(map(sub, self.reliefs(), self.excess))
        before = list(self.level)
        taken = [(flips[level - 1], piece) for piece, (flips, level) in enumerate(zip(self.flips, self.level, strict=True)) if level]
        spare = min(slack[pressure_of(self.trace).seal :], default=0)
        likely = sorted((f for f in taken if f[0].bytes <= max(spare, 0) * 4), key=lambda f: (-f[0].cost_ns, f[1]))
        for flip, piece in likely[:LOOSENED]:
            spans = self.spans(flip)
            if all(size <= min(slack[start:end]) for size, start, end in spans):
                self.level[piece] -= 1
                for size, start, end in spans:
                    slack[start:end] = [s - size for s in slack[start:end]]
        return self.level != before


@derived
def first_freed(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """What the first flip of each piece that has some frees."""
    return tuple(flips[0].freed for flips in flips_of(trace) if flips)
