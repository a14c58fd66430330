"""The search behind ``auto``: covers for a grid of budgets under several schemes, judged by the simulator."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from operator import sub

from punar.ir import Trace
from punar.ir.lineage import close, lineage_of
from punar.plan.bound import bound
from punar.plan.moves import Move
from punar.plan.pressure import pressure_of
from punar.plan.simulate import Simulation
from punar.solvers.cover import Cover
from punar.solvers.patience import GIVEN_UP, judged_by_cell
from punar.solvers.splits import Levels, Links, Scheme, all_dropped, levels_of, rerun_ops

FEWEST, MOST = 12, 80
"""How many simulations the search makes at least and at most, besides those of the schemes' extremes."""

SHORT = 7600
"""Up to how many events of a step it makes most; it makes fewer for longer ones, with their power of 0.6."""

LONG = 6_000
"""From how many events on a step counts as long, and fewer kinds of plans are tried."""

CLOSE, CLOSE_IF_LONG = 0.002, 0.005
"""How near to the lower bound a plan need come, in parts of the plain step's time, for the search at its budget to end."""

FAR = 0.02
"""How far from it the schemes of two levels are tried."""

RESOLUTION = 256
"""Into how many parts the range of peaks is resolved."""

PATIENCE = 2
"""After how many schemes in a row whose plans fit and gained nothing no further one of one level is tried."""

PASSES = 3
"""How often a cover is repeated with what the simulator saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A judged plan. ``hold_from`` is an array, since a frontier keeps many of them."""

    peak_bytes: int
    time_ns: int
    hold_from: Sequence[int]
    moves: tuple[Move, ...] = ()


