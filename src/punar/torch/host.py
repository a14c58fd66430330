"""Copies of a CUDA device's values in pinned host memory.

The rules of who waits for what are those of the NOTE in ``punar.torch.streams``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from statistics import median

from torch import Tensor

from punar.errors import HostMemoryFull, OffloadError
from punar.plan.moves import Channel
from punar.torch.offload import MoveCount, Telling
from punar.torch.streams import CudaStreams, Event, Streams, bytes_of, unseen
from punar.units import format_bytes

LEAST_PIECE = 1 << 16
"""Bytes of the smallest piece of pinned memory."""

BLOCK_BYTES, REPEATS = 32 << 20, 3
"""What is copied to see how fast copies are."""


class PinnedBlock:
    """Room for ``nbytes`` in pieces of pinned memory, the last of which need not be full; with ``is_of_pool`` unset, of memory that no pool takes back."""

    __slots__ = ("is_of_pool", "nbytes", "pieces")

    def __init__(self, nbytes: int, pieces: list[Tensor], *, is_of_pool: bool = True) -> None:
        self.nbytes = nbytes
        self.pieces = pieces
        self.is_of_pool = is_of_pool

    def parts(self) -> list[Tensor]:
        """What of each piece is used."""
        left, parts = self.nbytes, []
        for piece in self.pieces:
            parts.append(piece[:left])
            left -= len(parts[-1])
        return parts

    def beside(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each part of ``flat`` with its place in the block."""
        with unseen():
            parts = flat.split_with_sizes(self._sizes())
            return [(part, piece[: part.numel()]) for part, piece in zip(parts, self.pieces, strict=True)]

    def _sizes(self) -> list[int]:
        starts = accumulate((piece.numel() for piece in self.pieces), initial=0)
        return [min(piece.numel(), self.nbytes - start) for piece, start in zip(self.pieces, starts, strict=False)]


class PinnedPool:
    """Pinned memory that is taken once and used again in each step, of at most ``capacity_bytes``.

    A block is made of pieces of powers of two: torch rounds pinned memory up to these, which would waste up to half of one large piece. What is given
    back is taken again at once, even while it is still copied from or to: whoever takes it copies on the same stream, and so later (Rule 1).
    It is let go of only when that copy is done.
    """

    def __init__(self, allocate: Callable[[int], Tensor], capacity_bytes: int, give_back: Callable[[], None]) -> None:
        self.allocate = allocate
        self.give_back = give_back
        self.capacity_bytes = capacity_bytes
        self.pinned_bytes = 0
        self._lock = threading.Lock()
        self._free: dict[int, deque[tuple[Tensor, Event]]] = {}
        self._returned: deque[tuple[Tensor, Event]] = deque()

    @property
    def used_bytes(self) -> int:
        """What blocks take now."""
        with self._lock:
            self._sort()
            return self.pinned_bytes - sum(size * len(free) for size, free in self._free.items())

    def take(self, nbytes: int, *, is_idle: bool = False) -> PinnedBlock:
        """Room for so many bytes; ``is_idle``: waits until no copy reads or writes it any more.

        Raises:
            HostMemoryFull: the pool's capacity is reached, or the system refuses more.
        """
        pieces: list[Tensor] = []
        with self._lock:
            self._sort()
            try:
                for size in pieces_of(nbytes):
                    pieces.append(self._piece(size, nbytes, is_idle=is_idle))
            except OffloadError:
                for piece in pieces:
                    self._free.setdefault(piece.numel(), deque()).append((piece, _DONE))
                raise
        return PinnedBlock(nbytes, pieces)

    def give(self, block: PinnedBlock, event: Event) -> None:
        """Takes a block back whose last copy is done with ``event``. Takes no lock: finalizers call it, in whichever thread they run."""
        if block.is_of_pool:
            self._returned.extend((piece, event) for piece in block.pieces)

    def _sort(self) -> None:
        while self._returned:
            piece, event = self._returned.popleft()
            self._free.setdefault(piece.numel(), deque()).append((piece, event))

    def _piece(self, size: int, nbytes: int, *, is_idle: bool) -> Tensor:
        free = self._free.get(size)
        if free:
            piece, event = free.popleft()
            if is_idle:
                event.synchronize()
            return piece
        if self.pinned_bytes + size > self.capacity_bytes:
            self._let_go()
        if self.pinned_bytes + size > self.capacity_bytes:
            raise HostMemoryFull(
                f"asked to offload {format_bytes(nbytes)} to pinned memory, of which {format_bytes(self.pinned_bytes)} are in use: "
                f'{format_bytes(self.capacity_bytes)} were allowed for it; allow more ("cpu:64 GiB"), or give a larger budget',
                asked_bytes=nbytes,
            )
        piece = self.allocate(size)
        self.pinned_bytes += size
        return piece

    def _let_go(self) -> None:
        """Pieces that nobody uses are of the wrong sizes now: lets go of those whose copies are done."""
        for size, free in self._free.items():
            kept = deque((piece, event) for piece, event in free if not event.query())
            self.pinned_bytes -= size * (len(free) - len(kept))
            self._free[size] = kept
        self.give_back()


