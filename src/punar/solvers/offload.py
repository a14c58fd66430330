"""Plans that also move values off the device or hold them in fewer bytes: which, when they leave and come back, and the search beside them.

NOTE. How they are found.

1. A value that moves costs copies instead of time, as long as these hide behind the computation. Those that take most time a byte to make
   again are moved first, as many as the channel carries in a share of the step's time; several shares are tried.
2. A moved value leaves when its copy should be done and the step's own last reference to it is gone, and begins to come back in time for
   backward's first demand, going from the last one to the first.
3. What is done with all other values is searched for as without moves (``search.py``), on a trace in which the moved values are gone between
   leaving and coming back, as if the model itself did it. The simulator judges the plan that both make together.
4. The plans without moves stay among them: what moving is allowed to do, it never makes slower.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter

from punar.ir import Trace
from punar.ir.lineage import close, lineage_of
from punar.plan.bound import bound
from punar.plan.codecs import CODECS, LOSSY
from punar.plan.moves import Channel, Move, rounded, times_before
from punar.plan.simulate import simulate
from punar.solvers.compress import coded, first_bytes, is_dearer
from punar.solvers.movable import movable, places_of
from punar.solvers.search import Point, Search, undominated
from punar.solvers.without import without

SHARES = (0.25, 0.5, 0.8, 1.1, 1.6, 3.0)
"""The shares of the step's time that copies may take, those above 1 with waiting."""

LARGE = 10_000
"""Steps of more operators are searched in less often: once for what codecs hold exactly, twice for what is copied."""

PARTS = (0.25, 0.5, 0.75, 1.0)
"""Of the bytes that could be rounded, from the model's beginning on: what is made from rounded values cannot be made again, so that whole blocks are."""

MARGIN = 1.1
"""How much longer than measured a copy is expected to take."""


def points_with_moves(trace: Trace, channels: Sequence[Channel]) -> Iterator[Point]:
    """Judged plans that move values, for budgets all the way down."""
    tried: set[tuple[Move, ...]] = {()}
    for moves in movings(trace, channels):
        if moves in tried:
            continue
        tried.add(moves)
        search = Search(without(trace, moves, channels))
        search.run()
        for point in undominated(search.points):
            yield judged(trace, point, moves, channels)


def movings(trace: Trace, channels: Sequence[Channel]) -> Iterator[tuple[Move, ...]]:
    """The sets of moves that are tried: what codecs hold exactly; that and what is rounded in parts of the model, or copied in shares of the time."""
    exact = coded(trace, channels, ("bits", "int32"))
    yield exact
    if len(trace.ops) <= LARGE:
        yield first_bytes(trace, exact, 0.5)
    signs = coded(trace, channels, ("bits", "sign", "int32"))
    yield signs
    for codec in LOSSY:
        rounded = coded(trace, channels, ("bits", "sign", "int32", codec))
        if rounded == signs:
            continue
        for part in PARTS:
            yield first_bytes(trace, rounded, part)
        yield tuple(move for move in rounded if move in signs or is_dearer(trace, move, channels[move.tier]))
    for share in SHARES if len(trace.ops) <= LARGE else SHARES[2::2]:
        copied = copied_in(trace, channels, share, {move.value for move in exact})
        if copied:
            yield tuple(sorted((*exact, *copied), key=attrgetter("value")))


def copied_in(trace: Trace, channels: Sequence[Channel], share: float, others: Collection[int] = ()) -> list[Move]:
    """What is copied off the device in a share of the step's time, without some values: by each place what those before it left."""
    moves: list[Move] = []
    for tier, channel in enumerate(channels):
        if not channel.is_codec:
            taken = {*others, *(move.value for move in moves)}
            moves += placed(trace, chosen(trace, channel, share, taken), channel, tier)
    return moves


def bound_with(trace: Trace, channels: Sequence[Channel], budget_bytes: int) -> int:
    """A lower bound, in ns, on the time of any plan at a budget that may also move values by the channels.

    With codecs it is that of a step in which all that they could hold is away for nothing. Where values may leave the device it is the plain step's time.
    """
    if any(not channel.is_codec for channel in channels):
        return trace.plain_time_ns
    return bound(_relaxed(trace, tuple(channels)) if channels else trace, budget_bytes)


