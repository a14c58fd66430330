"""The device as the ``cpu`` tier sees it: a stream that computes, one that copies, and memory on both sides.

NOTE. What a user of these must keep to; the tests' fake reports whoever does not.

1. The copy stream runs its copies one at a time, in the order in which they were begun, and knows of the compute stream only what
   it was made to wait for: before a copy it waits for an event of the compute stream that comes after whatever made or freed the memory at either end.
2. Whoever begins a copy keeps both ends alive until the compute stream has been made to wait for an event of the copy stream that
   comes after it (the caching allocator hands memory on in the compute stream's order), or until that event is done.
3. What is copied back is read only after the compute stream was made to wait so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from punar.errors import HostMemoryFull
from punar.units import format_bytes


class Event(Protocol):
    """A point in a stream's order."""

    def query(self) -> bool:
        """Whether all that came before it is done."""
        ...

    def synchronize(self) -> None:
        """Has the host wait for that."""
        ...


class Streams(Protocol):
    """What a tier needs of a device. All tensors are flat ones of bytes; no call but an event's ``synchronize`` waits for the device."""

    device: torch.device

    def pinned_bytes(self, nbytes: int) -> Tensor:
        """Host memory that the device copies from and to by itself; may raise ``HostMemoryFull``."""
        ...

    def give_back_pinned(self) -> None:
        """Pinned memory that is free goes back to the system."""
        ...

    def device_bytes(self, nbytes: int) -> Tensor:
        """Device memory, in the compute stream's order."""
        ...

    def compute_event(self) -> Event:
        """Records an event on the compute stream."""
        ...

    def copy_event(self, *, is_timed: bool = False) -> Event:
        """Records an event on the copy stream."""
        ...

    def copy_waits(self, event: Event) -> None:
        """What the copy stream is given from now on runs after the event."""
        ...

    def compute_waits(self, event: Event) -> None:
        """What the compute stream is given from now on runs after the event."""
        ...

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Begins to copy each source to its target, on the copy stream."""
        ...

    def elapsed_ns(self, start: Event, end: Event) -> int:
        """The time between two timed events that are done."""
        ...


class CudaStreams:
    """``Streams`` on one CUDA device. The compute stream is the one that is current where a call is made: autograd's threads set that of the forward operator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def pinned_bytes(self, nbytes: int) -> Tensor:
        """Pinned host memory.

        Raises:
            HostMemoryFull: the system refuses it.
        """
        try:
            with unseen():
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise HostMemoryFull(
                f"asked for {format_bytes(nbytes)} of pinned memory to offload to, the system refused it: {str(error).splitlines()[0]}; "
                'free some, or allow less of it ("cpu:8 GiB")',
                asked_bytes=nbytes,
            ) from error

    def give_back_pinned(self) -> None:
        give_back = getattr(torch._C, "_host_emptyCache", None) or getattr(torch._C, "_accelerator_emptyHostCache", None)
        if give_back is not None:
            give_back()

    def device_bytes(self, nbytes: int) -> Tensor:
        with unseen():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def compute_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def copy_event(self, *, is_timed: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=is_timed)
        event.record(self.stream)
        return event

    def copy_waits(self, event: Any) -> None:
        self.stream.wait_event(event)

    def compute_waits(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(self.stream), unseen():
            for source, target in pairs:
                target.copy_(source, non_blocking=True)

    def elapsed_ns(self, start: Any, end: Any) -> int:
        return int(start.elapsed_time(end) * 1e6)


def bytes_of(tensor: Tensor) -> Tensor:
    """A whole storage as a flat tensor of bytes that shares its memory."""
    with unseen():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@contextmanager
def unseen() -> Iterator[None]:
    """What runs within is recorded by no mode and no graph."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
