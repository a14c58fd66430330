"""A simulated step watched as it goes by: what runs when, how many bytes are there meanwhile, and what they are at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from punar.ir.lineage import close
from punar.ir.trace import EventKind, Trace
from punar.plan.moves import Channel, Copy, Move, rounded, times_before
from punar.plan.simulate import AWAY, Judge, Simulation, simulate

Form = Literal["original", "recomputed", "encoded"]
"""How something is there: as the step allocated it, made or read back again, or in fewer bytes."""


class Run(NamedTuple):
    """One operator at work. Units: nanoseconds from the step's start."""

    op: int
    start_ns: int
    takes_ns: int
    is_replay: bool


class Holding(NamedTuple):
    """Something that is alive at the peak. ``op``: that made it."""

    op: int
    bytes: int
    form: Form


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment at which a step needs the most bytes.

    Attributes:
        bytes: of the whole step, resident ones included.
        op: the operator that runs, or of which a value is encoded or read back then.
        is_replay: it runs again, in backward. is_coding: it does not run, a value of its is encoded or decoded.
        own_bytes: what it allocates, its scratch included.
        holdings: what is alive besides, but for what is resident.
    """

    bytes: int
    op: int
    is_replay: bool
    is_coding: bool
    own_bytes: int
    holdings: tuple[Holding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Playback:
    """What was seen of one simulated step.

    Attributes:
        cost: what ``simulate`` says of it.
        runs: operators, in order; copies: moves out and back, encodings and decodings.
        memory: (nanoseconds from the step's start, bytes of the whole step), wherever it changes.
        peak: the moment of the most bytes, the first of several.
        end_ns: when the step ends, with what it takes beside its operators where that was measured.
    """

    cost: Simulation
    runs: tuple[Run, ...]
    copies: tuple[Copy, ...]
    memory: tuple[tuple[int, int], ...]
    peak: Peak
    end_ns: int


def play(
    trace: Trace,
    hold_from: Sequence[int],
    *,
    is_closed: bool = False,
    moves: Sequence[Move] = (),
    channels: Sequence[Channel] = (),
) -> Playback:
    """Runs a plan through a trace as ``simulate`` does, and keeps what it sees.

    Complexity: O(events + replayed operators).
    """
    closed = hold_from if is_closed else close(trace, hold_from, rounded(moves, channels))
    cost = simulate(trace, closed, is_closed=True, moves=moves, channels=channels)
    witness = Witness(trace, closed, cost.peak_bytes - trace.resident_bytes)
    witness.move(moves, channels)
    copies: list[Copy] = []
    witness.copies.runs = copies
    witness.run(witness.line.all_steps)
    assert witness.moment is not None  # the second pass repeats the first
    return Playback(
        cost=cost,
        runs=tuple(witness.runs),
        copies=tuple(copies),
        memory=tuple(witness.memory),
        peak=witness.moment,
        end_ns=witness.begins[-1] + witness.replay_time + witness.copies.lost_ns,
    )


class Witness(Judge):
    """A judge that writes down what it sees. ``most_bytes``: the peak of the step's own bytes, at which it looks around."""

    def __init__(self, trace: Trace, hold_from: Sequence[int], most_bytes: int) -> None:
        super().__init__(trace, hold_from, None)
        self.most_bytes = most_bytes
        self.begins = times_before(trace)
        self.runs: list[Run] = []
        self.memory: list[tuple[int, int]] = [(0, trace.resident_bytes)]
        self.moment: Peak | None = None
        self.replaying, self.coding = -1, -1
        self.uses: dict[int, int] = {}
        self.taken: dict[int, int] = {}
        self.remade: list[int] = []

    def run(self, steps: Sequence[tuple[int, int, int]]) -> None:
        for step in steps:
            super().run((step,))
            self.sample(self.live)

    def clock_ns(self) -> int:
        """Nanoseconds from the step's start, with what was lost to copies."""
        return self.begins[self.place] + self.replay_time + self.copies.lost_ns

    def sample(self, live: int) -> None:
        """The bytes of the step itself are so many from now on."""
        if (size := self.trace.resident_bytes + live) != self.memory[-1][1]:
            self.memory.append((self.clock_ns(), size))

    def charge(self, extra: int, *, is_replay: bool) -> None:
        self.sample(self.live + extra)
        if self.coding < 0:
            self.runs.append(self.run_of(is_replay=is_replay))
        if self.moment is None and self.live + extra == self.most_bytes:
            self.moment = self.look_around(extra, is_replay=is_replay)
        super().charge(extra, is_replay=is_replay)

    def run_of(self, *, is_replay: bool) -> Run:
        op = self.replaying if is_replay else self.trace.events[self.place].id
        takes_ns = self.line.times[op] if is_replay else self.trace.ops[op].time_ns
        return Run(op, self.clock_ns(), takes_ns, is_replay)

    def code(self, move: Move, *, is_out: bool) -> None:
        self.coding = self.line.producer[move.value]
        super().code(move, is_out=is_out)
        self.coding = -1

    def replay(self, target: int, save: int) -> None:
        self.remade = []
        super().replay(target, save)
        self.replaying, self.remade = -1, []

    def replay_op(self, id: int, uses: dict[int, int]) -> None:
        self.replaying, self.uses, self.taken = id, uses, {}
        super().replay_op(id, uses)
        self.taken = {}
        self.remade.extend(self.line.outputs[id])

    def copy_overwritten(self, id: int, uses: dict[int, int]) -> dict[int, int]:
        self.taken = super().copy_overwritten(id, uses)
        return self.taken

    def look_around(self, extra: int, *, is_replay: bool) -> Peak:
        is_coding = self.coding >= 0
        kind, id = self.trace.events[self.place]
        op = self.coding if is_coding else self.replaying if is_replay else id
        assert is_coding or is_replay or kind == EventKind.RUN
        return Peak(
            bytes=self.trace.resident_bytes + self.live + extra,
            op=op,
            is_replay=is_replay and not is_coding,
            is_coding=is_coding,
            own_bytes=extra,
            holdings=tuple(self.holdings(op)),
        )

    def holdings(self, op: int) -> list[Holding]:
        """All that is alive. ``op``: whose value's encoded form is just appearing or going, so that both are there."""
        found = [Holding(maker, size, "original") for maker, size in self.originals()]
        found += [Holding(maker, size, "recomputed") for maker, size in (*self.copied(), *self.in_replay())]
        found += [
            Holding(self.line.producer[value], self.kept_of(move), "encoded")
            for value, move in self.moves.items()
            if self.held[value] == AWAY and self.kept_of(move)
        ]
        if rest := self.live - sum(holding.bytes for holding in found):
            found.append(Holding(op, rest, "encoded"))
        return found

    def in_replay(self) -> list[tuple[int, int]]:
        """What the replay under way has made and still needs, with its private copies of what it is about to overwrite."""
        line = self.line
        needed = [value for value in self.remade if self.uses.get(value, 0) > 0 and not self.held[value]]
        return [(line.producer[value], line.bytes[value]) for value in needed] + [
            (line.producer[value], size) for value, size in self.taken.items()
        ]
