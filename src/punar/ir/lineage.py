"""How each value of a trace can be made again, in arrays that the simulator and the solvers share."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
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
    backward's last demand for it anyway, or is asked for again before anything runs that could set the peak (``_idle``), so that holding it costs nothing.
    ``overwrites[op]``: the old values of these, and what it clobbers. ``all_steps``: the events as (place, kind, id).
    ``saved[save]``: its value. ``outputs[op]``. ``times[op]``: of a replay, with the call. ``adds[op]``: its peak.
    ``makes[op]``: (storage, bytes) for each storage it allocates. ``carried[value]``: the earlier versions of its storage, of those of which saves were
    carried on to it on; only of values to which some were.
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
    carried: dict[int, tuple[int, ...]]


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
    idle = _idle(trace, freed, released)
    is_free = tuple(
        trace.storages[s].is_source or (last_version[s] == v and ((freed[s] > seal and freed[s] >= released[v]) or v in idle))
        for v, s in enumerate(storage)
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
        carried=_carried(trace),
    )


def _carried(trace: Trace) -> dict[int, tuple[int, ...]]:
    first: dict[int, int] = {}
    for save in trace.saves:
        if save.first != save.value:
            first[save.value] = min(first.get(save.value, save.first), save.first)
    versions: dict[int, list[int]] = {trace.values[v].storage: [] for v in first}
    for value in trace.values if versions else ():
        if value.storage in versions:
            versions[value.storage].append(value.id)
    return {v: tuple(u for u in versions[trace.values[v].storage] if first[v] <= u < v) for v in sorted(first)}


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


FEW = 4
"""How many operators may run while a value is not needed for it still to count as idle."""

NEAR = 64
"""How many operators may read an idle value, or what is made of it."""


def _idle(trace: Trace, freed: list[int], released: list[int]) -> set[int]:
    """The only saved values of their storages that could be dropped for no more than the time of a few small operators.

    Such as what the loss is computed from: the first that backward asks for. While it is not needed nothing is asked for, and less is allocated, with what
    is freed after that, than by one of the operators that run while it is needed next; and it is needed as long as what is made of it: to hold it
    raises no peak.
    """
    runs = [place for place, event in enumerate(trace.events) if event.kind == EventKind.RUN]
    spans: dict[int, list[list[int]]] = {}
    saved = {save.value for save in trace.saves}
    shared = Counter(trace.values[v].storage for v in saved)
    open_spans: dict[int, list[int]] = {}
    asked = [0]
    for kind, _ in trace.events:
        asked.append(asked[-1] + (kind == EventKind.DEMAND))
    for place, (kind, id) in enumerate(trace.events):
        if kind == EventKind.DEMAND:
            open_spans[id] = [place, place]
            spans.setdefault(trace.saves[id].value, []).append(open_spans[id])
        elif kind in (EventKind.RETURN, EventKind.RELEASE) and id in open_spans:
            open_spans.pop(id)[1] = place
        if kind == EventKind.RELEASE:
            spans.setdefault(trace.saves[id].value, []).append([place, place])

    def is_small(start: int, end: int) -> bool:
        first, last = bisect_right(runs, start), bisect_left(runs, end)
        if asked[end] > asked[start]:
            return False
        if first == last:
            return True
        if trace.events[end].kind == EventKind.RELEASE or last - first > FEW:
            return False
        most = max(trace.ops[trace.events[place].id].peak_bytes for place in runs[first:last])
        for place in range(start + 1, len(trace.events)):
            kind, id = trace.events[place]
            if kind == EventKind.FREE:
                most += trace.storages[id].bytes
            elif kind == EventKind.RUN and place > end and trace.ops[id].peak_bytes >= most:
                return True
            elif kind in (EventKind.RETURN, EventKind.RELEASE) and place > end:
                return False
        return False

    readers: dict[int, list[int]] = {}
    for op in trace.ops:
        if not op.is_backward:
            for v in op.inputs:
                readers.setdefault(v, []).append(op.id)

    def outlasts(v: int) -> bool:
        """Whether all that is made of a value, and saved, is released no later."""
        stack, seen = [v], {v}
        while stack:
            for w in (w for op in readers.get(stack.pop(), ()) for w in trace.ops[op].outputs if w not in seen):
                if released[w] > released[v] or len(seen) > NEAR:
                    return False
                seen.add(w)
                stack.append(w)
        return True

    idle = set()
    for v in saved:
        storage = trace.values[v].storage
        if shared[storage] > 1 or trace.values[v].producer < 0 or v not in spans or len(spans[v]) < 2:
            continue
        begin = freed[storage]
        for start, end in sorted(spans[v]):
            if start > begin and not is_small(begin, start):
                break
            begin = max(begin, end)
        else:
            if outlasts(v):
                idle.add(v)
    return idle


def close(trace: Trace, hold_from: Sequence[int], rounded: Collection[int] = ()) -> tuple[int, ...]:
    """Makes ``hold_from`` obeyable: whatever a replay would need and cannot make again is held from forward on.

    Saved values that cannot be replayed, or cost nothing to hold, are held as well, and so is what is made from one that is ``rounded``. What no replay
    needs and autograd did not save comes back as ``NEVER``. A value that saves are carried on to goes with the versions that these were made of: what is
    held of those would be held by the save as well.
    """
    line = lineage_of(trace)
    closed = [NEVER] * len(hold_from)
    stack = [v for v in range(len(hold_from)) if line.is_saved[v]]
    seen = [False] * len(hold_from)
    apart = frozenset(rounded).isdisjoint

    def can_drop(v: int) -> bool:
        return line.can_replay[v] and not line.is_free[v] and apart(line.reads[line.producer[v]])

    held: set[int] = set()
    dropped: set[int] = set()
    for v, versions in line.carried.items():
        if hold_from[v] <= 0 or not can_drop(v) or not all(can_drop(u) and u not in held for u in versions):
            held.add(v)
        else:
            dropped.update(versions)
    while stack:
        v = stack.pop()
        if seen[v]:
            continue
        seen[v] = True
        if v in held or not can_drop(v) or (hold_from[v] <= 0 and v not in dropped):
            closed[v] = 0
            continue
        closed[v] = hold_from[v] if hold_from[v] > 0 else NEVER
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
