"""A device that is none: CPU tensors stand for its memory, and copies run when it would hurt most.

What the NOTE of ``punar.torch.streams`` asks of a tier is checked here, and whatever is against it lands in ``violations``:
a copy that began without waiting for the compute stream's latest work; memory freed or handed on while a copy still reads or
writes it; a wait for an event that was never recorded behind a copy. Copies that are late leave poison where their bytes should be.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from punar.errors import HostMemoryFull
from punar.torch.streams import unseen

Mode = Literal["late", "early", "random"]
MODES: tuple[Mode, ...] = ("late", "early", "random")

POISON = 0xFF
"""NaN as any float."""


class FakeEvent:
    """``place``: how many copies come before it on the copy stream; for the compute stream's events ``clock`` says when they were recorded."""

    def __init__(self, streams: FakeStreams, place: int, clock: int) -> None:
        self.streams, self.place, self.clock = streams, place, clock

    def query(self) -> bool:
        self.streams.chance()
        return self.streams.done >= self.place

    def synchronize(self) -> None:
        self.streams.host_waits += 1
        self.streams.run_until(self.place)


class Watch:
    """Lives on a storage and tells when it is freed."""

    def __init__(self) -> None:
        self.copies: list[FakeCopy] = []

    def __del__(self) -> None:
        for copy in self.copies:
            copy.on_freed()


class FakeCopy:
    """One copy that is queued: it knows addresses alone, and keeps nothing alive."""

    def __init__(self, streams: FakeStreams, source: Tensor, target: Tensor) -> None:
        self.streams = weakref.ref(streams)
        self.source, self.target, self.nbytes = source.data_ptr(), target.data_ptr(), source.numel()
        self.is_pending, self.is_valid = True, True
        assert source.dtype == target.dtype == torch.uint8
        assert source.numel() == target.numel()
        for tensor in (source, target):
            watch_of(tensor).copies.append(self)

    def on_freed(self) -> None:
        streams = self.streams()
        if self.is_pending and self.is_valid and streams is not None:
            self.is_valid = False
            streams.violations.append("memory was freed before a copy of it was known to be done")

    def run(self) -> None:
        self.is_pending = False
        if self.is_valid:
            ctypes.memmove(self.target, self.source, self.nbytes)


def watch_of(tensor: Tensor) -> Watch:
    storage = tensor.untyped_storage()
    watch = getattr(storage, "_fake_watch", None)
    if watch is None:
        watch = storage._fake_watch = Watch()  # type: ignore[attr-defined]
    watch.copies = [copy for copy in watch.copies if copy.is_pending]
    return watch


class FakeStreams:
    """``Streams`` on CPU tensors.

    ``mode``: copies run as late as the events allow, as early, or at random in between. ``refuse_from``: the so manieth pinned allocation and all after
    it are refused.
    """

    def __init__(self, mode: Mode = "late", *, refuse_from: int | None = None, seed: int = 0) -> None:
        self.device = torch.device("cpu")
        self.mode, self.refuse_from = mode, refuse_from
        self.draw = random.Random(seed)
        self.violations: list[str] = []
        self.queue: deque[FakeCopy] = deque()
        self.begun = self.done = 0
        self.clock = self.known = 0  # the compute stream's time, and what the copy stream waited for of it
        self.pinned_allocations = self.pinned_total = self.host_waits = self.returns = 0
        self.copied_bytes = 0

    # -- what a tier calls -------------------------------------------------------------------------------------------------

    def pinned_bytes(self, nbytes: int) -> Tensor:
        self.pinned_allocations += 1
        if self.refuse_from is not None and self.pinned_allocations >= self.refuse_from:
            raise HostMemoryFull(f"asked for {nbytes} B of pinned memory, the fake refused it", asked_bytes=nbytes)
        self.pinned_total += nbytes
        return self.poisoned(nbytes)

    def give_back_pinned(self) -> None:
        self.returns += 1

    def device_bytes(self, nbytes: int) -> Tensor:
        self.clock += 1  # what used this memory before may still be running
        return self.poisoned(nbytes)

    def compute_event(self) -> FakeEvent:
        return FakeEvent(self, 0, self.clock)

    def copy_event(self, *, is_timed: bool = False) -> FakeEvent:
        return FakeEvent(self, self.begun, -1)

    def copy_waits(self, event: FakeEvent) -> None:
        self.known = max(self.known, event.clock)

    def compute_waits(self, event: FakeEvent) -> None:
        self.run_until(event.place)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        if self.known < self.clock:
            self.violations.append("a copy began that does not wait for what the compute stream was given before it")
        for source, target in pairs:
            self.queue.append(FakeCopy(self, source, target))
            self.begun += 1
            self.copied_bytes += source.numel()
        self.clock += 1  # until the next one anything may run
        self.chance()

    def elapsed_ns(self, start: FakeEvent, end: FakeEvent) -> int:
        return 1000 + (end.place - start.place)

    # -- what runs when ----------------------------------------------------------------------------------------------------

    def poisoned(self, nbytes: int) -> Tensor:
        with unseen():
            return torch.full((nbytes,), POISON, dtype=torch.uint8, device="cpu")

    def chance(self) -> None:
        """Copies could run now."""
        if self.mode == "early":
            self.run_until(self.begun)
        elif self.mode == "random":
            self.run_until(self.draw.randint(self.done, self.begun))

    def run_until(self, place: int) -> None:
        while self.done < place:
            self.queue.popleft().run()
            self.done += 1
