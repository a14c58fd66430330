"""What a plan does with each value that autograd saved, and why, as far as the plan and its price tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from punar.ir.lineage import Lineage, lineage_of
from punar.ir.trace import Trace
from punar.plan.moves import Channel, Move
from punar.plan.plan import Plan
from punar.plan.playback import Playback
from punar.reporting.explain.places import module_of, pattern_of
from punar.units import format_bytes, format_seconds

MIB = 1 << 20

Action = Literal["kept", "recomputed", "moved", "compressed"]
ACTIONS: tuple[Action, ...] = ("kept", "recomputed", "moved", "compressed")
Cause = Literal["plain", "stays", "cannot", "dear", "start", "room", "cheap", "needed", "moved", "compressed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What becomes of the values that one operator makes, in one module or the same part of repeated ones. Predicted from measured times.

    Attributes:
        action: ``kept``, ``recomputed``, ``moved`` or ``compressed``. why: the reason, as a sentence.
        operator, module: who makes them; numbers that differ between repeated modules are ``*``.
        values, bytes: how many they are, and what their storages take.
        remake_ns_per_mib: what it would take, or takes, to make the largest of them again from what is held, for each MiB; None where it cannot be.
        replay_ns: what making them again takes under the plan, all of them together, without what else must be made again for that.
    """

    action: Action
    why: str
    operator: str
    module: str
    values: int
    bytes: int
    remake_ns_per_mib: float | None
    replay_ns: int


def choices_of(trace: Trace, plan: Plan | None, playback: Playback) -> tuple[tuple[Choice, ...], float]:
    """One choice for each operator, part of the model and reason, the largest first; and what a MiB that is dropped takes to be made again, on average."""
    reasons = _Reasons(trace, plan, playback)
    return reasons.choices(), reasons.paid_ns_per_mib


class _Reasons:
    """Sorts the saved values of a trace by what a plan does with them and why.

    ``replayed``: what each operator's replays take, in nanoseconds. ``dropped``: the bytes of its values that are dropped.
    ``paid_ns_per_mib``: what a MiB of what is dropped takes to be made again, on average.
    """

    def __init__(self, trace: Trace, plan: Plan | None, playback: Playback) -> None:
        self.trace, self.plan = trace, plan
        self.line: Lineage = lineage_of(trace)
        self.hold: Sequence[int] = plan.hold_from if plan else (0,) * len(trace.values)
        self.moves: dict[int, Move] = {move.value: move for move in plan.moves} if plan else {}
        self.replayed: dict[int, int] = defaultdict(int)
        for run in playback.runs:
            if run.is_replay:
                self.replayed[run.op] += run.takes_ns
        self.starts = {value for op in self.replayed for value in self.line.reads[op] if self.is_held(value)}
        self.dropped: dict[int, int] = defaultdict(int)
        for value in self.subjects():
            if not self.is_held(value):
                self.dropped[self.line.producer[value]] += self.line.bytes[value]
        self.paid_ns_per_mib = self.paid()

    def is_held(self, value: int) -> bool:
        return not self.hold[value]

    def subjects(self) -> tuple[int, ...]:
        """The values that forward made and autograd saved, one a storage."""
        made = (value for value in self.trace.saved_values() if self.line.producer[value] >= 0)
        forward = (value for value in made if not self.trace.ops[self.line.producer[value]].is_backward)
        return tuple({self.line.storage[value]: value for value in forward}.values())

    def paid(self) -> float:
        dropped = sum(self.dropped.values())
        return sum(self.replayed.values()) / dropped * MIB if dropped else 0.0

    def own_price(self, op: int) -> float:
        """Nanoseconds a MiB that an operator's replays take, by what was dropped of it."""
        return self.replayed[op] / max(self.dropped[op], 1) * MIB

    def choices(self) -> tuple[Choice, ...]:
        groups: dict[tuple[Action, Cause, str, str], list[int]] = defaultdict(list)
        for value in self.subjects():
            op = self.trace.ops[self.line.producer[value]]
            action = self.action(value)
            groups[action, self.cause(value, action), op.name, pattern_of(module_of(self.trace, op.id))].append(value)
        found = (self.choice(*key, values) for key, values in groups.items())
        return tuple(sorted(found, key=lambda choice: (-choice.bytes, choice.module, choice.operator)))

    def choice(self, action: Action, cause: Cause, operator: str, module: str, values: list[int]) -> Choice:
        largest = max(values, key=lambda value: self.line.bytes[value])
        return Choice(
            action=action,
            why=self.why(cause, largest),
            operator=operator,
            module=module,
            values=len(values),
            bytes=sum(self.line.bytes[value] for value in values),
            remake_ns_per_mib=self.price(largest),
            replay_ns=sum(self.replayed[op] for op in {self.line.producer[value] for value in values}),
        )

    def action(self, value: int) -> Action:
        if value in self.moves:
            return "compressed" if self.channel(value).is_codec else "moved"
        return "kept" if self.is_held(value) else "recomputed"

    def channel(self, value: int) -> Channel:
        assert self.plan is not None
        return self.plan.channels[self.moves[value].tier]

    def cause(self, value: int, action: Action) -> Cause:
        if action == "recomputed":
            return "needed" if self.own_price(self.line.producer[value]) > self.paid_ns_per_mib else "cheap"
        if action != "kept":
            return action
        if self.line.is_free[value]:
            return "stays"
        if not self.line.can_replay[value]:
            return "cannot"
        if self.plan is None or self.plan.drops_nothing:
            return "plain"
        if (self.price(value) or 0) > self.paid_ns_per_mib:
            return "dear"
        return "start" if value in self.starts else "room"

    def why(self, cause: Cause, value: int) -> str:
        match cause:
            case "plain":
                return "the plain step fits, nothing is dropped" if self.plan else "no plan: the plain step keeps all"
            case "stays":
                return "the step itself holds it as long, or asks for it again at once"
            case "cannot":
                return "its operator cannot be run again"
            case "dear":
                return "dearer to make again than what is dropped"
            case "start":
                return "what is dropped is made again from it"
            case "room":
                return "the budget has room for it"
            case "cheap":
                return "cheap to make again"
            case "needed":
                return "dear, but the budget needs its bytes"
            case "moved" | "compressed":
                return self.why_moved(value)

    def why_moved(self, value: int) -> str:
        channel, size = self.channel(value), self.line.bytes[value]
        takes = format_seconds((channel.write_ns(size) + channel.read_ns(size)) * MIB / max(size, 1))
        if channel.is_codec:
            return (
                f"{channel.name}: {format_bytes(channel.kept(size))} of {format_bytes(size)} stay; encoding and decoding take {takes} a MiB"
            )
        return f"{channel.name}: out and back take {takes} a MiB, beside the computation"

    def price(self, value: int) -> float | None:
        """Nanoseconds a MiB to make a value again from what is held; None where it cannot be."""
        size = self.line.bytes[value]
        if not self.line.can_replay[value] or not size:
            return None
        return sum(self.line.times[op] for op in self.lineage(value)) * MIB / size

    def lineage(self, value: int) -> set[int]:
        """The operators that would run."""
        line, found = self.line, set[int]()
        stack = [line.producer[value]]
        while stack:
            op = stack.pop()
            if op in found or op < 0:
                continue
            found.add(op)
            stack.extend(line.producer[read] for read in line.reads[op] if not self.is_held(read))
        return found


def totals(choices: Iterable[Choice]) -> dict[Action, int]:
    """The bytes of each action."""
    sizes = dict.fromkeys(ACTIONS, 0)
    for choice in choices:
        sizes[choice.action] += choice.bytes
    return sizes
