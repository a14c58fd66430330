"""Live bytes of a step.

On CPU no allocator keeps statistics, so that storages are counted: a record is put on each storage that an operator makes,
and is destroyed with it. What a kernel allocates and frees inside one operator is measured once, by the profiler's memory events,
and lies in the trace (see ``scratch``). On CUDA the caching allocator's own statistics are read.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from punar.errors import OutOfMemory
from punar.torch.operators import outputs_in
from punar.units import format_apart

if TYPE_CHECKING:
    from punar.torch.records import Value


class StorageObserver(Protocol):
    """Told when a storage that it knows by number is freed."""

    def on_storage_freed(self, number: int) -> None: ...


class StorageRecord:
    """What punar knows of one storage; lives on the storage and dies with it.

    ``state``: the value that the tape last saw written there. ``writes``: how often an operator overwrote it.
    ``dropped``: dropped saves that read it.
    ``observer``/``number``: the tracer's name for it.
    """

    __slots__ = ("__weakref__", "dropped", "is_created", "meter", "nbytes", "number", "observer", "state", "writes")

    def __init__(self, meter: Meter, nbytes: int, is_created: bool) -> None:
        self.meter = meter
        self.nbytes = nbytes
        self.is_created = is_created
        self.writes = 0
        self.state: weakref.ref[Value] | None = None
        self.dropped: list[weakref.ref[Any]] = []
        self.observer: StorageObserver | None = None
        self.number = -1

    def __del__(self) -> None:
        if self.is_created:
            self.meter.live -= self.nbytes
        else:
            self.meter.resident -= self.nbytes
        if self.observer is not None:
            self.observer.on_storage_freed(self.number)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (type(None), ())  # a storage that is pickled or copied takes no record along

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


class LiveBytes:
    """All that is known of most storages: their size, taken off the meter with them. Becomes a ``StorageRecord`` where more is asked."""

    __slots__ = ("meter", "nbytes")

    def __init__(self, meter: Meter, nbytes: int) -> None:
        self.meter = meter
        self.nbytes = nbytes

    def __del__(self) -> None:
        self.meter.live -= self.nbytes

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (type(None), ())

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


class Meter:
    """Counts live bytes: ``live`` of what operators made, ``resident`` of what was there before, ``peak`` the most of ``live``."""

    is_synchronous = True
    """Whether an operator has run when its call returns."""

    def __init__(self) -> None:
        self.live = self.resident = self.peak = 0
        self.limit_bytes: int | None = None
        self.source_bytes: int | None = None

    def start(self) -> None:
        """Begins a step: the peak is taken anew."""
        self.peak = self.live

    def limit(self, limit_bytes: int | None, source_bytes: int | None) -> None:
        """From now on the whole step has a limit. ``source_bytes``: what it reads and no operator made; None: what has been seen of that (``resident``)."""
        self.limit_bytes, self.source_bytes = limit_bytes, source_bytes

    def check(self) -> None:
        """Looks whether the step is within its limit.

        Raises:
            OutOfMemory: it is not. Once: what the user does about it may run operators in the block as well.
        """
        limit_bytes = self.limit_bytes
        if limit_bytes is None:
            return
        needed_bytes = self.peak + (self.resident if self.source_bytes is None else self.source_bytes)
        if needed_bytes > limit_bytes:
            self.limit_bytes = None
            limit, needed = format_apart(limit_bytes, needed_bytes)
            raise OutOfMemory(
                f"asked for a step within a limit of {limit}, found {needed} alive in it, "
                f"{needed_bytes - limit_bytes} B more; give a tighter budget, raise the limit, or leave it to `remat.step` to repeat the step under "
                "tighter plans as long as there are some",
                limit_bytes=limit_bytes,
                needed_bytes=needed_bytes,
            )

    def record_created(self, tensor: Tensor) -> StorageRecord | None:
        """Puts a record on the storage that an operator just made; None for tensors without one."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return None
        record = getattr(storage, "_punar", None)
        if record is not None:
            return None
        nbytes = storage.nbytes()
        storage._punar = record = StorageRecord(self, nbytes, True)  # type: ignore[attr-defined]
        self.live += nbytes
        if self.live > self.peak:
            self.peak = self.live
        return record

    def count(self, out: Any, peak_bytes: int) -> None:
        """Counts what an operator returned, and ``peak_bytes`` that it had allocated for a moment, these included."""
        high = self.live + peak_bytes
        if high > self.peak:
            self.peak = high
        if type(out) is Tensor:
            try:
                storage = out.untyped_storage()
            except NotImplementedError:
                return
            nbytes = storage.nbytes()
            storage._punar = LiveBytes(self, nbytes)  # type: ignore[attr-defined]
            self.live = live = self.live + nbytes
            if live > self.peak:
                self.peak = live
        else:
            for tensor in outputs_in(out):
                self.record_created(tensor)

    def record_of(self, tensor: Tensor) -> StorageRecord | None:
        """The record of a tensor's storage, made now where there is none: it was there before; None for tensors without storage."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return None
        record: StorageRecord | LiveBytes | None = getattr(storage, "_punar", None)
        if type(record) is LiveBytes:
            record.meter.live += record.nbytes
            storage._punar = record = StorageRecord(record.meter, record.nbytes, True)  # type: ignore[attr-defined]
        elif record is None:
            nbytes = storage.nbytes()
            storage._punar = record = StorageRecord(self, nbytes, False)  # type: ignore[attr-defined]
            self.resident += nbytes
        assert isinstance(record, StorageRecord)
        if record.meter is not self:
            self.take_over(record)
        return record

    def knows(self, tensor: Tensor) -> bool:
        """Whether this meter has counted the tensor's storage."""
        try:
            record = getattr(tensor.untyped_storage(), "_punar", None)
        except NotImplementedError:
            return False
        return record is not None and record.meter is self

    def take_over(self, record: StorageRecord) -> None:
        """A storage that another step's meter counted is resident in this one."""
        if record.is_created:
            record.meter.live -= record.nbytes
        else:
            record.meter.resident -= record.nbytes
        record.meter, record.is_created = self, False
        self.resident += record.nbytes

    def charge(self, extra: int) -> None:
        """Notes that ``extra`` bytes above the live ones were allocated for a moment."""
        if self.live + extra > self.peak:
            self.peak = self.live + extra

    def allocator_peak(self) -> int | None:
        """The peak as the device's own statistics have it, without any operator being seen; None where there are none."""
        return None

    def now_ns(self) -> int:
        """The time at which all that was asked of the device is done."""
        return time.perf_counter_ns()

    def peak_with(self, source_bytes: int) -> int:
        """The most bytes of the step, beside ``source_bytes`` of what it read and no operator made."""
        return source_bytes + self.peak

    def resident_with(self, live_before: int, source_bytes: int) -> int:
        """Bytes that were there before a step which began beside ``live_before`` bytes of what operators had made."""
        return source_bytes + live_before

    def used(self, live_bytes: int, source_bytes: int) -> int:
        """Bytes of the whole step when so many were live, beside ``source_bytes`` of what it reads and no operator made."""
        return source_bytes + live_bytes


class CudaMeter(Meter):
    """Reads the caching allocator's statistics; storages are still known by their records, but not counted."""

    is_synchronous = False

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.before = self.live_before = 0

    def start(self) -> None:
        super().start()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.before, self.live_before = torch.cuda.memory_allocated(self.device), self.live

    def resident_with(self, live_before: int, source_bytes: int) -> int:
        return self.before

    def used(self, live_bytes: int, source_bytes: int) -> int:
        return self.before + live_bytes - self.live_before

    def count(self, out: Any, peak_bytes: int) -> None:
        return None

    def allocator_peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def now_ns(self) -> int:
        torch.cuda.synchronize(self.device)
        return time.perf_counter_ns()

    def peak_with(self, source_bytes: int) -> int:
        return self.allocator_peak()


def meter_for(device: torch.device) -> Meter:
    """The meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else Meter()


def device_of(tensors: list[Tensor]) -> torch.device:
    """The device that a step runs on: the first accelerator among the tensors, else the CPU."""
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return torch.device("cpu")
