"""Values that leave the device after forward and come back for backward, and the second timeline on which they are copied.

NOTE. The rules that both the simulator and the runtime follow.

1. The copy out of a moved value begins when its producer has run. Before forward operator ``land`` runs it is waited for, and the device's
   copy is let go; until then the value is held.
2. The copy in begins, and takes its bytes on the device, with the first demand of a dropped or moved save from which on the clock (Rule 2
   of ``simulate``) is at least ``fetch``; 0: when backward begins. Where several are due they begin in the order of ``fetch``, then of their demands.
3. A replay that reads a moved value, or a demand for it, that comes earlier begins the copy in itself. Both wait for its end.
4. What has come back is held like any held value (Rule 5 of ``simulate``); nothing moves twice.
5. A channel copies one block at a time, out and in, in the order in which the copies began.
6. A codec (``codecs.py``) is a channel too, to fewer bytes on the device itself. It encodes when the value must be gone (Rule 1), beside the
   value, and decodes when it comes back (Rule 2), beside what was encoded. The computation waits for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from punar.ir.derived import derived
from punar.ir.trace import EventKind, Trace
from punar.plan.codecs import codec_of

GRAIN = 512
"""Bytes that encoded values are multiples of, as device allocators' are."""

SCRATCH_FACTOR, SCRATCH_FLOOR = 6, 1 << 16
"""How many times its bytes, and how many besides, a small value needs as scratch at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """How fast a tier, or a codec, takes blocks and gives them back, as measured. Units: bytes, bytes per second, nanoseconds.

    ``capacity_bytes``: what it may hold at once. ``latency_ns``: of each copy. ``busy_percent``: for how much of
    a copy's time the computation is kept from its cores by it. Of a codec: of each ``block_bytes`` it keeps ``block_kept`` on the
    device, and needs ``scratch_bytes`` at most for a moment.
    """

    name: str
    capacity_bytes: int
    write_bytes_per_s: int
    read_bytes_per_s: int
    latency_ns: int = 0
    busy_percent: int = 0
    block_bytes: int = 1
    block_kept: int = 0
    scratch_bytes: int = 0

    @property
    def is_codec(self) -> bool:
        return self.block_kept > 0

    def kept(self, nbytes: int) -> int:
        """What stays on the device of a value of so many bytes: whole units of the allocator's."""
        return -(-(-(-nbytes // self.block_bytes) * self.block_kept) // GRAIN) * GRAIN

    def scratch(self, nbytes: int) -> int:
        """What encoding or decoding it needs for a moment, besides."""
        return min(self.scratch_bytes, SCRATCH_FACTOR * nbytes + SCRATCH_FLOOR)

    def write_ns(self, nbytes: int) -> int:
        return self.latency_ns + nbytes * 1_000_000_000 // self.write_bytes_per_s

    def read_ns(self, nbytes: int) -> int:
        return self.latency_ns + nbytes * 1_000_000_000 // self.read_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A value that is moved to the channel number ``tier``; ``land``: a forward operator's id; ``fetch``: a rank of demand (Rules 1 and 2)."""

    value: int
    land: int
    fetch: int
    tier: int = 0


def rounded(moves: Sequence[Move], channels: Sequence[Channel]) -> frozenset[int]:
    """The moved values of which less comes back than was there, so that no replay may start from them."""
    return frozenset(
        move.value for move in moves if (known := codec_of(channels[move.tier].name)) is not None and not known[0].is_replayable
    )


class Copy(NamedTuple):
    """One value on its way to a channel, or back. Units: nanoseconds from the step's start."""

    value: int
    tier: int
    start_ns: int
    takes_ns: int
    is_out: bool


class Copies:
    """The second timeline of one simulation. Units: nanoseconds from the step's start.

    ``stall_ns``: what the computation waited for copies; ``busy_ns``: what it lost to them besides; ``copy_ns``: what they took;
    ``coding_ns``: what encoding and decoding took; ``coded_bytes``: of the values that were encoded. ``runs``: every copy, where a list is given.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.channels = channels
        self.free_at = [0] * len(channels)
        self.stall_ns = self.busy_ns = self.copy_ns = self.moved_bytes = self.coding_ns = self.coded_bytes = 0
        self.ends: dict[int, int] = {}
        self.runs: list[Copy] | None = None

    @property
    def lost_ns(self) -> int:
        return self.stall_ns + self.busy_ns + self.coding_ns

    def begin(self, move: Move, nbytes: int, now_ns: int, *, is_out: bool) -> None:
        """A copy begins; ``now_ns`` leaves out what was lost to copies so far."""
        channel = self.channels[move.tier]
        takes_ns = channel.write_ns(nbytes) if is_out else channel.read_ns(nbytes)
        if channel.is_codec:
            self.see(Copy(move.value, move.tier, now_ns + self.lost_ns, takes_ns, is_out))
            self.coding_ns += takes_ns
            self.coded_bytes += nbytes if is_out else 0
            return
        start = max(self.free_at[move.tier], now_ns + self.lost_ns)
        self.see(Copy(move.value, move.tier, start, takes_ns, is_out))
        self.free_at[move.tier] = self.ends[move.value] = start + takes_ns
        self.busy_ns += takes_ns * channel.busy_percent // 100
        self.copy_ns += takes_ns
        self.moved_bytes += nbytes

    def see(self, copy: Copy) -> None:
        if self.runs is not None:
            self.runs.append(copy)

    def wait(self, value: int, now_ns: int) -> None:
        """The computation needs a copy to have ended."""
        self.stall_ns += max(0, self.ends.pop(value, 0) - now_ns - self.lost_ns)


@derived
def times_before(trace: Trace) -> tuple[int, ...]:
    """For each event when it begins in the plain step, with what the step takes beside its operators spread over them; one more for the end."""
    gap_ns = int(trace.meta.get("gap_ns", 0))
    share = 1 + gap_ns / max(trace.plain_time_ns, 1)
    times = (int(trace.ops[id].time_ns * share) if kind == EventKind.RUN else 0 for kind, id in trace.events)
    return tuple(accumulate(times, initial=0))
