"""Plans that also move values off the device: which, when they leave and come back, and the search beside them.

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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from punar.ir import Event, EventKind, Op, Storage, Trace, Value
from punar.ir.derived import derived
from punar.ir.lineage import close, lineage_of
from punar.plan.moves import Channel, Move, times_before
from punar.plan.simulate import simulate
from punar.solvers.search import Point, Search, undominated

LEAST_BYTES = 1 << 16
"""Smaller storages are not worth a copy."""

SHARES = (0.25, 0.5, 0.8, 1.1, 1.6, 3.0)
"""The shares of the step's time that copies may take, those above 1 with waiting."""

MARGIN = 1.1
"""How much longer than measured a copy is expected to take."""


def points_with_moves(trace: Trace, channels: Sequence[Channel]) -> Iterator[Point]:
    """Judged plans that move values, for budgets all the way down."""
    tried: set[tuple[Move, ...]] = set()
    for share in SHARES:
        moves = placed(trace, chosen(trace, channels[0], share), channels[0])
        if not moves or moves in tried:
            continue
        tried.add(moves)
        search = Search(without(trace, moves))
        search.run()
        for point in undominated(search.points):
            yield judged(trace, point, moves, channels)


def judged(trace: Trace, point: Point, moves: Sequence[Move], channels: Sequence[Channel]) -> Point:
    """The plan of a point that was found without the moved values, with their moves."""
    hold = list(point.hold_from[: len(trace.values)])
    for move in moves:
        hold[move.value] = 0
    closed = close(trace, hold)
    seen = simulate(trace, closed, is_closed=True, moves=moves, channels=channels)
    return Point(peak_bytes=seen.peak_bytes, time_ns=seen.time_ns, hold_from=array("i", closed), moves=tuple(moves))


def movable(trace: Trace, least_bytes: int = LEAST_BYTES) -> list[int]:
    """The saved values of at least so many bytes that can move: the last contents of a storage that a forward operator filled and the step lets go of before backward.

    What begins as an empty or constant buffer may be freed and filled again by what the trace does not show, as sharded parameters are. What makes
    tensors from nothing, with random numbers too, must return the only reference to them: else torch makes another one, by a further operator.
    """
    line = lineage_of(trace)
    last = {value.storage: value.id for value in trace.values}
    first = {value.storage: value for value in reversed(trace.values)}
    saved = trace.saved_values()
    versions = Counter(line.storage[v] for v in saved)
    places = _places(trace)
    return [
        v
        for v in saved
        if line.producer[v] >= 0
        and not trace.ops[line.producer[v]].is_backward
        and not any(_is_factory(trace.ops[op]) for op in (line.producer[v], first[line.storage[v]].producer) if op >= 0)
        and not line.is_source[first[line.storage[v]].id]
        and not line.is_free[v]
        and line.bytes[v] >= least_bytes
        and last[line.storage[v]] == v
        and versions[line.storage[v]] == 1
        and trace.demand_rank[v]
        and places.freed.get(line.storage[v], places.seal) < places.seal
    ]


def _is_factory(op: Op) -> bool:
    return op.kind in ("prelude", "factory") or op.name.startswith("aten.rand")


def chosen(trace: Trace, channel: Channel, share: float) -> list[int]:
    """The movable values that take most time a byte to make again, as many as can be copied in a share of the time of forward, and of backward."""
    line, times, places = lineage_of(trace), times_before(trace), _places(trace)
    forward_ns = times[places.seal]
    left = {True: share * forward_ns, False: share * (times[-1] - forward_ns)}
    taken, room = [], channel.capacity_bytes
    for v in sorted(movable(trace), key=lambda v: (-line.times[line.producer[v]] / line.bytes[v], v)):
        out_ns, in_ns = channel.write_ns(line.bytes[v]), channel.read_ns(line.bytes[v])
        away_ns = times[places.demand[v]] - times[places.run[line.producer[v]]]
        if out_ns > left[True] or in_ns > left[False] or line.bytes[v] > room or away_ns < 2 * (out_ns + in_ns):
            continue
        left[True], left[False], room = left[True] - out_ns, left[False] - in_ns, room - line.bytes[v]
        taken.append(v)
    return taken


class _Places:
    """Where in the events things happen: ``run[op]``, ``freed[storage]``, the first ``demand[value]`` and last ``release[value]``, ``seal``."""

    def __init__(self, trace: Trace) -> None:
        self.run = [0] * len(trace.ops)
        self.seal = len(trace.events)
        self.freed: dict[int, int] = {}
        self.demand: dict[int, int] = {}
        self.release: dict[int, int] = {}
        for place, (kind, id) in enumerate(trace.events):
            if kind == EventKind.RUN:
                self.run[id] = place
            elif kind == EventKind.FREE:
                self.freed[id] = place
            elif kind == EventKind.DEMAND:
                self.seal = min(self.seal, place)
                self.demand.setdefault(trace.saves[id].value, place)
            elif kind == EventKind.RELEASE:
                self.release[trace.saves[id].value] = place


@derived
def _places(trace: Trace) -> _Places:
    return _Places(trace)


