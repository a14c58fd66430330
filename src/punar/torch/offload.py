"""Copies of values on a tier off the device.

The order of a copy's life is that of the NOTE in ``punar.plan.moves``; the two are tested to agree byte for byte.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from bisect import insort
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from punar.errors import OffloadError
from punar.plan.moves import Channel
from punar.tiers import Block, Spool, Transfer, measure
from punar.torch.meter import Meter
from punar.torch.records import Value

if TYPE_CHECKING:
    from punar.torch.codecs import CodedCopy

UNLIMITED = 1 << 50
"""Stands for a capacity that nobody named."""


class MoveCount:
    """What moves did in one step. Units: bytes copied, each way counted; nanoseconds of waiting; ``kept``: moves that could not be made.

    ``coded_bytes``: of values that were encoded; ``coding_ns``: what that and decoding took.
    """

    __slots__ = ("coded_bytes", "coding_ns", "kept", "nbytes", "stall_ns")

    def __init__(self) -> None:
        self.nbytes = self.stall_ns = self.kept = self.coded_bytes = self.coding_ns = 0

    @property
    def lost_ns(self) -> int:
        """How long the computation was kept by moves."""
        return self.stall_ns + self.coding_ns


class Coming:
    """The values of an episode that are off the device, in the order in which they come back."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.values: list[tuple[tuple[int, int], weakref.ref[Value]]] = []

    def add(self, value: Value, fetch: int) -> None:
        insort(
            self.values, ((-fetch, -value.rank), weakref.ref(value)), key=itemgetter(0)
        )  # the first to come back is the last in the list

    def fetch_due(self, clock: int) -> None:
        """Begins to bring back what is due (Rule 2)."""
        while self.values and -self.values[-1][0][0] <= clock:
            value = self.values.pop()[1]()
            if value is not None and value.base is None and value.copy is not None:
                self.meter.record_created(value.copy.fetch())


def land(value: Value) -> None:
    """The copy of a value must be off the device now: lets the device's go, or where there is no copy keeps it (Rule 1)."""
    if value.copy is None or value.base is None:
        return
    if value.base._version in value.versions and value.copy.land():
        value.base = None
    else:
        value.copy = None


def bring(value: Value, copy: DiskCopy | CodedCopy, meter: Meter) -> Tensor:
    """A moved value is needed now (Rule 3): returns a tensor on its storage, and holds it.

    Raises:
        OffloadError: it could not be read back.
    """
    base = copy.fetch()
    meter.record_created(base)
    copy.arrive()
    value.hold(base)
    value.copy = None
    return base


class Offload:
    """Where a session's values may move. ``channels``: how fast each of the tiers is."""

    def __init__(self, tiers: list[DiskTier], channels: tuple[Channel, ...]) -> None:
        self.tiers = tiers
        self.channels = channels

    @property
    def has_failed(self) -> bool:
        """Whether something that was to be moved had to be kept."""
        return any(tier.is_told for tier in self.tiers)

    def close(self) -> None:
        """Ends the workers and gives the disk's space back."""
        for tier in self.tiers:
            tier.spool.close()


def opened(disk: tuple[str, int | None] | None) -> Offload | None:
    """Opens the disk (folder, most bytes) that was asked for, and measures it.

    Raises:
        OffloadError: the folder cannot be used.
    """
    if disk is None:
        return None
    folder, most_bytes = disk
    spool = Spool(folder, most_bytes)
    speed = measure(spool)
    channel = Channel(
        name=f"disk:{folder}",
        capacity_bytes=UNLIMITED if most_bytes is None else most_bytes,
        write_bytes_per_s=speed.write_bytes_per_s,
        read_bytes_per_s=speed.read_bytes_per_s,
        latency_ns=speed.latency_ns,
        busy_percent=speed.busy_percent if torch.get_num_threads() >= _cores() else 0,
    )
    return Offload([DiskTier(spool)], (channel,))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class DiskTier:
    """A spool file for tensors in the computer's memory."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.retired: deque[tuple[Transfer, Tensor]] = deque()
        self.is_told = False

    def send(self, base: Tensor, count: MoveCount) -> DiskCopy | None:
        """Begins to copy a tensor's whole storage; None where that cannot be."""
        self.bury()
        try:
            return DiskCopy(self, base, count)
        except OffloadError as error:
            self.tell(error)
            count.kept += 1
            return None

    def tell(self, error: OffloadError) -> None:
        """Says once that values stay on the device."""
        if not self.is_told:
            self.is_told = True
            warnings.warn(
                f"{error}. What cannot be offloaded is kept in memory: gradients are right, the budget may be exceeded", stacklevel=2
            )

    def bury(self) -> None:
        """Lets go of tensors that nobody needs and whose transfers have ended: here, since meters are not for the workers' threads."""
        while self.retired and self.retired[0][0].is_done():
            self.retired.popleft()


class DiskCopy:
    """One storage's bytes on their way to the spool, there, or on their way back. ``tensor``: what the transfer at hand reads or writes."""

    takes_one_save = is_saved = False

    def __init__(self, tier: DiskTier, base: Tensor, count: MoveCount) -> None:
        self.tier, self.count = tier, count
        self.block: Block | None = None
        self.transfer: Transfer | None = None
        self.tensor: Tensor | None = base
        self.nbytes = base.untyped_storage().nbytes()
        self.transfer = tier.spool.write(_bytes_of(base))

    def __del__(self) -> None:
        if self.transfer is not None and self.tensor is not None:
            self.tier.retired.append((self.transfer, self.tensor))
        if self.block is not None:
            self.tier.spool.free(self.block)
        elif self.transfer is not None:
            self.tier.spool.forget(self.transfer)

    def land(self) -> bool:
        """Waits until they are there; False where that failed, so that the device's must be kept."""
        if self.transfer is not None:
            try:
                self.block = self._waited()
            except OffloadError as error:
                self.tier.tell(error)
                self.count.kept += 1
            else:
                self.count.nbytes += self.nbytes
        return self.block is not None

    def fetch(self) -> Tensor:
        """Begins to bring them back, if that has not begun: returns the flat tensor of bytes that they go to."""
        assert self.block is not None
        if self.tensor is None:
            with torch._C._DisableTorchDispatch():
                self.tensor = torch.empty(self.nbytes, dtype=torch.uint8)
            self.transfer = self.tier.spool.read(self.block, _bytes_of(self.tensor))
        return self.tensor

    def arrive(self) -> None:
        """Waits until they are back.

        Raises:
            OffloadError: they could not be read, or are not what was sent.
        """
        if self.transfer is not None:
            self._waited()
            self.count.nbytes += self.nbytes

    def _waited(self) -> Block:
        assert self.transfer is not None
        transfer, start = self.transfer, time.perf_counter_ns()
        try:
            return transfer.wait()
        finally:
            self.transfer = self.tensor = None
            self.count.stall_ns += time.perf_counter_ns() - start


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A whole storage as an array that shares its memory."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        array: np.ndarray[Any, Any] = flat.numpy()
    return array
