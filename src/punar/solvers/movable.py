"""Which values can leave while they are not needed, and where in the step they would."""

from __future__ import annotations

from collections import Counter

from punar.ir import EventKind, Op, Trace
from punar.ir.derived import derived
from punar.ir.lineage import lineage_of

LEAST_BYTES = 1 << 16
"""Smaller storages are not worth a copy."""


def movable(trace: Trace, least_bytes: int = LEAST_BYTES) -> list[int]:
    """The values that could leave, of at least so many bytes, and come back as they were.

    What begins as an empty or constant buffer may be freed and filled again by what the trace does not show, as sharded parameters are. What makes
    tensors from nothing, with random numbers too, must return the only reference to them: else torch makes another one, by a further operator.
    """
    first = first_producers(trace)
    line = lineage_of(trace)
    return [
        v
        for v in absent(trace)
        if line.bytes[v] >= least_bytes
        and not any(_is_factory(trace.ops[op]) for op in (line.producer[v], first[line.storage[v]]) if op >= 0)
    ]


@derived
def absent(trace: Trace) -> tuple[int, ...]:
    """The saved values that are the last contents of a storage which a forward operator filled and the step lets go of before backward.

    Those that saves were carried on to are left out: where nothing else is dropped for them, these hold their tensors as autograd does.
    """
    line, places, first = lineage_of(trace), places_of(trace), first_producers(trace)
    last = {value.storage: value.id for value in trace.values}
    saved = trace.saved_values()
    versions = Counter(line.storage[v] for v in saved)
    return tuple(
        v
        for v in saved
        if line.producer[v] >= 0
        and not trace.ops[line.producer[v]].is_backward
        and first[line.storage[v]] >= 0
        and not line.is_free[v]
        and last[line.storage[v]] == v
        and versions[line.storage[v]] == 1
        and v not in line.carried
        and trace.demand_rank[v]
        and places.freed.get(line.storage[v], places.seal) < places.seal
    )


def first_producers(trace: Trace) -> dict[int, int]:
    """For each storage the operator that made its first value, or -1."""
    return {value.storage: value.producer for value in reversed(trace.values)}


def _is_factory(op: Op) -> bool:
    return op.kind in ("prelude", "factory") or op.name.startswith("aten.rand")


class Places:
    """Where in the events things happen: ``run[op]``, ``freed[storage]``, the first ``demand[value]`` and last ``release[value]``, ``seal``.

    ``landing_ops``: the forward operators before which values may go, ``landings``: where these run.
    """

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
        self.landing_ops = [op.id for op in trace.forward_ops if op.outputs and self.run[op.id] < self.seal]
        self.landings = [self.run[op] for op in self.landing_ops]

    def gone(self, producer: int, storage: int) -> int:
        """Where the step itself has made a value and let go of it."""
        return max(self.run[producer], self.freed.get(storage, 0))


@derived
def places_of(trace: Trace) -> Places:
    """Where things happen; computed once a trace."""
    return Places(trace)