def undominated(points: Sequence[Point]) -> tuple[Point, ...]:
    """Those that are faster than every point of at most their peak, by rising peak."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.time_ns)):
        if not best or point.time_ns < best[-1].time_ns:
            best.append(point)
    return tuple(best)


class Search:
    """The search of one trace: every plan that it judges is a point."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.pressure = pressure_of(trace)
        self.line = lineage_of(trace)
        self.points: list[Point] = []
        self.failed: dict[Scheme, int] = {}
        self.extremes: dict[Scheme, Simulation] = {}
        self.places: dict[Scheme, tuple[Levels, frozenset[int]]] = {}
        self.left = round(min(max(MOST * (SHORT / max(len(trace.events), 1)) ** 0.6, FEWEST), MOST))
        self.plain = self.judge([0] * len(trace.values))[0]

    @property
    def is_long(self) -> bool:
        return len(self.trace.events) > LONG

    @property
    def close(self) -> float:
        return CLOSE_IF_LONG if self.is_long else CLOSE

    def run(self) -> None:
        """Judges plans for budgets from the plain peak down; ends when the simulations are used up or nothing is left to improve."""
        schemes = self.schemes()
        self.refine_lowest(schemes)
        for budget in self.budgets():
            self.attend(budget, schemes)

    def judge(self, hold: Sequence[int]) -> tuple[Simulation, list[int]]:
        """Simulates a plan, notes its point, and returns what it saw with the highest bytes in each cell."""
        closed = close(self.trace, hold)
        seen, high = judged_by_cell(self.trace, closed)
        if seen is not GIVEN_UP:
            self.points.append(Point(peak_bytes=seen.peak_bytes, time_ns=seen.time_ns, hold_from=array("i", closed)))
        return seen, high

    def schemes(self) -> list[Scheme]:
        """Schemes worth trying, those of fewest parts first.

        One level in 1, 2, 4, ... parts as long as that reaches lower peaks, and in three halves of the best of these numbers; then two levels, with
        the outer parts of one that did. Long steps start from some more parts.
        """
        first = round(log2(len(self.trace.forward_ops)) / 4) if self.is_long else 0
        tried: list[tuple[int, int, Scheme]] = []
        lowest: list[int] = []
        while len(lowest) < 3 or min(lowest[-2:]) < lowest[-3]:
            tried.append(self.extreme(Scheme(parts=1 << (first + len(lowest)), inner=0)))
            lowest.append(tried[-1][1])
        likely = first + lowest.index(min(lowest))
        for parts in (3 << k for k in range(max(likely - (1 if self.is_long else 3), 0), likely + 1)):
            tried.append(self.extreme(Scheme(parts=parts, inner=0)))
        for scheme in nested(first + len(lowest)):
            tried.append(self.extreme(scheme))
        useful = [scheme for time, peak, scheme in tried if not scheme.is_nested or is_useful(time, peak, tried)]
        return sorted({Scheme(parts=1, inner=0), *useful}, key=lambda scheme: (scheme.is_nested, scheme))

    def refine_lowest(self, schemes: Sequence[Scheme]) -> None:
        """Drops less where a scheme's plan that drops all it can is among the best: as much as its own peak leaves room for."""
        best = {point.peak_bytes: point.time_ns for point in undominated(self.points)}
        for scheme in schemes:
            seen = self.extremes.get(scheme)
            if seen is not None and best.get(seen.peak_bytes) == seen.time_ns and self.left > 0:
                self.refine(seen.peak_bytes, scheme)

    def extreme(self, scheme: Scheme) -> tuple[int, int, Scheme]:
        """(time, peak, scheme) of the plan that drops all a scheme lets it drop."""
        again = all_dropped(self.trace, self.widest_links(scheme))
        seen, _ = self.judge(self.widest(scheme).hold_from(again))
        self.extremes[scheme] = seen
        return seen.time_ns, seen.peak_bytes, scheme

    def budgets(self) -> Iterator[int]:
        """First eight even steps from the plain peak down to the least seen, then where the plans found are farthest from the bound."""
        low, high = min(p.peak_bytes for p in self.points), self.plain.peak_bytes
        for step in range(7, -1, -1):
            yield low + (high - low) * step // 8
        least: dict[int, int] = {}
        tried: list[int] = []
        while self.left > 0:
            doubtful = self.doubtful(max((high - low) // RESOLUTION, 1), tried)  # so that a middle is above what is below it
            for budget in doubtful.keys() - least.keys():
                least[budget] = bound(self.trace, budget)
            gaps = {budget: time - least[budget] for budget, time in doubtful.items()}
            worst = max(gaps, key=lambda budget: (gaps[budget], budget), default=0)
            if not worst or gaps[worst] < 2 * self.close * self.plain.time_ns:
                return
            insort(tried, worst)
            yield worst

    def doubtful(self, least_bytes: int, tried: Sequence[int]) -> dict[int, int]:
        """The middles between neighbouring plans, the larger of at most one extra forward pass, with the time of the plan that answers there.

        Where some budgets between two plans were ``tried`` already, that is above the highest of them.
        """
        slowest = self.trace.plain_time_ns + sum(op.time_ns + self.trace.overhead_ns for op in self.trace.forward_ops)
        found: dict[int, int] = {}
        for a, b in pairwise(undominated(self.points)):
            below = bisect_left(tried, b.peak_bytes)
            low = max(a.peak_bytes, tried[below - 1] if below else 0)
            if b.peak_bytes - low > least_bytes and b.time_ns <= slowest:
                found[(low + b.peak_bytes) // 2] = a.time_ns
        return found

    def attend(self, budget_bytes: int, schemes: Sequence[Scheme]) -> None:
        """Looks for plans at one budget, by one scheme after the other, until one is near the bound.

        A scheme that failed at more memory is not tried; one of two levels only where those of one level leave much to gain.
        """
        least, stale = bound(self.trace, budget_bytes), 0
        for scheme in schemes:
            before = self.best(budget_bytes)
            gap = (before - least) / self.plain.time_ns
            if self.left <= 0 or gap <= (FAR if scheme.is_nested else self.close):
                return
            if budget_bytes <= self.failed.get(scheme, 0) or (stale >= PATIENCE and not scheme.is_nested):
                continue
            known = len(self.points)
            if not self.refine(budget_bytes, scheme):
                self.failed[scheme] = budget_bytes
            elif any(point.peak_bytes <= budget_bytes for point in self.points[known:]):
                stale = stale + 1 if self.best(budget_bytes) >= before else 0

    def best(self, budget_bytes: int) -> float:
        return min((p.time_ns for p in self.points if p.peak_bytes <= budget_bytes), default=float("inf"))

    def refine(self, budget_bytes: int, scheme: Scheme) -> bool:
        """Repeats a cover with the entries that it leads to and the peaks that the simulator saw; says whether one could be judged."""
        entry: Sequence[int] = self.pressure.asked
        extra = [0] * len(self.pressure.peak)
        for tried in range(PASSES):
            need = [peak + more - budget_bytes for peak, more in zip(self.pressure.peak, extra, strict=True)]
            found = self.found(scheme, need, entry)
            if found is None or self.left <= 0:
                return tried > 0
            cover, levels = found
            self.left -= 1
            seen, high = self.judge(levels.hold_from(rerun_ops(self.trace, cover.level)))
            if not high or seen.peak_bytes <= budget_bytes or seen.time_ns > self.best(budget_bytes):
                return True
            entry = cover.entry
            expected = map(sub, self.pressure.peak, cover.reliefs())
            extra = [max(more, saw - thought) for more, saw, thought in zip(extra, high, expected, strict=True)]
        return True

    def found(self, scheme: Scheme, need: Sequence[int], entry: Sequence[int]) -> tuple[Cover, Levels] | None:
        """A cover that holds: with places of its own, else with those of the plan that drops everything, else with that plan's entries as well."""
        widest = self.widest(scheme)
        found = self.settled(scheme, need, entry, None) or self.settled(scheme, need, entry, widest)
        if found is None:
            earliest = widest.entries(all_dropped(self.trace, self.widest_links(scheme)))
            found = self.settled(scheme, need, self.earlier(entry, earliest), widest)
        return found

    def settled(self, scheme: Scheme, need: Sequence[int], entry: Sequence[int], levels: Levels | None) -> tuple[Cover, Levels] | None:
        """A cover that still holds with the entries it leads to; None where none is found soon.

        Its places are those of ``levels`` and all its links there are held from the start, or they are found for the first cover and only
        links that covers have are held.
        """
        forced = self.widest_links(scheme) if levels else frozenset[int]()
        for _ in range(2 * PASSES):
            cover = Cover(self.trace, need, entry, forced)
            if not cover.run():
                return None
            again = rerun_ops(self.trace, cover.level)
            levels = levels or levels_of(self.trace, scheme, again)
            crossing = Links(self.trace, again).crossing(levels.outer)
            if not crossing <= forced:
                forced |= crossing
                continue
            cover.entry = levels.entries(again)
            if cover.holds():
                if cover.loosen():
                    cover.entry = levels.entries(rerun_ops(self.trace, cover.level))
                return cover, levels
            entry = self.earlier(entry, cover.entry)
        return None

    def earlier(self, one: Sequence[int], other: Sequence[int]) -> list[int]:
        """The less hopeful of two entries: the earlier for what is made again, the later for what is held for it."""
        return [
            (a if a < b else b) if is_saved else (a if a > b else b) for a, b, is_saved in zip(one, other, self.line.is_saved, strict=True)
        ]

    def widest(self, scheme: Scheme) -> Levels:
        """The places of a scheme in the plan that drops everything but the links there."""
        if scheme not in self.places:
            everything = all_dropped(self.trace)
            links = Links(self.trace, everything)
            forced = links.crossing(links.places(scheme.parts))
            outer = tuple(links.places(scheme.parts))
            inner = levels_of(self.trace, scheme, all_dropped(self.trace, forced)).inner
            self.places[scheme] = (Levels(self.trace, outer, inner), forced)
        return self.places[scheme][0]

    def widest_links(self, scheme: Scheme) -> frozenset[int]:
        self.widest(scheme)
        return self.places[scheme][1]


def nested(depth: int) -> Iterator[Scheme]:
    """Two-level schemes with outer parts about as many as those at which one level did best, each of four inner ones."""
    for k in range(max(depth - 4, 1), depth):
        yield Scheme(parts=1 << k, inner=1 << (k + 2))


def is_useful(time_ns: int, peak_bytes: int, tried: Sequence[tuple[int, int, Scheme]]) -> bool:
    """Whether no scheme of less time reaches as low a peak."""
    return not any(other < time_ns and peak <= peak_bytes for other, peak, _ in tried)
