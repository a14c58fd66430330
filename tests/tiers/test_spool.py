"""Do blocks come back as they were written, whatever the disk does, and is nothing left behind?"""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from punar.errors import BlockCorrupted, OffloadError, SpoolFull
from punar.tiers import Block, OperatingSystem, Spool, measure
from punar.tiers.extents import Extents
from punar.tiers.spool import CHUNK, GROWTH


class Buffered(OperatingSystem):
    """A file system that knows no direct I/O and no files without names."""

    def _unnamed(self, folder: Path, flags: int) -> int | None:
        return None


class Hesitant(OperatingSystem):
    """Writes and reads less than is asked."""

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return super().write(fd, data[: max(len(data) // 2 // 4096 * 4096, 4096)], offset)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        return super().read(fd, [buffer[: max(len(buffer) // 3 // 4096 * 4096, 4096)]], offset)


class Stubborn(OperatingSystem):
    """Takes nothing and gives nothing, without an error."""

    def __init__(self, *, writes: bool) -> None:
        self.writes = writes

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return 0 if self.writes and len(data) > 4096 else super().write(fd, data, offset)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return 0


FILES = {"the system's": OperatingSystem, "buffered": Buffered, "hesitant": Hesitant}
SIZES = st.sampled_from([0, 1, 511, 4096, 4097, 70_000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])


@pytest.mark.parametrize("files", FILES)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.tuples(st.sampled_from("wwrf"), SIZES, st.integers(0, 99)), max_size=12))
def test_what_is_written_comes_back(files: str, steps: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    with Spool(tmp_path_factory.getbasetemp(), files=FILES[files]()) as spool:
        known: list[tuple[Block, np.ndarray]] = []
        for what, size, pick in steps:
            if what == "w":
                source = np.random.default_rng(pick).integers(0, 256, size, np.uint8)
                known.append((spool.write(source).wait(), source))
            elif known and what == "r":
                block, source = known[pick % len(known)]
                target = np.empty_like(source)
                assert spool.read(block, target).wait() is block
                assert (target == source).all()
            elif known:
                spool.free(known.pop(pick % len(known))[0])
        assert spool.used_bytes == sum(-(-max(block.size, 1) // 4096) * 4096 for block, _ in known)
        for block, _ in known:
            spool.free(block)
            spool.free(block)
        assert spool.used_bytes == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30_000), st.integers(0, 99)), max_size=60))
def test_extents_never_overlap(steps: list[tuple[bool, int, int]]) -> None:
    extents, taken = Extents(4096), dict[int, int]()
    for is_taking, size, pick in steps:
        if is_taking:
            start = extents.take(size)
            assert start % 4096 == 0
            assert start + size <= extents.end
            assert all(start + extents.rounded(size) <= other or other + extents.rounded(s) <= start for other, s in taken.items())
            taken[start] = size
        elif taken:
            start = sorted(taken)[pick % len(taken)]
            extents.give(start, taken.pop(start))
    for start, size in taken.items():
        extents.give(start, size)
    assert extents.used == 0
    assert extents.end == 0


def test_many_at_once_from_several_threads(tmp_path: Path) -> None:
    failures: list[int] = []
    with Spool(tmp_path) as spool:

        def work(seed: int) -> None:
            source = np.random.default_rng(seed).integers(0, 256, 300_000, np.uint8)
            transfers = [spool.write(source) for _ in range(10)]
            targets = [np.empty_like(source) for _ in transfers]
            reads = [spool.read(transfer.wait(), target) for transfer, target in zip(transfers, targets, strict=True)]
            for transfer, read, target in zip(transfers, reads, targets, strict=True):
                spool.free(transfer.wait())
                read.wait()
                failures.extend([seed] if not (target == source).all() else [])

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert spool.used_bytes == 0
    assert failures == []


def test_capacity(tmp_path: Path) -> None:
    with Spool(tmp_path, capacity_bytes=1 << 20) as spool:
        first = spool.write(np.ones(700_000, np.uint8)).wait()
        with pytest.raises(SpoolFull, match=r"1\.0 MiB were allowed") as caught:
            spool.write(np.ones(700_000, np.uint8)).wait()
        assert caught.value.asked_bytes == 700_000
        spool.free(first)
        spool.write(np.ones(700_000, np.uint8)).wait()