def placed(trace: Trace, values: Sequence[int], channel: Channel) -> tuple[Move, ...]:
    """When some values leave and come back (Rule 2)."""
    lands, fetches = _lands(trace, values, channel), _fetches(trace, values, channel)
    return tuple(Move(value=v, land=lands[v], fetch=fetches[v]) for v in sorted(values) if v in lands)


def _lands(trace: Trace, values: Sequence[int], channel: Channel) -> dict[int, int]:
    """For each value the operator before which its copy should be done; without those for which there is none."""
    line, times, places = lineage_of(trace), times_before(trace), _places(trace)
    ops = [op.id for op in trace.forward_ops if op.outputs and places.run[op.id] < places.seal]
    starts = [times[places.run[op]] for op in ops]
    runs = [places.run[op] for op in ops]
    free_at = 0.0
    lands = {}
    for v in sorted(values, key=lambda v: places.run[line.producer[v]]):
        made = places.run[line.producer[v]]
        free_at = max(free_at, times[made + 1]) + MARGIN * channel.write_ns(line.bytes[v])
        first = bisect_right(runs, max(made, places.freed.get(line.storage[v], made)))
        at = min(max(bisect_left(starts, free_at), first), len(ops) - 1)
        if runs[at] > made:
            lands[v] = ops[at]
    return lands


def _fetches(trace: Trace, values: Sequence[int], channel: Channel) -> dict[int, int]:
    """For each value the rank from which on it should come back: of the last moved value that is asked for early enough, 0 where there is none."""
    line, times, places, rank = lineage_of(trace), times_before(trace), _places(trace), trace.demand_rank
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


def without(trace: Trace, moves: Sequence[Move]) -> Trace:
    """The trace as if the model itself moved the values (Rule 3).

    A moved value's saves are gone; its storage is freed where it leaves, if the step did not free it later. An operator of backward makes
    a storage of its size where it comes back, which is freed at its last release. Operators that read it read a source of no bytes instead.
    """
    line, places = lineage_of(trace), _places(trace)
    moved = {move.value for move in moves}
    source = Value(id=len(trace.values), storage=len(trace.storages), version=0, producer=-1)
    values, storages, ops = [*trace.values, source], [*trace.storages, Storage(id=source.storage, bytes=0, is_source=True)], list(trace.ops)
    for op in trace.ops:
        if not moved.isdisjoint(op.inputs):
            ops[op.id] = replace(op, inputs=tuple(source.id if v in moved else v for v in op.inputs))
    before: dict[int, list[Event]] = {}
    after: dict[int, list[Event]] = {}
    rank_place = {trace.demand_rank[v]: place for v, place in places.demand.items()}
    gone: set[int] = set()
    for move in moves:
        size, storage = line.bytes[move.value], line.storage[move.value]
        back = Storage(id=len(storages), bytes=size, is_source=False)
        shadow = Value(id=len(values), storage=back.id, version=0, producer=len(ops))
        storages.append(back)
        values.append(shadow)
        ops.append(_fetch_op(len(ops), shadow.id, size))
        leaves = places.run[move.land]
        if places.freed.get(storage, -1) < leaves:
            gone.add(storage)
            before.setdefault(leaves, []).append(Event(EventKind.FREE, storage))
        comes = rank_place[move.fetch] if move.fetch else places.seal
        after.setdefault(comes, []).append(Event(EventKind.RUN, shadow.producer))
        after.setdefault(places.release.get(move.value, len(trace.events) - 1), []).append(Event(EventKind.FREE, back.id))
    return _rebuilt(trace, ops, values, storages, _events(trace, moved, gone, before, after))


def _fetch_op(id: int, value: int, nbytes: int) -> Op:
    return Op(
        id=id,
        name="punar.fetch",
        kind="copy",
        is_backward=True,
        has_grad_mode=False,
        module="",
        signature="punar.fetch",
        inputs=(),
        outputs=(value,),
        time_ns=0,
        peak_bytes=nbytes,
        is_replayable=False,
    )


def _events(
    trace: Trace, moved: set[int], gone: set[int], before: dict[int, list[Event]], after: dict[int, list[Event]]
) -> Iterator[Event]:
    for place, event in enumerate(trace.events):
        yield from before.get(place, ())
        is_of_moved = event.kind not in (EventKind.RUN, EventKind.FREE) and trace.saves[event.id].value in moved
        if not is_of_moved and not (event.kind == EventKind.FREE and event.id in gone):
            yield event
        yield from after.get(place, ())


def _rebuilt(trace: Trace, ops: Sequence[Op], values: Sequence[Value], storages: Sequence[Storage], events: Iterator[Event]) -> Trace:
    """The trace with other tables; saves that no event names any more are left out."""
    kept: dict[int, int] = {}
    renamed = []
    for kind, id in events:
        if kind not in (EventKind.RUN, EventKind.FREE):
            id = kept.setdefault(id, len(kept))
        renamed.append(Event(kind, id))
    saves = tuple(replace(trace.saves[old], id=new) for old, new in kept.items())
    return replace(trace, ops=tuple(ops), values=tuple(values), storages=tuple(storages), saves=saves, events=tuple(renamed))
