"""A private file that blocks of bytes go to and come back from beside the computation.

NOTE. What a user of a spool can rely on.

1. The file has no name, so that nothing is left of it when the process is gone, also after a kill; only this process can read it.
2. A source is read, and a target written, by a worker until its transfer has ended; the spool refers to them until then.
3. A transfer never hangs: whatever ends its work, it ends with it. What failed is raised by ``wait``, and the spool stays usable for other blocks.
4. A block comes back as it was written or not at all: its checksum is compared.
5. Memory is bounded: direct I/O needs an aligned copy, for which each worker has ``CHUNK`` bytes. Buffered I/O needs none.
"""

from __future__ import annotations

import copy
import errno
import mmap
import os
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import numpy as np

from punar.errors import BlockCorrupted, OffloadError, SpoolFull
from punar.tiers.extents import Extents
from punar.tiers.files import ALIGN, OperatingSystem
from punar.units import format_bytes

CHUNK = 4 << 20
"""Bytes that go to the file in one call."""

GROWTH = 64 << 20
"""Bytes by which the file grows at least."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Block:
    """A part of the file that holds ``size`` bytes."""

    __slots__ = ("_is_freed", "_users", "checksum", "size", "start")

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.size = size
        self.checksum = 0
        self._users = 0
        self._is_freed = False


class Transfer:
    """A block on its way. ``nbytes``: its size; ``seconds``: what the work took, once it has ended."""

    def __init__(self, data: memoryview) -> None:
        self.nbytes = data.nbytes
        self.seconds = 0.0
        self._data: memoryview | None = data
        self._future: Future[Block | OffloadError] = Future()

    def is_done(self) -> bool:
        return self._future.done()

    def wait_for_end(self) -> None:
        """Waits for the end, be it good or bad."""
        wait_for([self._future])

    def wait(self) -> Block:
        """Waits for the end and returns the block.

        Raises:
            SpoolFull: there was no room for it.
            BlockCorrupted: it was read back with another checksum.
            OffloadError: it could not be written or read for another reason.
        """
        result = self._future.result()
        if isinstance(result, OffloadError):
            raise copy.copy(result)  # itself it would refer, by its traceback, to all that waits for it
        return result


class Spool:
    """One private file and the workers that copy to and from it (see the NOTE).

    Args:
        folder: on the disk that is meant; only free space is needed there.
        capacity_bytes: of all blocks together at most; None: what the disk has.
        workers: how many blocks are copied at the same time.

    Raises:
        OffloadError: the folder cannot be used.
    """

    def __init__(
        self, folder: str | Path, capacity_bytes: int | None = None, *, workers: int = 2, files: OperatingSystem | None = None
    ) -> None:
        self.folder = Path(folder)
        self.capacity_bytes = capacity_bytes
        self._files = files or OperatingSystem()
        try:
            self._fd, self.is_direct = self._files.open(self.folder)
        except OSError as error:
            raise OffloadError(
                f"asked to offload to {str(self.folder)!r}, no file could be made there: {error.strerror or error}; "
                "give a folder that exists and can be written to"
            ) from error
        self.staging_bytes = workers * CHUNK if self.is_direct else 0
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._extents = Extents(ALIGN)
        self._unwanted: deque[Block] = deque()
        self._reserved = 0
        self._staging = threading.local()
        self._workers = ThreadPoolExecutor(workers, "punar-spool")
        self._close = weakref.finalize(self, _close, self._workers, self._files, self._fd)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def used_bytes(self) -> int:
        """What the blocks take in the file."""
        with self._lock:
            self._give_back()
        return self._extents.used

    def close(self) -> None:
        """Waits for what is on its way, and gives the disk's space back. Safe to call twice."""
        self._close()

    def write(self, source: memoryview | np.ndarray[Any, Any]) -> Transfer:
        """Begins to store the bytes of a contiguous buffer, which must not change until the transfer has ended.

        Raises:
            OffloadError: the spool is closed, or belongs to the process that this one was forked from.
        """
        return self._begin(Transfer(_bytes_of(source)), self._store)

    def read(self, block: Block, target: memoryview | np.ndarray[Any, Any]) -> Transfer:
        """Begins to fill a buffer of ``block.size`` bytes.

        Raises:
            OffloadError: as ``write``; or the buffer is of another size, or the block was freed.
        """
        data = _bytes_of(target)
        if data.nbytes != block.size or block._is_freed:
            raise OffloadError(
                f"asked to read a block of {block.size} B into {data.nbytes} B, or one that was freed; give back what was written"
            )
        with self._lock:
            block._users += 1
        return self._begin(Transfer(data), lambda data: self._load(block, data))

    def free(self, block: Block) -> None:
        """Gives the block's part of the file back, after what is on its way of it. Safe to call twice, and wherever a finalizer may run."""
        if block._is_freed:
            return
        block._is_freed = True
        self._unwanted.append(block)
        if self._lock.acquire(blocking=False):  # whoever has it, perhaps this thread, frees what is unwanted when next a block is taken
            try:
                self._give_back()
            finally:
                self._lock.release()

    def forget(self, transfer: Transfer) -> None:
        """Frees what a transfer writes, once it has ended."""

        def on_end(future: Future[Block | OffloadError]) -> None:
            result = future.result()
            if not isinstance(result, OffloadError):
                self.free(result)

        transfer._future.add_done_callback(on_end)

    def _give_back(self) -> None:
        """Frees what is unwanted and not on its way; the lock is held."""
        for _ in range(len(self._unwanted)):
            block = self._unwanted.popleft()
            if block._users:
                self._unwanted.append(block)
            else:
                self._extents.give(block.start, block.size)

    # -- in the workers --------------------------------------------------------------------------------------------------

    def _begin(self, transfer: Transfer, work: Callable[[memoryview], Block]) -> Transfer:
        if os.getpid() != self._process or not self._close.alive:
            raise OffloadError(
                "asked to offload a block, found a spool that is closed or was made by the process that this one was forked from; make one here"
            )
        self._workers.submit(_run, transfer, work)
        return transfer

    def _store(self, data: memoryview) -> Block:
        block = self._allocated(data.nbytes)
        try:
            for start, part in _chunks(data):
                block.checksum = zlib.crc32(part, block.checksum)
                self._write_all(part, block.start + start)
        except BaseException as error:
            self.free(block)
            raise self._as_offload_error("write", block, error) from None
        return block

    def _load(self, block: Block, data: memoryview) -> Block:
        try:
            checksum = 0
            for start, part in _chunks(data):
                self._read_all(part, block.start + start)
                checksum = zlib.crc32(part, checksum)
        except BaseException as error:
            raise self._as_offload_error("read", block, error) from None
        finally:
            self._leave(block)
        if checksum != block.checksum:
            raise BlockCorrupted(
                f"asked to read back a block of {format_bytes(block.size)} from {str(self.folder)!r}, its checksum is {checksum:08x}, "
                f"it was written with {block.checksum:08x}: the disk lost or changed it; do not use that disk"
            )
        return block

    def _leave(self, block: Block) -> None:
        with self._lock:
            block._users -= 1
            self._give_back()

    def _allocated(self, size: int) -> Block:
        with self._lock:
            self._give_back()
            rounded = self._extents.rounded(size)
            if self.capacity_bytes is not None and self._extents.used + rounded > self.capacity_bytes:
                raise self._full(size, f"{format_bytes(self.capacity_bytes)} were allowed for it")
            block = Block(self._extents.take(size), size)
            if self._extents.end > self._reserved:
                self._reserve(block)
        return block

    def _reserve(self, block: Block) -> None:
        """The file grows, by more than is needed where the disk has it."""
        least = self._extents.end - self._reserved
        for more in (max(least, GROWTH), least):
            try:
                self._files.reserve(self._fd, self._reserved, more)
            except OSError as error:
                failed = self._as_offload_error("write", block, error)
            else:
                self._reserved += more
                return
        self._extents.give(block.start, block.size)
        raise failed

    def _write_all(self, part: memoryview, offset: int) -> None:
        data = self._staged(part) if self.is_direct else part
        done = 0
        while done < len(data):
            count = self._files.write(self._fd, data[done:], offset + done)
            count -= (done + count) % ALIGN if self.is_direct else 0
            if count <= 0:
                raise OSError(errno.EIO, "the disk took no bytes")
            done += count

    def _read_all(self, part: memoryview, offset: int) -> None:
        data = self._stage(part.nbytes) if self.is_direct else part
        done = 0
        while done < part.nbytes:
            count = self._files.read(self._fd, [data[done:]], offset + done)
            count -= (done + count) % ALIGN if self.is_direct and done + count < part.nbytes else 0
            if count <= 0:
                raise OSError(errno.EIO, "the file ended early")
            done += count
        if self.is_direct:
            np.copyto(np.frombuffer(part, np.uint8), np.frombuffer(data, np.uint8, part.nbytes))

    def _stage(self, size: int) -> memoryview:
        """Aligned memory of this worker, for so many bytes and what they are padded by."""
        stage = getattr(self._staging, "buffer", None)
        if stage is None:
            stage = self._staging.buffer = memoryview(mmap.mmap(-1, CHUNK))
        return stage[: -(-size // ALIGN) * ALIGN]

    def _staged(self, part: memoryview) -> memoryview:
        stage = self._stage(part.nbytes)
        np.copyto(np.frombuffer(stage, np.uint8, part.nbytes), np.frombuffer(part, np.uint8))
        return stage

    def _as_offload_error(self, verb: str, block: Block, error: BaseException) -> OffloadError:
        if isinstance(error, OSError) and error.errno in _FULL:
            return self._full(block.size, os.strerror(error.errno or 0))
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else f"{type(error).__name__}: {error}"
        return OffloadError(
            f"asked to {verb} a block of {format_bytes(block.size)} in {str(self.folder)!r}, that failed: {why}; check the disk, or offload to another"
        )

    def _full(self, size: int, why: str) -> SpoolFull:
        return SpoolFull(
            f"asked to offload {format_bytes(size)} to {str(self.folder)!r}, where {format_bytes(self._extents.used)} are stored: {why}; "
            "make room there, or allow more",
            asked_bytes=size,
        )


def _run(transfer: Transfer, work: Callable[[memoryview], Block]) -> None:
    """What a worker does. When the transfer has ended the worker refers to its buffer no more, nor does an exception."""
    start = time.perf_counter()
    assert transfer._data is not None
    try:
        result: Block | OffloadError = work(transfer._data)
    except OffloadError as error:
        error.__context__ = None
        result = error.with_traceback(None)
    except BaseException as error:  # Rule 3
        result = OffloadError(f"a worker that copies blocks ended with {type(error).__name__}: {error}; please report this")
    transfer.seconds = time.perf_counter() - start
    transfer._data = None
    transfer._future.set_result(result)


def _close(workers: ThreadPoolExecutor, files: OperatingSystem, fd: int) -> None:
    workers.shutdown(wait=True)
    files.close(fd)


def _bytes_of(buffer: memoryview | np.ndarray[Any, Any]) -> memoryview:
    view = memoryview(buffer)  # type: ignore[arg-type]
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _chunks(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    for start in range(0, data.nbytes, CHUNK):
        yield start, data[start : start + CHUNK]
