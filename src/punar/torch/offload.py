"""Copies of values on a tier off the device.

The order of a copy's life is that of the NOTE in ``punar.plan.moves``; the two are tested to agree byte for byte.
"""

from __future__ import annotations

import time
import warnings
import weakref
from bisect import insort
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from punar.errors import OffloadError
from punar.plan.moves import Channel
from punar.tiers import Block, Spool, Transfer
from punar.torch.streams import bytes_of, unseen

if TYPE_CHECKING:
    from punar.torch.meter import Meter
    from punar.torch.records import Value


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


class Copy(Protocol):
    """One storage's bytes on their way to a tier, there, or on their way back; frees what it holds when it dies, whatever is under way."""

    def land(self) -> bool:
        """From when this returns the device's memory may be handed on; False where the copy failed, so that it must be kept."""
        ...

    def fetch(self) -> Tensor:
        """Begins to bring them back, if that has not begun: returns the flat tensor of bytes that they go to."""
        ...

    def arrive(self) -> None:
        """From when this returns the device may compute with what is back; raises ``OffloadError`` where it cannot be read."""
        ...


class Tier(Protocol):
    """Where copies go."""

    @property
    def is_told(self) -> bool:
        """Whether something had to be kept, and that was said."""
        ...

    def send(self, base: Tensor, count: MoveCount) -> Copy | None:
        """Begins to copy a tensor's whole storage; None where that cannot be."""
        ...

    def bury(self) -> None:
        """Lets go of memory that only copies which nobody needs still read or wrote, where they have ended."""
        ...

    def close(self) -> None:
        """Ends what is under way."""
        ...


class Telling:
    """Says once that values stay on the device. ``is_told``: that was said."""

    is_told = False

    def tell(self, error: OffloadError) -> None:
        if not self.is_told:
            self.is_told = True
            warnings.warn(
                f"{error}. What cannot be offloaded is kept in memory: gradients are right, the budget may be exceeded", stacklevel=3
            )


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


def bring(value: Value, copy: Copy, meter: Meter) -> Tensor:
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
    """Where a session's values may move. ``channels``: how fast each of the tiers is, or was for the plan that is obeyed."""

    def __init__(self, tiers: Sequence[Tier], channels: tuple[Channel, ...]) -> None:
        self.tiers = tiers
        self.channels = channels
        self.places = {channel.name: place for place, channel in enumerate(channels)}

    def send(self, channel: Channel, base: Tensor, count: MoveCount) -> Copy | None:
        """Begins to copy a tensor's whole storage to a channel's tier, or where that fails to one of the next; None where all do."""
        copies = (tier.send(base, count) for tier in self.tiers[self.places[channel.name] :])
        return next((copy for copy in copies if copy is not None), None)

    @property
    def has_failed(self) -> bool:
        """Whether something that was to be moved had to be kept."""
        return any(tier.is_told for tier in self.tiers)

    def bury(self) -> None:
        """Lets go of memory that no copy needs any more."""
        for tier in self.tiers:
            tier.bury()

    def close(self) -> None:
        """Ends what is under way and gives a disk's space back."""
        for tier in self.tiers:
            tier.close()


class DiskTier(Telling):
    """A spool file for tensors in the computer's memory."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.retired: deque[tuple[Transfer, Tensor]] = deque()

    def send(self, base: Tensor, count: MoveCount) -> DiskCopy | None:
        """Begins to copy a tensor's whole storage; None where that cannot be."""
        self.bury()
        try:
            if base.device.type != "cpu":
                raise OffloadError(
                    f'asked to offload a tensor on {base.device} to disk, where those in the computer\'s memory go; give "cpu"'
                )
            return DiskCopy(self, base, count)
        except OffloadError as error:
            self.tell(error)
            return None

    def bury(self) -> None:
        """Lets go of tensors that nobody needs and whose transfers have ended: here, since meters are not for the workers' threads."""
        while self.retired and self.retired[0][0].is_done():
            self.retired.popleft()

    def close(self) -> None:
        """Ends the workers and gives the disk's space back."""
        self.spool.close()


class DiskCopy:
    """One storage's bytes on their way to the spool, there, or on their way back. ``tensor``: what the transfer at hand reads or writes."""

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
            with unseen():
                self.tensor = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
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
    with unseen():
        array: np.ndarray[Any, Any] = bytes_of(tensor).numpy()
    return array
