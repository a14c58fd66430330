"""Where a forward pass can be cut: what crosses each place, when backward reaches it, and which stretches repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from punar.ir.derived import derived
from punar.ir.lineage import NEVER, lineage_of
from punar.ir.trace import EventKind, Trace

WIDEST_GAPS = 12
"""How many distances between equal operators are tried as the length of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The forward pass as a sequence of places, one for each forward operator that ran before backward began.

    ``ops[place]``: the operator; ``where[op]`` the other way round, -1 where it has no place. ``place[value]``: of its producer, -1 where it has none.
    ``last_use[value]``: the last place that reads or saves it. ``clock[place]``: backward's clock when it first asks for something that the
    operator there saved, ``NEVER`` where it saved nothing. ``crossing[place]``: bytes made before the place and used at it or later.
    """

    ops: tuple[int, ...]
    where: tuple[int, ...]
    place: tuple[int, ...]
    last_use: tuple[int, ...]
    clock: tuple[int, ...]
    crossing: tuple[int, ...]

    def entry(self, start: int, end: int) -> int:
        """Backward's clock when it enters the segment of the places ``start`` to ``end - 1``."""
        return min(self.clock[start:end], default=NEVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A stretch of ``count`` equal blocks of ``length`` operators, from place ``start``."""

    start: int
    length: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.length * self.count


@derived
def layout_of(trace: Trace) -> Layout:
    """Derives the layout; computed once a trace."""
    line = lineage_of(trace)
    ops, saved_at = _forward(trace)
    where = {op: place for place, op in enumerate(ops)}
    place = [where.get(p, -1) for p in line.producer]
    last_use = list(place)
    for at, op in enumerate(ops):
        for value in line.reads[op]:
            last_use[value] = max(last_use[value], at)
    for save, at in saved_at.items():
        value = trace.saves[save].value
        last_use[value] = max(last_use[value], at)
    return Layout(
        ops=tuple(ops),
        where=tuple(where.get(op.id, -1) for op in trace.ops),
        place=tuple(place),
        last_use=tuple(last_use),
        clock=tuple(_clocks(trace, saved_at, len(ops))),
        crossing=tuple(_crossing(place, last_use, line.bytes, len(ops))),
    )


def _forward(trace: Trace) -> tuple[list[int], dict[int, int]]:
    """The forward operators until backward begins, and for each save the place of the operator that made it.

    An operator's inputs are saved before it runs and its outputs after; a save belongs to the next operator where that reads the value.
    """
    line = lineage_of(trace)
    ops: list[int] = []
    saved_at: dict[int, int] = {}
    waiting: list[int] = []
    for kind, id in trace.events:
        if kind == EventKind.DEMAND:
            break
        if kind == EventKind.SAVE:
            waiting.append(id)
        elif kind == EventKind.RUN and not trace.ops[id].is_backward:
            for save in waiting:
                saved_at[save] = len(ops) if trace.saves[save].value in line.reads[id] else max(len(ops) - 1, 0)
            waiting.clear()
            ops.append(id)
    saved_at.update({save: max(len(ops) - 1, 0) for save in waiting})
    return ops, saved_at


def _clocks(trace: Trace, saved_at: dict[int, int], places: int) -> list[int]:
    rank = trace.demand_rank
    clocks = [NEVER] * places
    clock = 0
    for kind, id in trace.events:
        if kind != EventKind.DEMAND:
            continue
        clock = max(clock, rank[trace.saves[id].value])
        if id in saved_at:
            at = saved_at[id]
            clocks[at] = min(clocks[at], clock)
    return clocks


def _crossing(place: Sequence[int], last_use: Sequence[int], sizes: Sequence[int], places: int) -> list[int]:
    change = [0] * (places + 1)
    for made, last, size in zip(place, last_use, sizes, strict=True):
        if 0 <= made < last:
            change[made + 1] += size
            change[last + 1] -= size
    return list(accumulate(change))


@derived
def runs_of(trace: Trace) -> tuple[Run, ...]:
    """The stretches of repeated blocks, largest first, each shifted so that it is cut where least crosses.

    Operators are equal where their signatures are. The distances between successive equal operators vote for the length of a block; each
    of the most frequent ones is tried over the whole sequence, and what covers most is taken, the shortest block where equal.

    Complexity: O(operators) for each distance tried.
    """
    layout = layout_of(trace)
    numbers: dict[str, int] = {}
    tokens = [numbers.setdefault(trace.ops[op].signature, len(numbers)) for op in layout.ops]
    free = [(0, len(tokens))]
    found: list[Run] = []
    while free:
        start, end = free.pop()
        run = _longest_run(tokens, start, end)
        if run is None:
            continue
        run = _shifted(run, layout.crossing, start, end)
        found.append(run)
        free += [(start, run.start), (run.end, end)]
    return tuple(sorted(found, key=lambda run: (-run.length * run.count, run.start)))


def _longest_run(tokens: Sequence[int], start: int, end: int) -> Run | None:
    """The repetition that covers most of the places ``start`` to ``end - 1``, or None where nothing repeats over four operators."""
    best: Run | None = None
    covered = 3
    for length in _gaps(tokens, start, end):
        for run in _periodic(tokens, start, end, length):
            if run.length * run.count > covered:
                best, covered = run, run.length * run.count
    return best


def _gaps(tokens: Sequence[int], start: int, end: int) -> list[int]:
    last: dict[int, int] = {}
    votes: Counter[int] = Counter()
    for at in range(start, end):
        if tokens[at] in last:
            gap = at - last[tokens[at]]
            votes[gap] += gap
        last[tokens[at]] = at
    likely = sorted(votes, key=lambda gap: (-votes[gap], gap))[:WIDEST_GAPS]
    return sorted(gap for gap in likely if 2 * gap <= end - start)


def _periodic(tokens: Sequence[int], start: int, end: int, length: int) -> list[Run]:
    """The stretches in which every operator equals the one ``length`` places on."""
    runs, begin = [], start
    for at in range(start, end - length + 1):
        if at == end - length or tokens[at] != tokens[at + length]:
            count = (at - begin + length) // length
            if count >= 2:
                runs.append(Run(start=begin, length=length, count=count))
            begin = at + 1
    return runs


def _shifted(run: Run, crossing: Sequence[int], start: int, end: int) -> Run:
    """Moves the cuts within the period to where least crosses, which may lose one block."""
    shifts = [
        Run(start=run.start + shift, length=run.length, count=min(run.count, (end - run.start - shift) // run.length))
        for shift in range(run.length)
    ]
    return min((shift for shift in shifts if shift.count >= 2 or shift.start == run.start), key=lambda shift: _across(shift, crossing))


def _across(run: Run, crossing: Sequence[int]) -> int:
    """The most that crosses one of a run's inner cuts."""
    return max(crossing[run.start + k * run.length] for k in range(1, run.count))


@derived
def cuts_of(trace: Trace) -> tuple[int, ...]:
    """The places at which blocks begin and end: between repeated blocks, else at narrow places about sqrt(operators) apart."""
    runs = runs_of(trace)
    places = len(layout_of(trace).ops)
    if sum(run.length * run.count for run in runs) * 2 >= places:
        return tuple(sorted({run.start + k * run.length for run in runs for k in range(run.count + 1)}))
    return narrow_cuts(trace, max(round(places**0.5), 1))


def narrow_cuts(trace: Trace, pieces: int) -> tuple[int, ...]:
    """Cuts the forward pass in about ``pieces`` pieces of equal bytes, each at the narrowest place near its even share."""
    layout, line = layout_of(trace), lineage_of(trace)
    made = list(accumulate((sum(line.bytes[v] for v in trace.ops[op].outputs) for op in layout.ops), initial=0))
    total = max(made[-1], 1)
    cuts: set[int] = set()
    for piece in range(1, pieces):
        low, high = (total * (2 * piece - 1)) // (2 * pieces), (total * (2 * piece + 1)) // (2 * pieces)
        near = [at for at in range(1, len(layout.ops)) if low <= made[at] < high]
        if near:
            cuts.add(min(near, key=lambda at: (layout.crossing[at], abs(made[at] * pieces - total * piece))))
    return tuple(sorted(cuts | {0, len(layout.ops)}))
