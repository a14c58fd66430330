"""What the bytes of a simulated step are, moment by moment: kept, gradients, made again, for the moment, and so on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from punar.ir.lineage import close
from punar.ir.trace import EventKind, Trace
from punar.plan.moves import Channel, Move, rounded
from punar.plan.playback import Witness
from punar.plan.simulate import AWAY, Judge

_KEPT, _GRADIENTS, _PASSING = range(3)
_NEVER_AT_PEAK = -1


class Stratum(NamedTuple):
    """The step's own bytes, from a moment on; what is resident comes on top. Units: nanoseconds from the step's start, bytes.

    ``op``: that runs, or ran last; -1 before the first. ``is_replay``: it runs again. ``kept``: made in forward, and there as it was made.
    ``gradients``: of parameters. ``recomputed``: made again, read back or copied. ``compressed``: in fewer bytes. ``passing``: made in backward and no
    parameter's gradient, and what the operator that runs allocates. ``away``: moved off the device, so no part of the sum.
    """

    time_ns: int
    op: int
    is_replay: bool
    kept: int
    gradients: int
    recomputed: int
    compressed: int
    passing: int
    away: int

    @property
    def bytes(self) -> int:
        return self.kept + self.gradients + self.recomputed + self.compressed + self.passing


def sort_bytes(
    trace: Trace,
    hold_from: Sequence[int],
    *,
    gradients: Collection[int],
    is_closed: bool = False,
    moves: Sequence[Move] = (),
    channels: Sequence[Channel] = (),
) -> tuple[Stratum, ...]:
    """Runs a plan through a trace as ``simulate`` does, and says at each change what the bytes are.

    Args:
        gradients: the storages that are parameters' gradients.

    Complexity: O(events + replayed operators).
    """
    closed = hold_from if is_closed else close(trace, hold_from, rounded(moves, channels))
    sorter = _Sorter(trace, closed, gradients)
    sorter.move(moves, channels)
    sorter.run(sorter.line.all_steps)
    return tuple(sorter.strata)


class _Sorter(Witness):
    """A witness that counts by kind. What is neither as the step allocated it nor encoded was made by replays, fetched or cloned."""

    def __init__(self, trace: Trace, hold_from: Sequence[int], gradients: Collection[int]) -> None:
        super().__init__(trace, hold_from, _NEVER_AT_PEAK)
        self.gradients = gradients
        self.kind: dict[int, int] = {}
        self.originals_of = [0, 0, 0]
        self.encoded = self.away = 0
        self.last_op = -1
        self.is_over = False
        self.strata = [Stratum(0, -1, False, 0, 0, 0, 0, 0, 0)]

    def run(self, steps: Sequence[tuple[int, int, int]]) -> None:
        for step in steps:
            Judge.run(self, (step,))
            self.is_over = True
            self.sample(self.live)
            self.is_over = False

    def clock_ns(self) -> int:
        """An operator's scratch is there until it has run."""
        return self.begins[self.place + self.is_over] + self.replay_time + self.copies.lost_ns

    def sample(self, live: int) -> None:
        kept, gradients, passing = self.originals_of
        op, is_replay = self.op_at()
        private = self.live - kept - gradients - passing - self.encoded
        found = Stratum(self.clock_ns(), op, is_replay, kept, gradients, private, self.encoded, passing + live - self.live, self.away)
        if found[3:] != self.strata[-1][3:]:
            self.strata.append(found)

    def op_at(self) -> tuple[int, bool]:
        if self.replaying >= 0:
            return self.replaying, True
        kind, id = self.trace.events[self.place]
        if kind == EventKind.RUN:
            self.last_op = id
        return (self.coding if self.coding >= 0 else self.last_op), False

    def on_op(self, id: int) -> None:
        super().on_op(id)
        for storage, size in self.line.makes[id]:
            is_passing = self.trace.ops[id].is_backward
            self.kind[storage] = _GRADIENTS if storage in self.gradients else _PASSING if is_passing else _KEPT
            self.originals_of[self.kind[storage]] += size

    def on_free(self, storage: int) -> None:
        before = self.live
        super().on_free(storage)
        self.gone(storage, before - self.live)

    def drop_original(self, storage: int) -> None:
        before = self.live
        super().drop_original(storage)
        self.gone(storage, before - self.live)

    def gone(self, storage: int, size: int) -> None:
        if size:
            self.originals_of[self.kind[storage]] -= size

    def code(self, move: Move, *, is_out: bool) -> None:
        self.encoded += self.kept_of(move) * is_out
        self.away -= 0 if is_out else self.moved_of(move)
        super().code(move, is_out=is_out)
        self.encoded -= self.kept_of(move) * (not is_out)

    def land(self, moves: Sequence[Move]) -> None:
        landing = [move for move in moves if self.held[move.value] == 1]
        super().land(moves)
        self.away += sum(map(self.moved_of, landing))

    def let_go(self, value: int) -> None:
        if self.held[value] == AWAY:
            self.encoded -= self.kept_of(self.moves[value])
            self.away -= self.moved_of(self.moves[value])
        super().let_go(value)

    def moved_of(self, move: Move) -> int:
        """The bytes that leave the device."""
        return 0 if self.channel(move).is_codec else self.line.bytes[move.value]
