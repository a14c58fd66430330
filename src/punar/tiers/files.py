"""The calls to the operating system that a spool makes, in one place so that each can be made to fail."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ALIGN = 4096
"""Bytes that direct I/O wants offsets, sizes and addresses to be multiples of."""

_NOT_SUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)


class OperatingSystem:
    """The real one."""

    def open(self, folder: Path) -> tuple[int, bool]:
        """A new file that only this process can read and that has no name, and whether it takes direct I/O.

        Raises:
            OSError: the folder is none, is not there, or cannot be written to.
        """
        fd = self._unnamed(folder, getattr(os, "O_DIRECT", 0))
        if fd is not None and self._takes_direct(fd):
            return fd, True
        if fd is not None:
            os.close(fd)
        return self._open_buffered(folder), False

    def reserve(self, fd: int, start: int, size: int) -> None:
        """Makes sure that there is room on the disk.

        Raises:
            OSError: there is none.
        """
        try:
            os.posix_fallocate(fd, start, size)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def close(self, fd: int) -> None:
        os.close(fd)

    def _unnamed(self, folder: Path, flags: int) -> int | None:
        """A file without a name; None where the file system has none of these, or not with these flags."""
        if not hasattr(os, "O_TMPFILE"):
            return None
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        except OSError as error:
            if error.errno in _NOT_SUPPORTED and folder.is_dir():
                return None
            raise

    def _open_buffered(self, folder: Path) -> int:
        fd = self._unnamed(folder, 0)
        if fd is None:
            fd, name = tempfile.mkstemp(dir=folder, prefix=".punar-")
            os.unlink(name)
        return fd

    def _takes_direct(self, fd: int) -> bool:
        with mmap.mmap(-1, ALIGN) as page, suppress(OSError), memoryview(page) as view:
            return self.write(fd, view, 0) == ALIGN
        return False
