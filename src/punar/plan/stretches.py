"""The events of a step with those that no plan can change drawn together, so that a simulation need not go through them.

NOTE. What no plan changes.

1. A storage is *apart* where autograd saves none of its values, no operator that may be replayed reads or makes one, and no forward operator
   allocates it: it lives from its operator to its FREE whatever the plan.
2. An operator is apart where no plan replays it, it allocates only storages apart, and it overwrites nothing that a tape may hold.
3. What is saved of a source changes no memory, but for the first demand: that is where backward begins.
4. Neighbouring events apart are one *stretch*: by how much memory rises at most above what it was before, where, and what is left of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from punar.ir.derived import derived
from punar.ir.lineage import lineage_of
from punar.ir.trace import EventKind, Trace

STRETCH = len(EventKind)
"""The kind of a step that stands for a stretch of events."""


class Stretch(NamedTuple):
    """Bytes above what is alive at its start: ``rise`` at most, first at the event ``place``; ``rest`` at its end."""

    rise: int
    place: int
    rest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """``steps``: (event's place, kind, id), where the id of a ``STRETCH`` is its place in ``stretches``."""

    steps: tuple[tuple[int, int, int], ...]
    stretches: tuple[Stretch, ...]


@derived
def score_of(trace: Trace) -> Score:
    """Draws the events together; computed once a trace. Complexity: linear in the events."""
    steps: list[tuple[int, int, int]] = []
    stretches: list[Stretch] = []
    waiting: list[tuple[int, int, int]] = []
    for place, kind, id, is_apart in _events(trace):
        if is_apart:
            waiting.append((place, kind, id))
            continue
        if waiting:
            steps.append((waiting[0][0], STRETCH, len(stretches)))
            stretches.append(_stretch(trace, waiting))
            waiting = []
        steps.append((place, kind, id))
    if waiting:
        steps.append((waiting[0][0], STRETCH, len(stretches)))
        stretches.append(_stretch(trace, waiting))
    return Score(steps=tuple(steps), stretches=tuple(stretches))


def _stretch(trace: Trace, events: list[tuple[int, int, int]]) -> Stretch:
    line = lineage_of(trace)
    live, rise, at = 0, -(1 << 62), events[0][0]
    for place, kind, id in events:
        if kind == EventKind.RUN:
            if live + line.adds[id] > rise:
                rise, at = live + line.adds[id], place
            live += sum(size for _, size in line.makes[id])
        elif kind == EventKind.FREE and not trace.storages[id].is_source:
            live -= trace.storages[id].bytes
    return Stretch(rise=rise, place=at, rest=live)


def _events(trace: Trace) -> Iterator[tuple[int, int, int, bool]]:
    """(place, kind, id, whether it is apart) of each event."""
    line = lineage_of(trace)
    known, is_close = _known(trace), _close_storages(trace)
    is_begun = False
    for place, kind, id in line.all_steps:
        if kind == EventKind.RUN:
            op = trace.ops[id]
            is_free = op.is_backward or not op.outputs
            yield place, kind, id, is_free and known.isdisjoint(line.overwrites[id]) and not any(is_close[s] for s, _ in line.makes[id])
        elif kind == EventKind.FREE:
            yield place, kind, id, not is_close[id]
        else:
            starts = kind == EventKind.DEMAND and not is_begun
            is_begun |= starts
            yield place, kind, id, line.is_source[trace.saves[id].value] and not starts


def _known(trace: Trace) -> set[int]:
    """The values that a tape may record: what operators that may be replayed read and make."""
    line = lineage_of(trace)
    ops = {line.producer[v] for v, can in enumerate(line.can_replay) if can}
    return {v for op in ops for v in (*line.reads[op], *trace.ops[op].outputs)}


def _close_storages(trace: Trace) -> list[bool]:
    """For each storage whether it is not apart (Rule 1)."""
    line = lineage_of(trace)
    is_close = [True] * len(trace.storages)
    for storages in line.makes:
        for storage, _ in storages:
            is_close[storage] = trace.storages[storage].is_source
    seen = _known(trace).union(trace.saved_values())
    seen.update(v for v, producer in enumerate(line.producer) if producer < 0 or not trace.ops[producer].is_backward)
    for v in seen:
        is_close[line.storage[v]] = True
    return is_close