@lru_cache(maxsize=8)
def _relaxed(trace: Trace, channels: tuple[Channel, ...]) -> Trace:
    return without(trace, coded(trace, channels, CODECS), channels, is_free=True)


def judged(trace: Trace, point: Point, moves: Sequence[Move], channels: Sequence[Channel]) -> Point:
    """The plan of a point that was found without the moved values, with their moves."""
    hold = list(point.hold_from[: len(trace.values)])
    for move in moves:
        hold[move.value] = 0
    closed = close(trace, hold, rounded(moves, channels))
    seen = simulate(trace, closed, is_closed=True, moves=moves, channels=channels)
    return Point(peak_bytes=seen.peak_bytes, time_ns=seen.time_ns, hold_from=array("i", closed), moves=tuple(moves))


def chosen(trace: Trace, channel: Channel, share: float, others: Collection[int] = ()) -> list[int]:
    """The movable values that take most time a byte to make again, as many as can be copied in a share of the time of forward, and of backward.

    ``others`` are left out.
    """
    line, times, places = lineage_of(trace), times_before(trace), places_of(trace)
    forward_ns = times[places.seal]
    left = {True: share * forward_ns, False: share * (times[-1] - forward_ns)}
    taken, room = [], channel.capacity_bytes
    candidates = [v for v in movable(trace) if v not in others]
    for v in sorted(candidates, key=lambda v: (-line.times[line.producer[v]] / line.bytes[v], v)):
        out_ns, in_ns = channel.write_ns(line.bytes[v]), channel.read_ns(line.bytes[v])
        away_ns = times[places.demand[v]] - times[places.run[line.producer[v]]]
        if out_ns > left[True] or in_ns > left[False] or line.bytes[v] > room or away_ns < 2 * (out_ns + in_ns):
            continue
        left[True], left[False], room = left[True] - out_ns, left[False] - in_ns, room - line.bytes[v]
        taken.append(v)
    return taken


def placed(trace: Trace, values: Sequence[int], channel: Channel, tier: int = 0) -> tuple[Move, ...]:
    """When some values leave and come back (Rule 2); ``tier``: the channel's number."""
    lands, fetches = _lands(trace, values, channel), _fetches(trace, values, channel)
    return tuple(Move(value=v, land=lands[v], fetch=fetches[v], tier=tier) for v in sorted(values) if v in lands)


def _lands(trace: Trace, values: Sequence[int], channel: Channel) -> dict[int, int]:
    """For each value the operator before which its copy should be done; without those for which there is none."""
    line, times, places = lineage_of(trace), times_before(trace), places_of(trace)
    ops, runs = places.landing_ops, places.landings
    starts = [times[run] for run in runs]
    free_at = 0.0
    lands = {}
    for v in sorted(values, key=lambda v: places.run[line.producer[v]]):
        made = places.run[line.producer[v]]
        free_at = max(free_at, times[made + 1]) + MARGIN * channel.write_ns(line.bytes[v])
        first = bisect_right(runs, places.gone(line.producer[v], line.storage[v]))
        at = min(max(bisect_left(starts, free_at), first), len(ops) - 1)
        if runs[at] > made:
            lands[v] = ops[at]
    return lands


def _fetches(trace: Trace, values: Sequence[int], channel: Channel) -> dict[int, int]:
    """For each value the rank from which on it should come back: of the last moved value that is asked for early enough, 0 where there is none."""
    line, times, places, rank = lineage_of(trace), times_before(trace), places_of(trace), trace.demand_rank
    asked = sorted(values, key=lambda v: rank[v])
    whens = [times[places.demand[v]] for v in asked]
    begin = float(times[-1])
    fetches = {}
    for at in range(len(asked) - 1, -1, -1):
        v = asked[at]
        begin = min(begin, whens[at]) - MARGIN * channel.read_ns(line.bytes[v])
        before = min(bisect_right(whens, begin), at)
        fetches[v] = rank[asked[before - 1]] if before else 0
    return fetches
