"""Plans made of segments: what crosses a cut is held, what lies inside is recomputed once backward enters the segment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from punar.ir import Trace
from punar.ir.blocks import cuts_of, layout_of
from punar.ir.lineage import lineage_of


def segmented(trace: Trace, cuts: Sequence[int]) -> list[int]:
    """``hold_from`` of the plan that recomputes every segment between two neighbouring cuts, and holds everything outside.

    A value that a later segment reads or saved is held from forward on; the others are held from the moment at which backward
    first asks for something of their own segment, so that a segment is recomputed once.
    """
    hold = [0] * len(trace.values)
    for start, end in pairwise(cuts):
        recompute(trace, hold, start, end)
    return hold


def recompute(trace: Trace, hold: list[int], start: int, end: int) -> None:
    """Marks the values made and last used in the places ``start`` to ``end - 1`` as recomputed when backward comes there."""
    layout = layout_of(trace)
    entry = layout.entry(start, end)
    for place in range(start, end):
        for value in trace.ops[layout.ops[place]].outputs:
            if layout.last_use[value] < end:
                hold[value] = max(entry, 1)


def grouped(trace: Trace, size: int) -> list[int]:
    """``hold_from`` of the plan that recomputes every ``size`` neighbouring blocks as one segment."""
    cuts = cuts_of(trace)
    return segmented(trace, (*cuts[:-1:size], cuts[-1]))


def dropped_late(trace: Trace, dropped: Iterable[int]) -> list[int]:
    """``hold_from`` of the plan that drops the given saved values, and holds each and all that it is made of once they were made again."""
    line = lineage_of(trace)
    chosen = set(dropped)
    return [int(v in chosen or (line.can_replay[v] and not line.is_saved[v])) for v in range(len(trace.values))]
