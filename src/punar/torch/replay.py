"""Makes dropped values again by running the recorded operators of their lineage.

The rules of what is freed, held and cloned are those of the NOTE in ``punar.plan.simulate``; the two are tested to agree byte for byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from punar.errors import ReplayError, SavedTensorModified
from punar.torch.meter import Meter
from punar.torch.offload import MoveCount, bring
from punar.torch.operators import outputs_in
from punar.torch.records import RecordedOp, Slot, Value, is_rewritten
from punar.torch.rescue import is_out_of_memory


class ReplayCount:
    """What replays did in one step. Units: operators, bytes allocated by them, nanoseconds by the clock ``now_ns``, less those lost to moves (``moved``).

    ``evicted_bytes``: of values that were dropped while no plan was known (see ``evictor``), each time they were.
    """

    __slots__ = ("evicted_bytes", "moved", "nbytes", "now_ns", "operators", "time_ns")

    def __init__(self) -> None:
        self.operators = self.nbytes = self.time_ns = self.evicted_bytes = 0
        self.moved = MoveCount()
        self.now_ns: Callable[[], int] = time.perf_counter_ns


def replay(
    target: Value,
    clock: int,
    meter: Meter,
    count: ReplayCount,
    before: Callable[[RecordedOp, dict[Value, int]], None] | None = None,
) -> Tensor:
    """Makes ``target`` again and returns a tensor on its storage; holds what its plan says to hold from demand ``clock`` on.

    ``before``: called before each operator, with what it and those after it are going to use.

    Raises:
        ReplayError: an operator of the lineage failed, or a held tensor's storage was freed meanwhile.
        OutOfMemory: the step went beyond its limit.
    """
    start, lost_ns = count.now_ns(), count.moved.lost_ns
    ops = _closure(target)
    uses = _count_uses(target, ops)
    made: dict[Value, Tensor] = {}
    ops.reverse()
    with _below_everything():
        while ops:
            if before is not None:
                before(ops[-1], uses)
            _run(ops.pop(), clock, uses, made, meter, count)
            meter.check()
    count.time_ns += count.now_ns() - start - (count.moved.lost_ns - lost_ns)
    base = target.base if target.base is not None else made.get(target)
    if base is None:
        raise ReplayError("asked to recompute a saved tensor, its operators ran and did not make it; please report this with the model")
    return base


@contextmanager
def _below_everything() -> Iterator[None]:
    """No gradients, no autocast, no modes: operators run as they did below all of these."""
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),
    ):
        yield


def _count_uses(target: Value, ops: list[RecordedOp]) -> dict[Value, int]:
    """How often each value is still to be read; entries go when they reach zero, so that no value lives by this table alone."""
    uses = {target: 1}
    for op in ops:
        for value in op.values:
            uses[value] = uses.get(value, 0) + 1
    return uses


def _closure(target: Value) -> list[RecordedOp]:
    """The operators between held values and the target, in forward order."""
    found: dict[int, RecordedOp] = {}
    stack = [target]
    while stack:
        op = stack.pop().op
        if op is None:
            raise ReplayError(
                "asked to recompute a saved tensor, found a value that is neither held nor recorded; please report this with the model"
            )
        if op.number not in found:
            found[op.number] = op
            stack.extend(value for value in op.values if value.base is None and value.copy is None)
    return [found[number] for number in sorted(found)]


def _run(op: RecordedOp, clock: int, uses: dict[Value, int], made: dict[Value, Tensor], meter: Meter, count: ReplayCount) -> None:
    bases = _bases(op, uses, made, meter, count)
    tensors = [ref.view(bases[ref.value]) for ref in op.reads]
    meter.charge(op.peak_bytes)
    out = _call(op, tensors)
    del tensors
    outputs = outputs_in(out)
    del out
    count.operators += 1
    for reference, place in op.makes:
        value = reference()
        if value is None or value.base is not None:
            continue
        if place < 0:
            base = bases[op.overwrites[-1 - place]]
        else:
            base = outputs[place]
            _count_made(base, meter, count)
        if value.is_held_from(clock):
            value.hold(base.detach())
        elif uses.get(value):
            made[value] = base
    del outputs, bases
    for value in op.values:
        uses[value] -= 1
        if not uses[value]:
            del uses[value]
            made.pop(value, None)


def _bases(op: RecordedOp, uses: dict[Value, int], made: dict[Value, Tensor], meter: Meter, count: ReplayCount) -> dict[Value, Tensor]:
    """A tensor on the storage of each value that is read; private ones where the operator writes."""
    bases: dict[Value, Tensor] = {}
    for value in op.values:
        if value.base is not None:
            bases[value] = _held_base(value, value.base)
        else:
            bases[value] = made[value] if value.copy is None else bring(value, value.copy, meter)
    for value in op.overwrites:
        if value.base is not None or uses[value] > 1:
            bases[value] = clone_storage(bases[value])
            _count_made(bases[value], meter, count)
        else:
            made.pop(value)
    return bases


def _held_base(value: Value, base: Tensor) -> Tensor:
    """A held value's tensor, if it still has that value."""
    if base._version not in value.versions:
        raise modified(base, value.versions[0])
    if base.untyped_storage().nbytes() < value.nbytes:
        raise ReplayError(
            f"asked to recompute a saved tensor, found that a {value.nbytes} B storage it is made from was freed after the forward pass"
            " (sharded weights are, for example); exclude that module from recomputation by planning again"
        )
    if is_rewritten(value, base):
        raise SavedTensorModified(
            f"asked to recompute a saved tensor, found that its input [{base.type()} {list(base.shape)}] has been written into since the forward pass without "
            "PyTorch, by numpy or another process whose memory it is; give the model a clone of it, or run backward before the write"
        )
    return base


