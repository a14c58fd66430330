"""Ways to keep chains of replays short: values that stay held so that no replay runs far back.

NOTE. Why.

1. What is dropped is made again when backward first needs it, directly or because a replay of something later reads it. Where
   every value of a long chain is dropped, the first demand makes the whole chain again, all of which is then held until used: no memory
   is saved at all.
2. A *link* is a value that is made again and read by something else that is made again. Holding the links that cross a place of the forward
   pass confines replays to one side of it. A *split* is a set of such places with about equal bytes between them.
3. With pieces of the forward pass about sqrt(n) long, the links held and one piece made again take O(sqrt(n)) bytes, at one extra forward.

4. A value made again in passing need not be held at once. In two levels, only the links between smaller parts are held when backward enters a
   part; what lies between them is dropped once more and made again when backward enters its own smaller part. That takes less memory yet,
   O(cube root of n), for a second extra forward.
5. While backward releases held values, more can be made again at once: parts grow towards the beginning, by one plus held over dropped bytes.

Source: Chen, Xu, Zhang, Guestrin 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, section 4; that the places are chosen by
what links cross them, and which values are dropped at all by other means, is ours.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from punar.ir import Trace
from punar.ir.blocks import layout_of
from punar.ir.lineage import lineage_of
from punar.plan.pieces import Flip, flips_of, stages_of
from punar.plan.pressure import pressure_of

WIDEST = 1000.0
"""How many times the bytes of the smallest part the largest may have."""

STEEPEST = 2.0
"""How many times the bytes of the next part a part may have at most."""

LEEWAY = 0.3
"""How far from its share of bytes, in parts of it, a part may end to end where few links cross."""


def rerun_ops(trace: Trace, levels: Sequence[int]) -> set[int]:
    """The operators that run again where each piece has taken its first ``levels`` flips."""
    return {op for stages, level in zip(stages_of(trace), levels, strict=True) if level for op in stages[level].ops}


def all_dropped(trace: Trace, forced: Container[int] = ()) -> set[int]:
    """The operators that run again where every piece takes all its flips, up to the first that drops a forced value."""
    return rerun_ops(trace, [_unforced(steps, forced) for steps in flips_of(trace)])


def _unforced(steps: Sequence[Flip], forced: Container[int]) -> int:
    return next((count for count, flip in enumerate(steps) if any(v in forced for v in flip.freed)), len(steps))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Scheme:
    """Into how many parts a plan is split, and those together into how many smaller ones (Rule 4); no more than ``parts`` for one level."""

    parts: int
    inner: int

    @property
    def is_nested(self) -> bool:
        return self.inner > self.parts


@dataclass(frozen=True, slots=True)
class Levels:
    """A scheme at the places of one plan: ``outer`` and ``inner`` cut the forward pass, the second list is empty for one level."""

    trace: Trace
    outer: tuple[int, ...]
    inner: tuple[int, ...]

    def hold_from(self, again: set[int]) -> list[int]:
        """For each value Rule 1's number of the simulator: links of the outer places are held, what lies between is held once made, where it
        is a link of the inner places, and else once backward enters its inner part."""
        if not self.inner:
            return [1 if producer in again else 0 for producer in lineage_of(self.trace).producer]
        links, rank = Links(self.trace, again), self.trace.demand_rank
        place, crossing = links.layout.place, links.crossing(self.inner)
        entries = [max(links.layout.entry(a, b), 1) for a, b in pairwise((0, *self.inner, len(links.layout.ops)))]
        hold = []
        for v, producer in enumerate(links.line.producer):
            if producer not in again:
                hold.append(0)
            elif v in crossing:
                hold.append(1)
            else:
                entry = entries[bisect_right(self.inner, place[v])]
                hold.append(min(entry, rank[v]) if rank[v] else entry)
        return hold

    def entries(self, again: set[int]) -> list[int]:
        """For each value the cell until which it can be away, or has to be held for what is made of it.

        What runs again is there from when it is asked for, or something that is made of it and does not lie in another inner part.
        """
        line, asked = lineage_of(self.trace), pressure_of(self.trace).asked
        entry, latest = list(asked), dict[int, int]()
        links = Links(self.trace, again) if self.inner else None
        crossing = links.crossing(self.inner) if links else frozenset()
        ops, reads, producer = self.trace.ops, line.reads, line.producer
        for op in sorted(again, reverse=True):
            outputs = ops[op].outputs
            first = entry[outputs[0]] if len(outputs) == 1 else min([entry[v] for v in outputs])
            for u in reads[op]:
                if producer[u] not in again:
                    latest[u] = max(first, latest.get(u, 0))
                elif first < entry[u] and (links is None or u in crossing or self.is_together(links, u, op)):
                    entry[u] = first
        for u, last in latest.items():
            if not line.is_saved[u]:
                entry[u] = last
        return entry

    def is_together(self, links: Links, value: int, op: int) -> bool:
        place = links.layout.place
        reader = place[self.trace.ops[op].outputs[0]]
        return bisect_right(self.inner, place[value]) == bisect_right(self.inner, reader)


def levels_of(trace: Trace, scheme: Scheme, again: set[int]) -> Levels:
    """The places of a scheme where the operators ``again`` run again.

    Backward frees what was held as it goes, so that each part that it comes to may be larger than the one before (Rule 5).
    """
    links = Links(trace, again)
    growth = links.growth()
    return Levels(trace, tuple(links.places(scheme.parts, growth)), tuple(links.places(scheme.inner, growth)) if scheme.is_nested else ())


class Links:
    """The links of a plan that runs the operators ``again`` again, along the forward pass; ``last[link]``: the last place that reads it again."""

    def __init__(self, trace: Trace, again: set[int]) -> None:
        self.trace, self.layout, self.line, self.again = trace, layout_of(trace), lineage_of(trace), again
        producer, reads, where = self.line.producer, self.line.reads, self.layout.where
        self.last: dict[int, int] = {}
        for op in sorted(again):
            for u in reads[op]:
                if producer[u] in again:
                    self.last[u] = where[op]

    @cached_property
    def before(self) -> list[int]:
        """For each place the bytes that are made again before it; one more for the end."""
        made = [0] * len(self.layout.ops)
        for op in self.again:
            made[self.layout.where[op]] = sum([self.line.bytes[v] for v in self.line.outputs[op]])
        return list(accumulate(made, initial=0))

    @property
    def total(self) -> int:
        return self.before[-1]

    def growth(self) -> float:
        """By how much the next part may be larger, when backward has released what was held of one part."""
        saved = [v for v, is_saved in enumerate(self.line.is_saved) if is_saved and self.line.can_replay[v] and not self.line.is_free[v]]
        held = sum(self.line.bytes[v] for v in saved if self.line.producer[v] not in self.again)
        return min(1 + held / max(self.total, 1), STEEPEST)

    @cached_property
    def across(self) -> list[int]:
        """For each place the bytes of links that cross it."""
        change = [0] * (len(self.layout.ops) + 2)
        for value, last in self.last.items():
            change[self.layout.place[value] + 1] += self.line.bytes[value]
            change[last + 1] -= self.line.bytes[value]
        return list(accumulate(change))

    def places(self, parts: int, growth: float = 1.0) -> list[int]:
        """Places that split what is made again in ``parts`` parts, each where fewest bytes of links cross.

        Each part has ``growth`` times the bytes of the one after it.
        """
        growth = min(growth, WIDEST ** (1 / parts))
        shares = [growth**k for k in range(parts - 1, -1, -1)]
        ends = list(accumulate(shares))
        places: list[int] = []
        for share, end in pairwise(zip(shares, ends, strict=True)):
            reach = LEEWAY * min(share[0], end[0]) * self.total / ends[-1]
            middle = share[1] * self.total / ends[-1]
            low = max(bisect_left(self.before, middle - reach), places[-1] + 1 if places else 1)
            high = min(max(bisect_right(self.before, middle + reach), low + 1), len(self.layout.ops))
            if low < high:
                places.append(min(range(low, high), key=lambda place: (self.across[place], -place)))
        return places

    def crossing(self, places: Sequence[int]) -> frozenset[int]:
        return frozenset(v for v, last in self.last.items() if _next(places, self.layout.place[v]) <= last)


def _next(places: Sequence[int], after: int) -> int:
    """The first of the sorted places beyond ``after``."""
    at = bisect_right(places, after)
    return places[at] if at < len(places) else 1 << 60
