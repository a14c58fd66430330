"""Which parts of a file are free."""

from __future__ import annotations

from bisect import bisect_left


class Extents:
    """First fit over aligned parts of a file that grows at its end. Units: bytes. Not safe for threads."""

    def __init__(self, align: int) -> None:
        self.align = align
        self.end = 0
        self.used = 0
        self._starts: list[int] = []
        self._sizes: list[int] = []

    def rounded(self, size: int) -> int:
        return -(-max(size, 1) // self.align) * self.align

    def take(self, size: int) -> int:
        """Where a part of this size may begin; the file's ``end`` moves if it fits nowhere else."""
        size = self.rounded(size)
        self.used += size
        for at, room in enumerate(self._sizes):
            if room >= size:
                start = self._starts[at]
                self._shrink(at, size)
                return start
        start, self.end = self.end, self.end + size
        return start

    def give(self, start: int, size: int) -> None:
        """A part is free again; it is joined with free neighbours, and with what lies beyond the end."""
        size = self.rounded(size)
        self.used -= size
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + size:
            size += self._sizes[at]
            del self._starts[at], self._sizes[at]
        if at and self._starts[at - 1] + self._sizes[at - 1] == start:
            at -= 1
            start, size = self._starts[at], self._sizes[at] + size
            del self._starts[at], self._sizes[at]
        if start + size == self.end:
            self.end = start
        else:
            self._starts.insert(at, start)
            self._sizes.insert(at, size)

    def _shrink(self, at: int, size: int) -> None:
        if self._sizes[at] == size:
            del self._starts[at], self._sizes[at]
        else:
            self._starts[at] += size
            self._sizes[at] -= size