def modified(tensor: Tensor, version: int) -> SavedTensorModified:
    """Eager's error for a tensor that backward needs and that was overwritten."""
    return SavedTensorModified(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead. "
        "Plain PyTorch raises here too, where autograd itself saved it, and not where only recomputation reads it; write into a clone, or run backward "
        "before the write"
    )


def clone_storage(base: Tensor) -> Tensor:
    """A flat byte tensor on a private copy of the whole storage."""
    source = torch.empty(0, dtype=torch.uint8, device=base.device).set_(base.untyped_storage())
    return source.clone()


def _count_made(tensor: Tensor, meter: Meter, count: ReplayCount) -> None:
    record = meter.record_created(tensor)
    if record is not None:
        count.nbytes += record.nbytes


def _call(op: RecordedOp, tensors: list[Tensor]) -> Any:
    args = fill_slots(op.args, tensors)
    kwargs = {key: fill_slots(value, tensors) for key, value in op.kwargs.items()}
    try:
        with nullcontext() if op.random is None else op.random.rewound():
            torch._C._set_grad_enabled(op.has_grad_mode)
            return op.func(*args, **kwargs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ReplayError(
            f"asked to recompute {op.func}, which ran in the forward pass, it failed with {type(error).__name__}: {error}"
        ) from error
    finally:
        torch._C._set_grad_enabled(False)


def fill_slots(item: Any, tensors: list[Tensor]) -> Any:
    """Puts tensors back where ``Slot``s stand."""
    if isinstance(item, Slot):
        return tensors[item.index]
    if isinstance(item, (tuple, list)) and not hasattr(item, "_fields"):
        return type(item)(fill_slots(i, tensors) for i in item)
    return item


def take_slots(item: Any, tensors: list[Tensor]) -> Any:
    """Replaces tensors by ``Slot``s and collects them; the inverse of ``fill_slots``."""
    if isinstance(item, Tensor):
        tensors.append(item)
        return Slot(len(tensors) - 1)
    if isinstance(item, (tuple, list)) and not hasattr(item, "_fields"):
        return type(item)(take_slots(i, tensors) for i in item)
    return item
