"""How each value of a trace can be made again, in arrays that the simulator and the solvers share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from punar.ir.derived import derived
from punar.ir.trace import EventKind, Trace

NEVER = 1 << 30
"""A ``hold_from`` that no demand reaches: the value is made anew each time and never held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Derived arrays of one trace, indexed by operator, value or storage id.

    ``reads[op]``: the distinct values an operator reads. ``creates[op]``: the values whose storage it allocates. ``writes[op]``:
    (old value, new value) for each storage it overwrites. ``bytes[value]``: of its storage. ``is_source[value]``. ``is_saved[value]``:
    autograd saved it, in forward. ``can_replay[value]``: it has a replayable forward producer. ``is_free[value]``: its storage outlives
    backward's last demand for it anyway, so that holding it costs nothing.
    ``overwrites[op]``: the old values of these, and what it clobbers. ``all_steps``: the events as (place, kind, id).
    ``saved[save]``: its value. ``outputs[op]``. ``times[op]``: of a replay, with the call. ``adds[op]``: its peak.
    ``makes[op]``: (storage, bytes) for each storage it allocates.
    """

    reads: tuple[tuple[int, ...], ...]
    creates: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[tuple[int, int], ...], ...]
    bytes: tuple[int, ...]
    storage: tuple[int, ...]
    producer: tuple[int, ...]
    is_source: tuple[bool, ...]
    is_saved: tuple[bool, ...]
    can_replay: tuple[bool, ...]
    is_free: tuple[bool, ...]
    all_steps: tuple[tuple[int, int, int], ...]
    overwrites: tuple[tuple[int, ...], ...]
    saved: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    times: tuple[int, ...]
    adds: tuple[int, ...]
    makes: tuple[tuple[tuple[int, int], ...], ...]


@derived
def lineage_of(trace: Trace) -> Lineage:
    """Derives the arrays; computed once a trace."""
    storage = tuple(v.storage for v in trace.values)
    current: dict[int, int] = {}
    reads, creates, writes = [], [], []
    for op in trace.ops:
        new = [v for v in op.outputs if trace.values[v].version == 0]
        over = []
        for v in op.outputs:
            if trace.values[v].version > 0:
                old = [u for u in op.inputs if storage[u] == storage[v]]
                if old:
                    over.append((max(old), v))
        reads.append(tuple(dict.fromkeys(op.inputs)))
        creates.append(tuple(new))
        writes.append(tuple(over))
        for v in op.outputs:
            current[storage[v]] = v
    producer = tuple(v.producer for v in trace.values)
    saved = [False] * len(trace.values)
    for save in trace.saves:
        saved[save.value] = True
    can_replay = tuple(
        p >= 0
        and trace.ops[p].is_replayable
        and not trace.ops[p].is_backward
        and (trace.values[v].version == 0 or any(new == v for _, new in writes[p]))
        for v, p in enumerate(producer)
    )
    freed, released, seal = _ends(trace)
    last_version = {value.storage: value.id for value in trace.values}
    is_free = tuple(
        trace.storages[s].is_source or (freed[s] > seal and freed[s] >= released[v] and last_version[s] == v) for v, s in enumerate(storage)
    )
    return Lineage(
        reads=tuple(reads),
        creates=tuple(creates),
        writes=tuple(writes),
        bytes=tuple(trace.storages[s].bytes for s in storage),
        storage=storage,
        producer=producer,
        is_source=tuple(trace.storages[s].is_source and trace.values[v].producer < 0 for v, s in enumerate(storage)),
        is_saved=tuple(saved),
        can_replay=can_replay,
        is_free=is_free,
        all_steps=tuple((place, int(kind), id) for place, (kind, id) in enumerate(trace.events)),
        overwrites=tuple((*(old for old, _ in over), *op.clobbers) for over, op in zip(writes, trace.ops, strict=True)),
        saved=tuple(save.value for save in trace.saves),
        outputs=tuple(op.outputs for op in trace.ops),
        times=tuple(op.time_ns + trace.overhead_ns for op in trace.ops),
        adds=tuple(op.peak_bytes for op in trace.ops),
        makes=tuple(tuple((storage[v], trace.storages[storage[v]].bytes) for v in made) for made in creates),
    )


def _ends(trace: Trace) -> tuple[list[int], list[int], int]:
    """For each storage the place of its FREE, for each value that of its last RELEASE, and the place of the first demand."""
    end = len(trace.events)
    freed = [end] * len(trace.storages)
    released = [-1] * len(trace.values)
    seal = end
    for place, (kind, id) in enumerate(trace.events):
        if kind == EventKind.FREE:
            freed[id] = place
        elif kind == EventKind.RELEASE:
            released[trace.saves[id].value] = place
        elif kind == EventKind.DEMAND:
            seal = min(seal, place)
    return freed, released, seal


def close(trace: Trace, hold_from: Sequence[int], rounded: Collection[int] = ()) -> tuple[int, ...]:
    """Makes ``hold_from`` obeyable: whatever a replay would need and cannot make again is held from forward on.

    Saved values that cannot be replayed, or cost nothing to hold, are held as well, and so is what is made from one that is ``rounded``. What no replay
    needs and autograd did not save comes back as ``NEVER``.
    """
    line = lineage_of(trace)
    closed = [NEVER] * len(hold_from)
    stack = [v for v in range(len(hold_from)) if line.is_saved[v]]
    seen = [False] * len(hold_from)
    apart = frozenset(rounded).isdisjoint
    while stack:
        v = stack.pop()
        if seen[v]:
            continue
        seen[v] = True
        if hold_from[v] <= 0 or not line.can_replay[v] or line.is_free[v] or not apart(line.reads[line.producer[v]]):
            closed[v] = 0
            continue
        closed[v] = hold_from[v]
        stack.extend(line.reads[line.producer[v]])
    return tuple(closed)


def recorded_ops(trace: Trace, hold_from: Sequence[int]) -> tuple[bool, ...]:
    """Which operators a closed ``hold_from`` may have to replay: those that a tape must record."""
    line = lineage_of(trace)
    recorded = [False] * len(trace.ops)
    for v, hold in enumerate(hold_from):
        if hold > 0 and line.is_saved[v]:
            _record(v, hold_from, line, recorded)
    return tuple(recorded)


def _record(value: int, hold_from: Sequence[int], line: Lineage, recorded: list[bool]) -> None:
    stack = [value]
    while stack:
        op = line.producer[stack.pop()]
        if recorded[op]:
            continue
        recorded[op] = True
        stack.extend(u for u in line.reads[op] if hold_from[u] > 0)
