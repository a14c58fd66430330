"""How fast a spool is, as measured through it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from punar.tiers.spool import Spool, Transfer

BLOCKS, BLOCK_BYTES, REPEATS = 4, 8 << 20, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Units: bytes per second of many large blocks; nanoseconds that one small block takes; per cent of a copy's time that it takes of one core."""

    write_bytes_per_s: int
    read_bytes_per_s: int
    latency_ns: int
    busy_percent: int


def measure(spool: Spool, *, blocks: int = BLOCKS, block_bytes: int = BLOCK_BYTES, repeats: int = REPEATS) -> Bandwidth:
    """Writes and reads ``blocks`` blocks of ``block_bytes`` a few times; medians. Takes the time of ``2 * repeats * blocks`` transfers.

    Raises:
        OffloadError: the spool cannot be written or read.
    """
    page = np.ones(4096, np.uint8)
    latencies = [_timed(lambda: [spool.write(page)]) for _ in range(repeats)]
    sources = [np.full(block_bytes, k, np.uint8) for k in range(blocks)]
    cpu, wall = time.process_time(), time.perf_counter()
    writes, reads = [], []
    for _ in range(repeats):
        wrote = _timed(lambda: [spool.write(source) for source in sources])
        read = _timed(partial(_read_back, spool, wrote[1], sources))
        writes.append(wrote[0])
        reads.append(read[0])
        for transfer in wrote[1]:
            spool.free(transfer.wait())
    busy = (time.process_time() - cpu) / (time.perf_counter() - wall)
    for _, (transfer,) in latencies:
        spool.free(transfer.wait())
    size = blocks * block_bytes
    return Bandwidth(
        write_bytes_per_s=max(1, int(size / median(writes))),
        read_bytes_per_s=max(1, int(size / median(reads))),
        latency_ns=int(median(seconds for seconds, _ in latencies) * 1e9),
        busy_percent=min(100, int(busy * 100)),
    )


def _read_back(spool: Spool, written: list[Transfer], targets: list[np.ndarray[Any, Any]]) -> list[Transfer]:
    return [spool.read(transfer.wait(), target) for transfer, target in zip(written, targets, strict=True)]


def _timed(begin: Callable[[], list[Transfer]]) -> tuple[float, list[Transfer]]:
    """Seconds until all that is begun has ended."""
    start = time.perf_counter()
    transfers = begin()
    for transfer in transfers:
        transfer.wait()
    return time.perf_counter() - start, transfers