class NoRoom(OperatingSystem):
    """A disk on which files can have so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def reserve(self, fd: int, start: int, size: int) -> None:
        if start + size > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_takes_what_still_fits(tmp_path: Path) -> None:
    with Spool(tmp_path, files=NoRoom(GROWTH + (1 << 20))) as spool:
        blocks = [spool.write(np.ones(GROWTH // 2, np.uint8)).wait() for _ in range(2)]
        with pytest.raises(SpoolFull, match="No space left on device"):
            spool.write(np.ones(2 << 20, np.uint8)).wait()
        spool.write(np.ones(1 << 20, np.uint8)).wait()
        spool.free(blocks[0])
        spool.write(np.ones(2 << 20, np.uint8)).wait()


@pytest.mark.parametrize("writes", [True, False])
def test_a_disk_that_does_nothing_is_an_error(writes: bool, tmp_path: Path) -> None:
    def there_and_back(spool: Spool) -> None:
        block = spool.write(np.ones(10_000, np.uint8)).wait()
        spool.read(block, np.empty(10_000, np.uint8)).wait()

    with Spool(tmp_path, files=Stubborn(writes=writes)) as spool, pytest.raises(OffloadError, match="Input/output error; check the disk"):
        there_and_back(spool)


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        block = spool.write(np.ones(10_000, np.uint8)).wait()
        page = os.open(f"/proc/self/fd/{spool._fd}", os.O_RDWR)
        os.pwrite(page, b"\2", block.start + 5_000)
        os.close(page)
        with pytest.raises(BlockCorrupted, match="its checksum is"):
            spool.read(block, np.empty(10_000, np.uint8)).wait()


def test_a_killed_worker_fails_its_transfer_alone(tmp_path: Path) -> None:
    class Killed(OperatingSystem):
        left = 1

        def write(self, fd: int, data: memoryview, offset: int) -> int:
            if len(data) > 4096 and self.left:
                self.left -= 1
                raise SystemExit("killed")
            return super().write(fd, data, offset)

    with Spool(tmp_path, files=Killed()) as spool:
        with pytest.raises(OffloadError, match="SystemExit: killed"):
            spool.write(np.ones(10_000, np.uint8)).wait()
        assert spool.used_bytes == 0
        for _ in range(5):
            spool.write(np.ones(10_000, np.uint8)).wait()


def test_a_transfer_refers_to_nothing_once_it_has_ended(tmp_path: Path) -> None:
    class Watched(np.ndarray):
        """An array that can be referred to weakly."""

    with Spool(tmp_path, capacity_bytes=1 << 16) as spool:
        gc.disable()
        try:
            for size in (1000, 1 << 20):
                source = np.ones(size, np.uint8).view(Watched)
                reference = weakref.ref(source)
                transfer = spool.write(source)
                del source
                try:
                    transfer.wait()
                except SpoolFull:
                    assert size == 1 << 20
                assert reference() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_folder_that_cannot_be_used(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for files in (OperatingSystem(), Buffered()):
        with pytest.raises(OffloadError, match="give a folder that exists and can be written to"):
            Spool(tmp_path / folder, files=files)


@pytest.mark.parametrize("files", FILES)
def test_the_file_is_private_has_no_name_and_outlives_its_folder(files: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with Spool(folder, files=FILES[files]()) as spool:
        found = os.fstat(spool._fd)
        assert (stat.S_IMODE(found.st_mode), found.st_nlink) == (0o600, 0)
        assert list(folder.iterdir()) == []
        folder.rmdir()
        spool.read(spool.write(np.ones(9, np.uint8)).wait(), np.empty(9, np.uint8)).wait()


def test_what_is_asked_wrongly(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    block = spool.write(np.ones(9, np.uint8)).wait()
    with pytest.raises(OffloadError, match="give back what was written"):
        spool.read(block, np.empty(8, np.uint8))
    spool.free(block)
    with pytest.raises(OffloadError, match="one that was freed"):
        spool.read(block, np.empty(9, np.uint8))
    spool.close()
    spool.close()
    with pytest.raises(OffloadError, match="a spool that is closed"):
        spool.write(np.ones(9, np.uint8))


def test_a_spool_that_nobody_refers_to_ends_its_threads(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.write(np.ones(9, np.uint8)).wait()
    fd, threads = spool._fd, spool._workers._threads
    del spool
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


PROGRAM = """
import os, signal, sys
import numpy as np
from punar.errors import OffloadError
from punar.tiers import Spool
spool = Spool(sys.argv[1])
spool.write(np.ones(9, np.uint8)).wait()
transfers = [spool.write(np.ones(8 << 20, np.uint8)) for _ in range(8)]
if sys.argv[2] == "fork":
    child = os.fork()
    if not child:
        try:
            spool.write(np.ones(9, np.uint8))
        except OffloadError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    [transfer.wait() for transfer in transfers]
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("how", "code"), [("exit", 0), ("fork", 0), ("kill", -signal.SIGKILL)])
def test_the_end_of_a_process(how: str, code: int, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), how], timeout=60, check=False)
    assert ended.returncode == code
    assert list(tmp_path.iterdir()) == []


def test_measuring(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        speed = measure(spool, block_bytes=1 << 20)
        assert min(speed.write_bytes_per_s, speed.read_bytes_per_s, speed.latency_ns) > 0
        assert 0 <= speed.busy_percent <= 100
        assert spool.used_bytes == 0