def pieces_of(nbytes: int) -> list[int]:
    """The powers of two, largest first, whose sum is the least that holds so many bytes and wastes at most an eighth of them, or less than ``LEAST_PIECE``."""
    step = max(LEAST_PIECE, 1 << max(0, nbytes.bit_length() - 4))
    rounded = -(-max(nbytes, 1) // step) * step
    return [1 << bit for bit in reversed(range(rounded.bit_length())) if rounded >> bit & 1]


class _Done:
    """Stands for the event of a piece that was never copied to."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


_DONE = _Done()


class HostTier(Telling):
    """Pinned host memory for tensors on one CUDA device: that of ``streams``, else that of the first tensor."""

    def __init__(self, capacity_bytes: int, streams: Streams | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.retired: deque[tuple[Event, Tensor]] = deque()
        self.streams: Streams | None = None
        if streams is not None:
            self.bind(streams)

    def bind(self, streams: Streams) -> None:
        """The device is known."""
        self.streams = streams
        self.pool = PinnedPool(streams.pinned_bytes, self.capacity_bytes, streams.give_back_pinned)

    def __del__(self) -> None:
        self.close()

    def send(self, base: Tensor, count: MoveCount) -> HostCopy | None:
        """Begins to copy a tensor's whole storage; None where that cannot be."""
        self.bury()
        try:
            return self.begun(self._streams_of(base), base, count)
        except OffloadError as error:
            self.tell(error)
            return None

    def begun(self, streams: Streams, base: Tensor, count: MoveCount) -> HostCopy:
        """A copy that has begun.

        Raises:
            OffloadError: there is no room for it.
        """
        return HostCopy(self, streams, base, self.pool.take(base.untyped_storage().nbytes()), count)

    def _streams_of(self, base: Tensor) -> Streams:
        if self.streams is None and base.device.type == "cuda":
            self.bind(CudaStreams(base.device))
        if self.streams is None or base.device != self.streams.device:
            known = "CUDA devices" if self.streams is None else str(self.streams.device)
            raise OffloadError(f'asked to offload a tensor on {base.device}, "cpu" is where tensors on {known} go; train on one device')
        return self.streams

    def bury(self) -> None:
        """Lets go of device memory that nobody needs and whose copies are done."""
        while self.retired and self.retired[0][0].query():
            self.retired.popleft()

    def close(self) -> None:
        """Waits for copies that nobody waited for; pinned memory goes with its last user."""
        while self.retired:
            event, tensor = self.retired.popleft()
            event.synchronize()
            del tensor  # not before


class HostCopy:
    """One storage's bytes on their way to pinned memory, there, or on their way back.

    ``event``: of the copy stream, after the copy at hand; ``tensor``: what that reads or writes on the device, until the compute stream waits for it.
    """

    def __init__(self, tier: HostTier, streams: Streams, base: Tensor, block: PinnedBlock, count: MoveCount) -> None:
        self.tier, self.streams, self.count = tier, streams, count
        self.block: PinnedBlock | None = block
        self.nbytes = block.nbytes
        self.is_there = False
        self.tensor: Tensor | None = bytes_of(base)
        self.event = self._begun(block.beside(self.tensor))

    def __del__(self) -> None:
        if not hasattr(self, "event"):
            return  # the copy could not even begin
        if self.tensor is not None:
            self.tier.retired.append((self.event, self.tensor))
        self.give_back()

    def give_back(self) -> None:
        """Nobody needs the copy any more."""
        if self.block is not None:
            self.tier.pool.give(self.block, self.event)

    def land(self) -> bool:
        """The compute stream waits until they are there, so that the device's memory can be handed on in its order."""
        if not self.is_there:
            self._waited()
            self.is_there = True
        return True

    def fetch(self) -> Tensor:
        """Begins to bring them back, if that has not begun: returns the flat tensor of bytes that they go to.

        Raises:
            torch.OutOfMemoryError: the device has no room for them.
        """
        assert self.is_there
        if self.tensor is None:
            assert self.block is not None
            self.tensor = self.streams.device_bytes(self.nbytes)
            self.event = self._begun([(place, part) for part, place in self.block.beside(self.tensor)])
        return self.tensor

    def arrive(self) -> None:
        """The compute stream waits until they are back."""
        if self.tensor is not None:
            self._waited()

    def _begun(self, pairs: list[tuple[Tensor, Tensor]]) -> Event:
        """Begins a copy after all that the compute stream was given so far (Rule 1): what made the source, what used the target's memory before."""
        self.streams.copy_waits(self.streams.compute_event())
        self.streams.copy(pairs)
        return self.streams.copy_event()

    def _waited(self) -> None:
        self.streams.compute_waits(self.event)
        self.tensor = None
        self.count.nbytes += self.nbytes


def measured(streams: Streams, capacity_bytes: int, block_bytes: int = BLOCK_BYTES) -> Channel:
    """How fast blocks go to pinned memory and come back; medians of a few, on the device's own clock.

    Raises:
        HostMemoryFull: the system refuses pinned memory.
    """
    pinned, target = streams.pinned_bytes(block_bytes), streams.device_bytes(block_bytes)
    pairs = (target, pinned), (pinned, target), (target[:1], pinned[:1])
    rounds = [[_timed(streams, *pair) for pair in pairs] for _ in range(REPEATS + 1)]  # the first is to warm up
    last = rounds[-1][-1][1]
    streams.compute_waits(last)
    last.synchronize()
    write_ns, read_ns, latency_ns = (int(median(streams.elapsed_ns(*events) for events in kind)) for kind in zip(*rounds[1:], strict=True))
    return Channel(
        name="cpu",
        capacity_bytes=capacity_bytes,
        write_bytes_per_s=per_second(block_bytes, write_ns - latency_ns),
        read_bytes_per_s=per_second(block_bytes, read_ns - latency_ns),
        latency_ns=latency_ns,
    )


def _timed(streams: Streams, source: Tensor, target: Tensor) -> tuple[Event, Event]:
    """Begins a copy; events before and after it."""
    streams.copy_waits(streams.compute_event())
    start = streams.copy_event(is_timed=True)
    streams.copy([(source, target)])
    return start, streams.copy_event(is_timed=True)


def per_second(nbytes: int, time_ns: int) -> int:
    return max(1, nbytes * 1_000_000_000 // max(time_ns, 1))
