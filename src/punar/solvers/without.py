"""A step as if the model itself moved some of its values, so that what becomes of the others can be searched for as without moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from punar.ir import Event, EventKind, Op, Storage, Trace, Value
from punar.ir.lineage import lineage_of
from punar.plan.moves import Channel, Move, rounded
from punar.solvers.movable import places_of


def without(trace: Trace, moves: Sequence[Move], channels: Sequence[Channel], *, is_free: bool = False) -> Trace:
    """The trace without some values.

    A moved value's saves are gone; its storage is freed where it leaves, if the step did not free it later. An operator of backward makes
    a storage of its size where it comes back, which is freed at its last release. What stays of it meanwhile, encoded, is a storage of an operator where
    it leaves. Operators that read it read a source of no bytes instead; where it comes back rounded no replay may run them.

    ``is_free``: nothing of this takes bytes or time, and all may be replayed: no plan with any of these moves does better than one for this trace.
    """
    editor = _Editor(trace, channels, is_free=is_free)
    for move in moves:
        editor.move(move)
    return editor.trace_of(moves)


class _Editor:
    """A trace's tables while they are rewritten; ``before``, ``after``: events to go in around those at some places."""

    def __init__(self, trace: Trace, channels: Sequence[Channel], *, is_free: bool) -> None:
        self.trace, self.channels, self.is_free = trace, channels, is_free
        self.line, self.places = lineage_of(trace), places_of(trace)
        self.ops, self.values, self.storages = list(trace.ops), list(trace.values), list(trace.storages)
        self.source = len(self.values)
        self.storages.append(Storage(id=len(self.storages), bytes=0, is_source=True))
        self.values.append(Value(id=self.source, storage=len(self.storages) - 1, version=0, producer=-1))
        self.before: dict[int, list[Event]] = {}
        self.after: dict[int, list[Event]] = {}
        self.place_of_rank = {trace.demand_rank[v]: place for v, place in self.places.demand.items()}
        self.gone: set[int] = set()

    def move(self, move: Move) -> None:
        storage, size = self.line.storage[move.value], self.line.bytes[move.value]
        channel = self.channels[move.tier]
        leaves = self.places.run[move.land]
        comes = self.place_of_rank[move.fetch] if move.fetch else self.places.seal
        encoded = self.add(leaves, self.before, channel, size, is_back=False) if channel.is_codec and not self.is_free else -1
        if self.places.freed.get(storage, -1) < leaves:
            self.gone.add(storage)
            self.before.setdefault(leaves, []).append(Event(EventKind.FREE, storage))
        back = self.add(comes, self.after, channel, size, is_back=True)
        if encoded >= 0:
            self.after[comes].append(Event(EventKind.FREE, encoded))
        self.after.setdefault(self.places.release.get(move.value, len(self.trace.events) - 1), []).append(Event(EventKind.FREE, back))

    def add(self, place: int, events: dict[int, list[Event]], channel: Channel, size: int, *, is_back: bool) -> int:
        """An operator that fetches, decodes or encodes; returns the number of the storage that it makes."""
        made = 0 if self.is_free else size if is_back else channel.kept(size)
        is_timed = channel.is_codec and not self.is_free
        storage = Storage(id=len(self.storages), bytes=made, is_source=False)
        value = Value(id=len(self.values), storage=storage.id, version=0, producer=len(self.ops))
        op = Op(
            id=len(self.ops),
            name="punar.fetch" if is_back else "punar.encode",
            kind="copy",
            is_backward=is_back,
            has_grad_mode=False,
            module="",
            signature="punar.fetch" if is_back else "punar.encode",
            inputs=(),
            outputs=(value.id,),
            time_ns=(channel.read_ns(size) if is_back else channel.write_ns(size)) if is_timed else 0,
            peak_bytes=made + (channel.scratch(size) if is_timed else 0),
            is_replayable=False,
        )
        self.storages.append(storage)
        self.values.append(value)
        self.ops.append(op)
        events.setdefault(place, []).append(Event(EventKind.RUN, op.id))
        return storage.id

    def trace_of(self, moves: Sequence[Move]) -> Trace:
        moved = {move.value for move in moves}
        lost = frozenset[int]() if self.is_free else rounded(moves, self.channels)
        for op in self.trace.ops:
            if not moved.isdisjoint(op.inputs):
                inputs = tuple(self.source if v in moved else v for v in op.inputs)
                self.ops[op.id] = replace(op, inputs=inputs, is_replayable=op.is_replayable and lost.isdisjoint(op.inputs))
        kept: dict[int, int] = {}
        renamed = []
        for kind, id in self.events(moved):
            if kind not in (EventKind.RUN, EventKind.FREE):
                id = kept.setdefault(id, len(kept))
            renamed.append(Event(kind, id))
        return replace(
            self.trace,
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=tuple(self.storages),
            saves=tuple(replace(self.trace.saves[old], id=new) for old, new in kept.items()),
            events=tuple(renamed),
        )

    def events(self, moved: set[int]) -> Iterator[Event]:
        for place, event in enumerate(self.trace.events):
            yield from self.before.get(place, ())
            is_of_moved = event.kind not in (EventKind.RUN, EventKind.FREE) and self.trace.saves[event.id].value in moved
            if not is_of_moved and not (event.kind == EventKind.FREE and event.id in self.gone):
                yield event
            yield from self.after.get(place, ())
