"""Copies of a CUDA device's values on a disk, through pinned memory, as SSDTrain does (Wu et al., 2024, arXiv 2408.10013).

NOTE. The life of such a copy.

1. It goes to pinned memory like that of a ``HostTier``. When it is there, and this thread next has to do with the tier, workers begin to write it to the spool.
2. When that has ended its pinned memory is free. What is asked for before comes back from pinned memory, and its place on the disk is free.
3. Else workers read it into pinned memory from when it is fetched; who needs it waits for them, and the copy to the device begins then.
4. Where pinned memory is full, whoever needs some waits for the writes at hand. What the disk does not take stays in pinned memory.

Workers touch no stream and no event, and pinned memory that they read or write is nobody else's until they have ended: what is on its way on the copy stream
they cannot be ordered behind (Rule 1 of ``punar.torch.streams`` is for copies alone).
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from punar.errors import HostMemoryFull, OffloadError
from punar.tiers import Block, Spool, Transfer
from punar.torch.host import HostCopy, HostTier, PinnedBlock
from punar.torch.offload import MoveCount
from punar.torch.streams import Event, Streams, unseen


@dataclass(slots=True)
class Write:
    """A copy on its way from pinned memory to the spool. ``event``: the last one of ``block``, where the copy died meanwhile."""

    copy: weakref.ref[StagedCopy]
    block: PinnedBlock
    transfers: list[Transfer]
    event: Event | None = None

    def is_done(self) -> bool:
        return all(transfer.is_done() for transfer in self.transfers)


class StagedTier(HostTier):
    """A spool for tensors on one CUDA device; ``capacity_bytes``: of pinned memory for what is on its way."""

    def __init__(self, spool: Spool, capacity_bytes: int, streams: Streams | None = None) -> None:
        self.spool = spool
        self.arriving: deque[weakref.ref[StagedCopy]] = deque()
        self.writes: deque[Write] = deque()
        self.abandoned: deque[tuple[list[Transfer], PinnedBlock, Event]] = deque()
        super().__init__(capacity_bytes, streams)

    def begun(self, streams: Streams, base: Tensor, count: MoveCount) -> StagedCopy:
        copy = StagedCopy(self, streams, base, self.room(base.untyped_storage().nbytes()), count)
        self.arriving.append(weakref.ref(copy))
        return copy

    def room(self, nbytes: int, *, is_idle: bool = False) -> PinnedBlock:
        """Pinned memory, waited for where it is full of what is being written; ``is_idle``: that no copy reads or writes any more.

        Raises:
            HostMemoryFull: there is none even so.
        """
        while True:
            try:
                return self.pool.take(nbytes, is_idle=is_idle)
            except HostMemoryFull:
                if not self.free_some():
                    raise

    def free_some(self) -> bool:
        """Waits for the oldest copy to have gone to the disk; False where none is on its way there."""
        if self.writes:
            for transfer in self.writes[0].transfers:
                transfer.wait_for_end()
        elif self.arriving:
            copy = self.arriving[0]()
            if copy is not None:
                copy.event.synchronize()
        else:
            return False
        self.bury()
        return True

    def bury(self) -> None:
        """Sends on what has arrived in pinned memory, and lets go of memory that nobody needs (Rules 1 and 2)."""
        super().bury()
        while self.arriving and self.send_on(self.arriving[0]()):
            self.arriving.popleft()
        while self.writes and self.writes[0].is_done():
            self.finish(self.writes.popleft())
        while self.abandoned and all(transfer.is_done() for transfer in self.abandoned[0][0]):
            self.pool.give(*self.abandoned.popleft()[1:])

    def send_on(self, copy: StagedCopy | None) -> bool:
        """Has workers write what is in pinned memory; False where it is not there yet."""
        if copy is None or copy.is_returning:
            return True
        if not copy.event.query():
            return False
        assert copy.block is not None
        try:
            transfers = [self.spool.write(part.numpy()) for part in copy.block.parts()]
        except OffloadError as error:
            self.tell(error)  # the spool is closed: it stays where it is
            return True
        copy.write = Write(weakref.ref(copy), copy.block, transfers)
        self.writes.append(copy.write)
        return True

    def finish(self, write: Write) -> None:
        """Workers have ended: the disk's copy is good where all of it was written and nobody has taken the other one."""
        blocks, copy = self.written(write.transfers), write.copy()
        if copy is not None:
            copy.write = None
        if copy is not None and blocks is not None and not copy.is_returning:
            copy.blocks, copy.block = blocks, None
            self.pool.give(write.block, copy.event)
            return
        for block in blocks or ():
            self.spool.free(block)
        if copy is None:
            assert write.event is not None
            self.pool.give(write.block, write.event)

    def written(self, transfers: list[Transfer]) -> list[Block] | None:
        """The blocks on disk; None where some could not be written."""
        blocks = []
        try:
            for transfer in transfers:
                blocks.append(transfer.wait())
        except OffloadError as error:
            self.tell(error)
            for transfer in transfers:
                self.spool.forget(transfer)
            return None
        return blocks

    def close(self) -> None:
        """Ends the workers and gives the disk's space back."""
        self.spool.close()
        super().close()


class StagedCopy(HostCopy):
    """One storage's bytes on their way to the disk, there, or on their way back.

    ``block``: their pinned memory, None while they are only in ``blocks`` on the disk; ``write``, ``reads``: what workers do with it.
    """

    tier: StagedTier

    def __init__(self, tier: StagedTier, streams: Streams, base: Tensor, block: PinnedBlock, count: MoveCount) -> None:
        self.is_returning = False
        self.write: Write | None = None
        self.blocks: list[Block] = []
        self.reads: list[Transfer] = []
        super().__init__(tier, streams, base, block, count)

    def give_back(self) -> None:
        for block in self.blocks:
            self.tier.spool.free(block)
        if self.write is not None:
            self.write.event = self.event
        elif self.block is not None and self.reads:
            self.tier.abandoned.append((self.reads, self.block, self.event))
        else:
            super().give_back()

    def fetch(self) -> Tensor:
        """As that of a copy in pinned memory, or has workers begin to read (Rules 2 and 3)."""
        self.is_returning = True
        if self.tensor is None and self.block is None:
            assert self.is_there
            self.tensor = self.streams.device_bytes(self.nbytes)
            self.block = self.room_to_read()
            self.reads = [self.tier.spool.read(block, part.numpy()) for block, part in zip(self.blocks, self.block.parts(), strict=True)]
        return super().fetch()

    def room_to_read(self) -> PinnedBlock:
        """Pinned memory, or where there is none any memory of the computer, from which the copy is slower."""
        try:
            return self.tier.room(self.nbytes, is_idle=True)
        except HostMemoryFull:
            with unseen():
                sizes = [block.size for block in self.blocks]
                return PinnedBlock(self.nbytes, [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes], is_of_pool=False)

    def arrive(self) -> None:
        """Waits for what workers read, and has the compute stream wait for the copy.

        Raises:
            OffloadError: they could not be read, or are not what was sent.
        """
        if self.reads:
            start = time.perf_counter_ns()
            try:
                for transfer in self.reads:
                    transfer.wait()
            finally:
                self.count.stall_ns += time.perf_counter_ns() - start
            self.reads = []
            assert self.tensor is not None
            assert self.block is not None
            self.event = self._begun([(place, part) for part, place in self.block.beside(self.tensor)])
        super().arrive()
