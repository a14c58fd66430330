"""The one judge: what a step does to memory and time under a plan.

NOTE. The rules of the tape that both the simulator and the runtime follow.

1. ``hold_from[v]`` of a value is 0: held from forward on; r >= 1: dropped in forward, and held once a replay that serves
   the demand of rank r or later has made it again; ``NEVER``: made anew each time it is needed.
2. A value is asked for in backward by its saves (``DEMAND``), in the order the trace gives. The clock is the highest rank seen of a save that was dropped.
3. A demand for a value that is not at hand replays, in the order of the forward pass, the operators between the held values and it.
4. In a replay, a value made again is freed at its last use in that replay, unless Rule 1 says to hold it. A held value has no more need
   of its lineage.
5. A held value is freed when no unreleased save and no lineage of a value that is not held refers to it.
6. An operator that writes in place is replayed on a private copy: what it overwrites is taken over where this was its last use, else cloned. In
   forward, a held value that is about to be overwritten is cloned first.
7. Moved values go by the rules of ``moves.py``; a replay finds them at hand wherever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from punar.ir.lineage import Lineage, close, lineage_of, recorded_ops
from punar.ir.trace import Trace
from punar.plan.moves import Channel, Copies, Move, rounded, times_before
from punar.plan.stretches import score_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a plan costs. Bytes are of the whole step, resident ones included; times are of the whole step.

    ``kept_bytes``: storages that only saves or holds keep alive when backward begins. ``recomputed_bytes``: allocated by replays.
    ``peak_event``: the place in ``trace.events`` at which the peak stands. ``moved_bytes``: copied off the device and back, each way counted;
    ``copy_ns``: what that takes; ``stall_ns``: how long the computation waits for it; ``busy_ns``: what it loses to it besides. ``coded_bytes``:
    of values held in fewer bytes; ``coding_ns``: what that takes.
    """

    peak_bytes: int
    time_ns: int
    kept_bytes: int
    recomputed_bytes: int
    replayed_ops: int
    peak_event: int
    moved_bytes: int = 0
    copy_ns: int = 0
    stall_ns: int = 0
    busy_ns: int = 0
    coded_bytes: int = 0
    coding_ns: int = 0


class TooManyReplays(Exception):
    """A plan replays more operators than the caller is willing to follow."""


def simulate(
    trace: Trace,
    hold_from: Sequence[int],
    *,
    is_closed: bool = False,
    on_run: Callable[[int, int, bool], None] | None = None,
    most_replays: int = 1 << 62,
    moves: Sequence[Move] = (),
    channels: Sequence[Channel] = (),
) -> Simulation:
    """Runs a plan through a trace.

    Args:
        trace: the recorded step.
        hold_from: for each value Rule 1's number.
        is_closed: ``hold_from`` has been through ``close`` already.
        on_run: called as ``on_run(event place, bytes at the operator's peak, whether it is a replay)`` for every operator.
        most_replays: how many replayed operators are followed.
        moves: values that leave the device meanwhile; ``hold_from`` holds them. channels: where to.

    Raises:
        TooManyReplays: there are more of them.

    Complexity: O(events + replayed operators).
    """
    judge = Judge(trace, hold_from if is_closed else close(trace, hold_from, rounded(moves, channels)), on_run)
    judge.left = most_replays
    judge.move(moves, channels)
    judge.run(judge.line.all_steps if on_run else score_of(trace).steps)
    return judge.result()


def highest(
    trace: Trace, hold_from: Sequence[int], cell: Sequence[int], *, is_closed: bool = False, most_replays: int = 1 << 62
) -> tuple[Simulation, list[int]]:
    """What ``simulate`` says, and the highest bytes in each cell; ``cell[event]`` rises, and only where events are not apart (``stretches.py``)."""
    judge = Judge(trace, hold_from if is_closed else close(trace, hold_from), None)
    judge.left, judge.cell, judge.high = most_replays, cell, [-trace.resident_bytes] * (cell[-1] + 1 if cell else 1)
    judge.run(score_of(trace).steps)
    return judge.result(), [bytes + trace.resident_bytes for bytes in judge.high]


def alive_at(
    trace: Trace, hold_from: Sequence[int], place: int, moves: Sequence[Move] = (), channels: Sequence[Channel] = ()
) -> list[tuple[int, int]]:
    """What is alive just before the event at ``place``, as (operator that made it, bytes); what was there before the step is left out."""
    judge = Judge(trace, close(trace, hold_from), None)
    judge.move(moves, channels)
    judge.run(judge.line.all_steps[:place])
    return judge.alive()


