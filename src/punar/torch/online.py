"""Records a step that no plan is known for, like ``Tracer``, and keeps it under a budget meanwhile.

What is recorded is the plain step: what the ``Evictor`` drops, and replays, is no part of the trace, nor are the ends that it moves.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from punar.ir import EventKind, Trace
from punar.plan import Simulation
from punar.torch.evictor import Evictable, Evictor
from punar.torch.meter import Meter, StorageRecord
from punar.torch.modules import running_root
from punar.torch.operators import PLAIN_TYPES, OperatorInfo, operator_info, tensors_in
from punar.torch.random_state import RandomState, generator_of
from punar.torch.records import Episode, RecordedOp, TensorRef, alias, foreign_checksum, is_rewritten, version_counter
from punar.torch.replay import ReplayCount, modified, take_slots
from punar.torch.tracer import GONE, TracedHandle, Tracer


class OnlineHandle(TracedHandle):
    """A saved tensor that is dropped when memory runs short: then ``tensor`` is None, ``ref`` says how it read its value, ``counter`` has its version counter.

    ``value``: what it reads, None for what is never dropped.
    """

    __slots__ = ("attributes", "counted", "counter", "ref", "value")

    def __init__(self, tensor: Tensor, episode: Episode) -> None:
        self.value: Evictable | None = None
        self.ref: TensorRef | None = None
        self.counter: Tensor | None = None
        self.counted = 0
        self.attributes: dict[str, Any] | None = None
        super().__init__(tensor, episode)

    def __del__(self) -> None:
        super().__del__()
        if self.value is not None:
            self.value.evictor.let_go(self.value)

    def is_modified(self) -> bool:
        """Whether the tensor was written into since it was saved."""
        return self.tensor._version != self.version

    def drop(self, value: Evictable) -> None:
        """Lets the storage go."""
        tensor = self.tensor
        if self.counter is None:
            self.ref, self.counter, self.counted = TensorRef(tensor, value), version_counter(tensor), tensor._version
            self.attributes = dict(tensor.__dict__) or None
        self.tensor = None  # type: ignore[assignment]

    def restore(self, base: Tensor) -> None:
        """The value is at hand again."""
        assert self.ref is not None
        self.tensor = tensor = alias(self.ref.view(base))
        self.version = tensor._version
        if self.attributes is not None:
            tensor.__dict__.update(self.attributes)

    def unpack(self) -> Tensor:
        value = self.value
        if value is not None:
            self.bring(value)
        return super().unpack()

    def bring(self, value: Evictable) -> None:
        """Has the value made again, where it is not at hand."""
        assert self.tracer is not None
        if not self.episode.has_begun_backward:
            self.tracer.look_at_sources()
            self.episode.begin_backward()
        if self.counter is not None and self.counter._version != self.counted:
            raise modified(self.counter, self.counted)
        value.used = value.evictor.clock
        if value.base is None:
            self.tracer.take_back()
            value.evictor.spare(self.tracer.lent)
            value.evictor.bring(value)


class EvictingTracer(Tracer):
    """Watches an episode, and drops saved values where it would exceed its budget.

    ``unread``: bytes of the model's parameters and buffers that no operator has read yet, by the address of their storages: they are there all the same.
    """

    def __init__(
        self,
        episode: Episode,
        meter: Meter,
        device: torch.device,
        gradients: list[StorageRecord],
        carried_bytes: int,
        *,
        budget_bytes: int,
        unread: dict[int, int],
        count: ReplayCount,
    ) -> None:
        super().__init__(episode, meter, device, gradients, carried_bytes)
        self.unread = unread
        self.evictor = Evictor(
            budget_bytes=budget_bytes,
            meter=meter,
            count=count,
            observer=self.watch,
            tainted=self.tainted,
            freed=self.freed_between,
            sums=self.sums,
        )
        self.found_bytes = 0
        self.unread_bytes = sum(unread.values())
        self.pending: dict[int, RecordedOp] = {}
        self.latest: dict[int, weakref.ref[Evictable]] = {}
        self.made_bytes: dict[str, int] = {}

    # -- operators -----------------------------------------------------------------------------------------------------

    def timed(self, number: int, row: dict[str, Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes room for the operator, as far as it is known what it makes, and remembers it if it may be replayed."""
        info, evictor = operator_info(func), self.evictor
        evictor.clock += 1
        if row["is_replayable"] and not self.episode.is_sealed:
            self.pending[number] = self.remembered(number, info, args, kwargs)
        if info.can_write:
            for record in self.records_of(info.written(args, kwargs)):
                evictor.before_write(record)
        self.end_lingering()
        evictor.spare(self.lent)
        evictor.source_bytes = self.optimizer_bytes + self.found_bytes + self.unread_bytes
        evictor.make_room(self.expected_bytes(row["signature"], args) if info.makes else 0)
        evictor.note_live(number)
        try:
            return super().timed(number, row, func, args, kwargs)
        except BaseException:
            self.pending.pop(number, None)
            raise

    def expected_bytes(self, signature: str, args: tuple[Any, ...]) -> int:
        """What an operator is going to make: what another call like this made, or as much as the largest tensor that it reads."""
        known = self.made_bytes.get(signature)
        if known is not None:
            return known
        return max((tensor.numel() * tensor.element_size() for tensor in tensors_in(args) if type(tensor) in PLAIN_TYPES), default=0)

    def remembered(self, number: int, info: OperatorInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedOp:
        """The operator as it can be run again."""
        tensors: list[Tensor] = []
        op = RecordedOp(number, info.func, 0)
        op.args = take_slots(info.replay_args(args), tensors)
        op.kwargs = {key: take_slots(value, tensors) for key, value in kwargs.items()}
        generator = generator_of(args, kwargs) if info.is_random else None
        op.random = RandomState(generator) if generator is not None else None
        op.reads = [self.read(tensor) for tensor in tensors]
        op.values = tuple({ref.value: None for ref in op.reads})
        written = info.written(args, kwargs) if info.writes else []
        op.overwrites = list(dict.fromkeys(self.read(tensor).value for tensor in written))
        self.evictor.recorded += 1
        return op

    def outputs(self, number: int, info: OperatorInfo, tensors: list[Tensor], is_backward: bool) -> list[int]:
        made = super().outputs(number, info, tensors, is_backward)
        storages = self.builder.storages
        size = sum(storages[self.builder.values[value].storage].bytes for value in made)
        self.made_bytes[self.rows[number]["signature"]] = size
        op = self.pending.get(number)
        if op is not None:
            op.peak_bytes = size
            fresh = set(made)
            for place, tensor in enumerate(tensors):
                record = self.meter.record_of(tensor)
                if record is not None and record.state is None and self.current[record.number] in fresh:
                    self.enter(op, place, record)
        return made

    def overwritten(self, number: int, info: OperatorInfo, written: list[Tensor]) -> list[int]:
        made = super().overwritten(number, info, written)
        op = self.pending.pop(number, None)
        if op is not None and not self.rows[number]["is_replayable"]:
            self.tainted.add(number)
        elif op is not None and info.writes:
            for place, record in enumerate(self.records_of(written)):
                self.enter(op, -1 - place, record)
        return made

    def records_of(self, tensors: list[Tensor]) -> list[StorageRecord]:
        """The storages that these tensors are on, each once."""
        records = [self.meter.record_of(tensor) for tensor in tensors if type(tensor) in PLAIN_TYPES]
        return list(dict.fromkeys(record for record in records if record is not None))

    # -- values ----------------------------------------------------------------------------------------------------------

    def enter(self, op: RecordedOp, place: int, record: StorageRecord) -> None:
        """An operator that can be run again has made what is on a storage."""
        value = Evictable(self.evictor, record, op, self.rows[op.number]["time_ns"])
        op.makes.append((weakref.ref(value), place))
        self.know(value, record)

    def know(self, value: Evictable, record: StorageRecord) -> None:
        self.latest[record.number] = weakref.ref(value)
        record.state = weakref.ref(value)
        self.episode.values.append(value)

    def read(self, tensor: Tensor) -> TensorRef:
        """What an operator reads: the value last made on this storage, or what was there."""
        record = self.meter.record_of(tensor)
        assert record is not None
        value = self.known(record)
        if value is None or is_rewritten(value, tensor):
            value = Evictable(self.evictor, record, None)
            value.checksum = foreign_checksum(tensor)
            value.is_source = self.builder.storages[record.number].is_source
            whole = tensor if tensor._base is None else tensor._base
            value.source, value.storage = weakref.ref(whole), weakref.ref(tensor.untyped_storage())
            value.versions = (whole._version,)
            self.know(value, record)
        value.used = self.evictor.clock
        return TensorRef(tensor, value)

    def known(self, record: StorageRecord) -> Evictable | None:
        """The value that is on a storage now, where this tape knows it."""
        value = record.state() if record.state is not None else None
        if not isinstance(value, Evictable) or value.evictor is not self.evictor or value.writes != record.writes:
            return None
        return value

    def taint(self, storage: int) -> None:
        super().taint(storage)
        value = self.latest[storage]() if storage in self.latest else None
        if value is not None:
            value.writes = -1  # what is on the storage is no more this value

    def adopt(self, record: StorageRecord, tensor: Tensor, *, is_source: bool) -> int:
        is_new = record.observer is not self.watch
        number = super().adopt(record, tensor, is_source=is_source)
        if is_new and number in self.found:
            self.found_bytes += record.nbytes
            self.unread_bytes -= self.unread.pop(tensor.untyped_storage()._cdata, 0)
        return number

    def end_lingering(self) -> None:
        """Writes down where storages would have been freed that only lineages hold: at their users' death, or before this operator."""
        for number in self.evictor.ended():
            place = next((place for place in range(len(self.raw), 0, -1) if self.raw[place - 1] == (EventKind.FREE, number)), len(self.raw))
            self.raw.insert(place, (GONE, number))

    # -- saved tensors -----------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> TracedHandle:
        number = self.value_of(tensor)
        if number < 0 or self.episode.is_sealed:
            handle = TracedHandle(tensor, self.episode)
            self.watch_handle(handle, number)
            return handle
        handle = OnlineHandle(tensor, self.episode)
        self.watch_handle(handle, number)
        value = self.read(tensor).value
        assert isinstance(value, Evictable)
        self.evictor.attach(value, handle)
        return handle

    # -- the end -----------------------------------------------------------------------------------------------------------

    @property
    def budget_bytes(self) -> int:
        return self.evictor.budget_bytes

    @property
    def is_exhausted(self) -> bool:
        return self.evictor.is_short

    def peak_bytes(self, trace: Trace, plain: Simulation) -> int:
        if not self.evictor.count.evicted_bytes:
            return super().peak_bytes(trace, plain)
        live_bytes = max(live + trace.ops[number].peak_bytes for number, live in self.evictor.live_at.items())
        return self.meter.used(live_bytes, self.source_bytes() + self.optimizer_bytes)


def unread_bytes(tensors: tuple[Any, ...]) -> dict[int, int]:
    """Bytes of the running model's parameters and buffers, on the devices of these tensors, by the address of their storages."""
    root = running_root()
    if root is None:
        return {}
    found: dict[int, int] = {}
    devices = {tensor.device for tensor in tensors_in(tensors)}
    for tensor in (*root.parameters(), *root.buffers()):
        if type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and tensor.device in devices:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found
