"""Which of a trace's storages are parameters' gradients: they do not shrink with the batch, and are there when backward has ended."""

from __future__ import annotations

from collections.abc import Iterable

from punar.ir.derived import derived
from punar.ir.trace import EventKind, Op, Trace


def made_by(trace: Trace, op: Op) -> set[int]:
    """The storages that an operator allocates."""
    return {trace.values[value].storage for value in op.outputs if not trace.values[value].version}


def touched_by(trace: Trace, op: Op) -> set[int]:
    """The storages that an operator reads or writes."""
    return {trace.values[value].storage for value in (*op.inputs, *op.outputs)}


def size_of(trace: Trace, storages: Iterable[int]) -> int:
    """The bytes of some storages."""
    return sum(trace.storages[storage].bytes for storage in storages)


@derived
def gradients_of(trace: Trace) -> frozenset[int]:
    """The storages that backward makes and that outlive it, and are no activations."""
    ended = {event.id for event in trace.events if event.kind == EventKind.FREE}
    ended |= {trace.values[save.value].storage for save in trace.saves}
    return frozenset().union(*(made_by(trace, op) for op in trace.ops if op.is_backward)) - ended


@derived
def accumulated_into(trace: Trace) -> frozenset[int]:
    """Gradients from before the step: what was there already and backward adds to."""
    written = {trace.values[value].storage for op in trace.ops if op.is_backward for value in op.outputs if trace.values[value].version}
    return frozenset(storage for storage in written if trace.storages[storage].is_source)


def gradients_before(trace: Trace) -> int:
    """The bytes of gradients that were there before the step, as far as they are known to be."""
    return max(int(trace.meta.get("gradient_bytes", 0)), size_of(trace, accumulated_into(trace)))


def of_parameters(trace: Trace) -> set[int]:
    """All storages that are as large as a parameter whatever the batch: gradients, what is summed or copied into them, and casts of parameters."""
    found = {*gradients_of(trace), *accumulated_into(trace)}
    for op in reversed(trace.ops):
        outputs, inputs = ({trace.values[value].storage for value in values} for values in (op.outputs, op.inputs))
        is_sum = op.kind == "copy" or op.name.startswith("aten.add")
        if op.is_backward and is_sum and not outputs.isdisjoint(found):
            found |= {storage for storage in inputs if not trace.storages[storage].is_source}
        elif not op.is_backward and op.kind == "copy" and all(trace.storages[storage].is_source for storage in inputs):
            found |= outputs
    return found