class Judge:
    """The state of one simulation. Instances of a storage: the original one, and private ones made by clones and replays."""

    def __init__(self, trace: Trace, hold_from: Sequence[int], on_run: Callable[[int, int, bool], None] | None) -> None:
        self.trace, self.hold, self.on_run = trace, hold_from, on_run
        self.line: Lineage = lineage_of(trace)
        self.stretches = score_of(trace).stretches
        self.recorded = recorded_ops(trace, hold_from)
        self.rank = trace.demand_rank
        values, ops = len(trace.values), len(trace.ops)
        self.need = [0] * values
        self.held = bytearray(values)  # 0: not held, 1: by the original storage, 2: by a private one, AWAY
        self.is_known = bytearray(values)
        self.op_refs = [0] * ops
        self.original_refs = [0] * len(trace.storages)
        self.is_user_alive = bytearray(len(trace.storages))
        self.transient: dict[int, int] = {}
        self.is_save_dropped = bytearray(len(trace.saves))
        self.is_loan_moved = bytearray(len(trace.saves))
        self.live = self.peak = self.recomputed = self.replayed = self.replay_time = 0
        self.kept = -1
        self.peak_place = self.place = self.clock = 0
        self.left = 1 << 62
        self.cell: Sequence[int] = ()
        self.high: list[int] = []
        self.moves: dict[int, Move] = {}
        self.copies = Copies(())
        self.leaving: dict[int, list[Move]] = {}
        self.landing: dict[int, list[Move]] = {}
        self.coming: list[Move] = []

    def move(self, moves: Sequence[Move], channels: Sequence[Channel]) -> None:
        """Values are to be moved."""
        self.copies = Copies(channels)
        for move in moves:
            self.moves[move.value] = move
            self.leaving.setdefault(self.line.producer[move.value], []).append(move)
            self.landing.setdefault(move.land, []).append(move)
        self.coming = sorted(moves, key=lambda move: (move.fetch, self.rank[move.value]), reverse=True)

    def run(self, steps: Sequence[tuple[int, int, int]]) -> None:
        handlers = (self.on_op, self.on_save, self.on_demand, self.on_release, self.on_free, self.on_return, self.on_stretch)
        for self.place, kind, id in steps:
            handlers[kind](id)

    def result(self) -> Simulation:
        return Simulation(
            peak_bytes=self.trace.resident_bytes + self.peak,
            time_ns=self.trace.plain_time_ns + self.replay_time + self.copies.lost_ns,
            kept_bytes=max(self.kept, 0),
            recomputed_bytes=self.recomputed,
            replayed_ops=self.replayed,
            peak_event=self.peak_place,
            moved_bytes=self.copies.moved_bytes,
            copy_ns=self.copies.copy_ns,
            stall_ns=self.copies.stall_ns,
            busy_ns=self.copies.busy_ns,
            coded_bytes=self.copies.coded_bytes,
            coding_ns=self.copies.coding_ns,
        )

    def alive(self) -> list[tuple[int, int]]:
        return self.originals() + self.copied()

    def originals(self) -> list[tuple[int, int]]:
        """The storages that are alive as the step itself allocated them, as (operator that made it, bytes)."""
        first = {value.storage: value.producer for value in reversed(self.trace.values)}
        return [
            (first[storage.id], storage.bytes)
            for storage, alive, refs in zip(self.trace.storages, self.is_user_alive, self.original_refs, strict=True)
            if (alive or refs) and not storage.is_source and first.get(storage.id, -1) >= 0
        ]

    def copied(self) -> list[tuple[int, int]]:
        """What clones, copies in and finished replays have allocated besides and is alive."""
        line = self.line
        private = [(line.producer[value], line.bytes[value]) for value, state in enumerate(self.held) if state == 2]
        return private + [(line.producer[line.saved[save]], size) for save, size in self.transient.items()]

    # -- events ------------------------------------------------------------------------------------------------------

    def on_stretch(self, id: int) -> None:
        rise, place, rest = self.stretches[id]
        high = self.live + rise
        if high > self.peak:
            self.peak, self.peak_place = high, place
        if self.high:
            at = self.cell[place]
            if high > self.high[at]:
                self.high[at] = high
        self.live += rest

    def on_op(self, id: int) -> None:
        line = self.line
        if id in self.landing:
            self.land(self.landing[id])
        if self.kept < 0 and self.recorded[id]:
            self.record(id)
        for old in line.overwrites[id]:
            if self.held[old] == 1:
                self.clone_held(old)
        self.charge(line.adds[id], is_replay=False)
        for storage, size in line.makes[id]:
            self.is_user_alive[storage] = 1
            self.live += size
        if id in self.leaving:
            self.leave(self.leaving[id])

    def on_save(self, id: int) -> None:
        value = self.line.saved[id]
        if self.is_known[value] and (value in self.moves or self.is_dropped(value)) and (self.kept < 0 or self.held[value] == 2):
            self.is_save_dropped[id] = 1
            self.need[value] += 1
        elif not self.save_again(value, id):
            self.original_refs[self.line.storage[value]] += 1

    def save_again(self, value: int, id: int) -> bool:
        """Backward itself saves what a replay lent it, as double backward does: the loan lasts until then."""
        if self.kept < 0:
            return False
        lent = next((save for save in self.transient if self.line.saved[save] == value), None)
        if lent is None:
            return False
        self.transient[id] = self.transient.pop(lent)
        self.is_loan_moved[id] = 1
        return True

    def on_demand(self, id: int) -> None:
        if self.kept < 0:
            self.seal()
            self.fetch_due()
        if not self.is_save_dropped[id]:
            return
        value = self.line.saved[id]
        self.clock = max(self.clock, self.rank[value])
        self.fetch_due()
        if value in self.moves:
            self.arrive(value)
        if not self.held[value]:
            self.replay(value, id)

    def on_release(self, id: int) -> None:
        value = self.line.saved[id]
        if self.transient:
            self.live -= self.transient.pop(id, 0)
        if self.is_save_dropped[id]:
            self.unneed(value)
        elif not self.is_loan_moved[id]:
            self.drop_original(self.line.storage[value])

    def on_return(self, id: int) -> None:
        if self.transient:
            self.live -= self.transient.pop(id, 0)

    def on_free(self, storage: int) -> None:
        if self.is_user_alive[storage]:
            self.is_user_alive[storage] = 0
            if not self.original_refs[storage]:
                self.live -= self.trace.storages[storage].bytes

    # -- forward -----------------------------------------------------------------------------------------------------

    def is_dropped(self, value: int) -> bool:
        producer = self.line.producer[value]
        return self.hold[value] > 0 and producer >= 0 and self.recorded[producer]

    def record(self, id: int) -> None:
        need, is_known = self.need, self.is_known
        for value in self.line.reads[id]:
            need[value] += 1
            if not is_known[value]:
                self.know(value)
        for value in self.line.outputs[id]:
            self.know(value)
            if self.hold[value] > 0:
                self.op_refs[id] += 1

    def know(self, value: int) -> None:
        """The tape makes a record of a value, and refers to it until backward begins."""
        self.is_known[value] = 1
        self.need[value] += 1
        if not self.is_dropped(value):
            self.hold_original(value)

    def hold_original(self, value: int) -> None:
        self.held[value] = 1
        if not self.line.is_source[value]:
            self.original_refs[self.line.storage[value]] += 1

    def clone_held(self, value: int) -> None:
        self.held[value] = 2
        self.live += self.line.bytes[value]
        if not self.line.is_source[value]:
            self.drop_original(self.line.storage[value])

    def seal(self) -> None:
        """Backward begins: the tape lets go of what no save and no lineage needs."""
        for value in range(len(self.hold) - 1, -1, -1):
            if self.is_known[value]:
                self.unneed(value)
        self.kept = sum(
            storage.bytes
            for storage, refs, alive in zip(self.trace.storages, self.original_refs, self.is_user_alive, strict=True)
            if refs and not alive and not storage.is_source
        )

    # -- moved values ------------------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """When the event at hand begins, less what was lost to copies."""
        return times_before(self.trace)[self.place] + self.replay_time

    def leave(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if not self.is_known[move.value]:
                self.know(move.value)
            if not self.channel(move).is_codec:
                run_ns = self.line.times[self.line.producer[move.value]]
                self.copies.begin(move, self.line.bytes[move.value], self.now_ns() + run_ns, is_out=True)

    def land(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if self.held[move.value] != 1:
                continue
            if self.channel(move).is_codec:
                self.live += self.kept_of(move)
                self.code(move, is_out=True)
            else:
                self.copies.wait(move.value, self.now_ns())
            self.held[move.value] = AWAY
            self.drop_original(self.line.storage[move.value])

    def channel(self, move: Move) -> Channel:
        return self.copies.channels[move.tier]

    def kept_of(self, move: Move) -> int:
        """The bytes that stay on the device."""
        channel = self.channel(move)
        return channel.kept(self.line.bytes[move.value]) if channel.is_codec else 0

    def code(self, move: Move, *, is_out: bool) -> None:
        """Encodes a value, or decodes it; both forms are there meanwhile."""
        size = self.line.bytes[move.value]
        self.charge(self.channel(move).scratch(size), is_replay=True)
        self.copies.begin(move, size, self.now_ns(), is_out=is_out)

    def fetch_due(self) -> None:
        while self.coming and self.coming[-1].fetch <= self.clock:
            move = self.coming.pop()
            if self.held[move.value] == AWAY:
                self.fetch(move)

    def fetch(self, move: Move) -> None:
        self.held[move.value] = 2
        self.live += self.line.bytes[move.value]
        self.code(move, is_out=False)
        self.live -= self.kept_of(move)

    def arrive(self, value: int) -> None:
        """A moved value is needed now."""
        if self.held[value] == AWAY:
            self.fetch(self.moves[value])
        if self.held[value] == 2:
            self.copies.wait(value, self.now_ns())

    # -- references --------------------------------------------------------------------------------------------------

    def drop_original(self, storage: int) -> None:
        refs = self.original_refs
        refs[storage] -= 1
        if not refs[storage] and not self.is_user_alive[storage] and not self.trace.storages[storage].is_source:
            self.live -= self.trace.storages[storage].bytes

    def unneed(self, value: int) -> None:
        stack = [value]
        while stack:
            value = stack.pop()
            self.need[value] -= 1
            if self.need[value]:
                continue
            if self.held[value]:
                self.let_go(value)
            elif self.line.producer[value] >= 0:
                self.unref_op(self.line.producer[value], stack)

    def unref_op(self, op: int, stack: list[int]) -> None:
        self.op_refs[op] -= 1
        if not self.op_refs[op]:
            stack.extend(self.line.reads[op])

    def let_go(self, value: int) -> None:
        if self.held[value] == 2:
            self.live -= self.line.bytes[value]
        elif self.held[value] == AWAY:
            self.live -= self.kept_of(self.moves[value])
        elif self.held[value] == 1 and not self.line.is_source[value]:
            self.drop_original(self.line.storage[value])
        self.held[value] = 0

    def charge(self, extra: int, *, is_replay: bool) -> None:
        high = self.live + extra
        if high > self.peak:
            self.peak, self.peak_place = high, self.place
        if self.high:
            at = self.cell[self.place]
            if high > self.high[at]:
                self.high[at] = high
        elif self.on_run is not None:
            self.on_run(self.place, high + self.trace.resident_bytes, is_replay)

    # -- backward ----------------------------------------------------------------------------------------------------

    def replay(self, target: int, save: int) -> None:
        ops = self.closure(target)
        self.left -= len(ops)
        if self.left < 0:
            raise TooManyReplays
        uses: dict[int, int] = {target: 1}
        for op in ops:
            for value in self.line.reads[op]:
                uses[value] = uses.get(value, 0) + 1
        for op in ops:
            self.replay_op(op, uses)
        if not self.held[target]:
            self.transient[save] = self.transient.get(save, 0) + self.line.bytes[target]

    def closure(self, target: int) -> list[int]:
        line, held, seen = self.line, self.held, set()
        stack = [target]
        while stack:
            op = line.producer[stack.pop()]
            if op not in seen:
                seen.add(op)
                stack.extend(u for u in line.reads[op] if not held[u])
        return sorted(seen)

    def replay_op(self, id: int, uses: dict[int, int]) -> None:
        line = self.line
        if self.moves:
            for value in line.reads[id]:
                if value in self.moves:
                    self.arrive(value)
        creates = line.creates[id]
        taken = self.copy_overwritten(id, uses) if line.writes[id] else {}
        self.charge(line.adds[id], is_replay=True)
        self.replayed += 1
        self.replay_time += line.times[id]
        retained = []
        for value in line.outputs[id]:
            is_new = value in creates
            if self.held[value] or not (self.need[value] or uses.get(value)):
                self.live -= 0 if is_new else taken.get(value, 0)
                continue
            if is_new:
                self.live += line.bytes[value]
                self.recomputed += line.bytes[value]
            if self.need[value] and self.hold[value] <= self.clock:
                self.held[value] = 2
                retained.append(value)
            elif not uses.get(value):
                self.live -= line.bytes[value]
        self.spend_reads(id, uses)
        for _ in retained:
            stack: list[int] = []
            self.unref_op(id, stack)
            for value in stack:
                self.unneed(value)

    def copy_overwritten(self, id: int, uses: dict[int, int]) -> dict[int, int]:
        """Gives each overwritten storage a private copy; returns its bytes by the value that is written into it."""
        taken = {}
        for old, new in self.line.writes[id]:
            size = self.line.bytes[old]
            if self.held[old] or uses[old] > 1:
                self.live += size
                self.recomputed += size
            else:
                uses[old] = NOTHING_LEFT
            taken[new] = size
        return taken

    def spend_reads(self, id: int, uses: dict[int, int]) -> None:
        for value in self.line.reads[id]:
            if uses[value] == NOTHING_LEFT:
                uses[value] = 0
                continue
            uses[value] -= 1
            if not uses[value] and not self.held[value]:
                self.live -= self.line.bytes[value]


NOTHING_LEFT = -1

AWAY = 3
