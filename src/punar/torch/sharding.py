"""A step whose optimizer state, gradients and parameters are spread over several devices, as one of the devices sees it.

NOTE. What a device has of a model that is spread as torch's FSDP2 does it, with ``fully_shard`` on each block and on the model.

1. A *unit* is a block, or all that is in no block. Blocks are the outermost elements of the model's lists of modules.
2. Of parameters it has its share, and whole those of two blocks, the one that computes and the one that is fetched beside it, and of what is in no block.
3. A unit's gradients are whole from when each is made until the last one is. Then they are copied into a buffer, of which each device keeps its
   share of the sum; the buffer lives until the next unit's.
4. Of the optimizer's state it has its share. Of activations it has all those of its own batch.

Source:
    Rajbhandari, Rasley, Ruwase and He, 2020, ZeRO: memory optimizations toward training trillion parameter models, arXiv:1910.02054.
    Zhao et al., 2023, PyTorch FSDP: experiences on scaling fully sharded data parallel, arXiv:2304.11277, and torch's ``torch.distributed.fsdp.fully_shard``.
    Deviations: parameters' whole bytes are taken as there all the time, and communication as if it took no time but that of the copies.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from punar.ir import Event, EventKind, Op, Storage, Trace, Value
from punar.torch.fake import FakeStep

STAGES = (1, 2, 3)
"""ZeRO's: what is spread is the optimizer's state, then gradients too, then parameters too."""

_GATHERED_BLOCKS = 2

Unit = list[nn.Parameter]


def sharded(step: FakeStep, model: nn.Module, shards: int, stage: int, *, is_accumulating: bool = False) -> Trace:
    """The trace of one of ``shards`` devices, of a step that was traced without gradients; the optimizer's state in it is a share already.

    ``is_accumulating``: whether all gradients that the step makes are there before it too; else those that the model has now.
    """
    trace = step.trace
    blocks, rest = units_of(model)
    if stage == 3:
        whole = sum(trace.storages[number].bytes for number in set(step.parameters.values()))
        gathered = sum(map(_bytes_of, [rest, *sorted(blocks, key=_bytes_of)[-_GATHERED_BLOCKS:]]))
        trace = _with_resident(trace, "source_bytes", min(0, share(whole, shards) + gathered - whole))
    accumulated = {id(p): p.nbytes for p in model.parameters() if p.grad is not None or (is_accumulating and id(p) in step.gradients)}
    trace = _with_resident(trace, "gradient_bytes", share(sum(accumulated.values()), shards))
    units = [{step.gradients[id(p)] for p in unit if id(p) in step.gradients} for unit in (*blocks, rest)]
    return _with_reductions(trace, units, shards, {step.gradients[key] for key in accumulated if key in step.gradients})


def share(nbytes: int, shards: int) -> int:
    """What one device has of bytes that are spread."""
    return -(-nbytes // shards)


def units_of(model: nn.Module) -> tuple[list[Unit], Unit]:
    """The parameters of each block, and those in no block; each in one unit (Rule 1)."""
    seen: set[int] = set()
    blocks = [_unseen(block, seen) for block in _blocks(model)]
    return [block for block in blocks if block], _unseen(model, seen)


def _unseen(module: nn.Module, seen: set[int]) -> Unit:
    unit = [parameter for parameter in module.parameters() if id(parameter) not in seen]
    seen.update(map(id, unit))
    return unit


def _blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return list(module.children())
    return [block for child in module.children() for block in _blocks(child)]


def _bytes_of(unit: Unit) -> int:
    return sum(parameter.nbytes for parameter in unit)


def _with_resident(trace: Trace, name: str, more_bytes: int) -> Trace:
    """The trace with so many more bytes, or fewer, there for the whole step, of the kind that ``meta`` has under a name."""
    return replace(
        trace, resident_bytes=trace.resident_bytes + more_bytes, meta=trace.meta | {name: str(int(trace.meta[name]) + more_bytes)}
    )


def _with_reductions(trace: Trace, units: list[set[int]], shards: int, accumulated: set[int]) -> Trace:
    """The trace with an operator after the last one that writes a unit's gradients, which leaves a share of them (Rule 3).

    Args:
        units: numbers of gradients' storages. accumulated: those whose share is there before the step, and is added to.
    """
    writer = {value.storage: value.producer for value in trace.values}
    ended: dict[int, set[int]] = {}
    for unit in filter(None, units):
        ended.setdefault(max(writer[storage] for storage in unit), set()).update(unit)
    rewriter = _Rewriter(trace, shards, accumulated)
    waiting: set[int] = set()
    for event in trace.events:
        if event.kind == EventKind.RUN:
            rewriter.reduce(waiting)
            waiting = ended.get(event.id, set())
        rewriter.copy(event)
    rewriter.reduce(waiting)
    rewriter.free_buffer()
    return rewriter.build()


class _Rewriter:
    """Writes a trace anew, event by event, with reductions of gradients between."""

    def __init__(self, trace: Trace, shards: int, accumulated: set[int]) -> None:
        self.trace = trace
        self.shards = shards
        self.accumulated = accumulated
        self.ops: list[Op] = []
        self.number: dict[int, int] = {-1: -1}
        self.storages = list(trace.storages)
        self.made: list[Value] = []
        self.latest = {value.storage: value.id for value in trace.values}
        self.events: list[Event] = []
        self.buffer: int | None = None

    def copy(self, event: Event) -> None:
        """What the trace has."""
        if event.kind == EventKind.RUN:
            self.number[event.id] = len(self.ops)
            self.run(self.trace.ops[event.id])
        else:
            self.events.append(event)

    def run(self, op: Op) -> None:
        self.events.append(Event(EventKind.RUN, len(self.ops)))
        self.ops.append(replace(op, id=len(self.ops)))

    def reduce(self, gradients: set[int]) -> None:
        """A unit's gradients are all made."""
        if not gradients:
            return
        self.free_buffer()
        nbytes = self.bytes_of(gradients)
        kept, buffer = self.add(share(self.bytes_of(gradients - self.accumulated), self.shards)), self.add(nbytes)
        self.run(
            Op(
                id=0,
                name="punar.reduce_scatter",
                kind="collective",
                is_backward=True,
                has_grad_mode=False,
                module="backward",
                signature=f"punar.reduce_scatter(uint8[{nbytes}])",
                inputs=tuple(self.latest[storage] for storage in sorted(gradients)),
                outputs=(kept.id, buffer.id),
                time_ns=0,
                peak_bytes=self.storages[kept.storage].bytes + nbytes,
                is_replayable=False,
            )
        )
        self.events += [Event(EventKind.FREE, storage) for storage in sorted(gradients)]
        self.buffer = buffer.storage

    def bytes_of(self, storages: set[int]) -> int:
        return sum(self.trace.storages[storage].bytes for storage in storages)

    def add(self, nbytes: int) -> Value:
        """A new storage that the next operator makes."""
        self.storages.append(Storage(id=len(self.storages), bytes=nbytes, is_source=False))
        value = Value(id=len(self.trace.values) + len(self.made), storage=len(self.storages) - 1, version=0, producer=len(self.ops))
        self.made.append(value)
        return value

    def free_buffer(self) -> None:
        if self.buffer is not None:
            self.events.append(Event(EventKind.FREE, self.buffer))
            self.buffer = None

    def build(self) -> Trace:
        values = (*(replace(value, producer=self.number[value.producer]) for value in self.trace.values), *self.made)
        return replace(self.trace, ops=tuple(self.ops), values=values, storages=tuple(self.storages), events=tuple(self.events))
