"""A plan: what becomes of each value of a traced step, with what it is predicted to cost."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from punar.errors import PlanError
from punar.ir.fields import Field, FieldError
from punar.ir.lineage import NEVER, close, recorded_ops
from punar.ir.trace import Trace, read_json
from punar.markup import html_table
from punar.plan.codecs import codec_of
from punar.plan.moves import Channel, Move, rounded
from punar.plan.simulate import Simulation, simulate
from punar.units import format_bytes, format_seconds

FORMAT = "punar-plan"
VERSION = 4

T = TypeVar("T")

_WATCH_NS = 15_000
"""What a step takes beside its operators, for each of them, until it has been measured; see ``benchmarks/overhead.py``."""


class MoveRow(NamedTuple):
    """A moved value by the rows of the forward operators that make it and ``land`` it, and its ``place`` among all that ``maker`` makes.

    ``fetch``, ``tier``: as in ``Move``; ``rank``: of backward's first demand; ``bytes``: of its storage.
    """

    maker: int
    place: int
    land: int
    fetch: int
    rank: int
    bytes: int
    tier: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """What the runtime follows, without the trace: one row for each forward operator, in order.

    ``names``: operators. ``has_grad_mode``: whether they ran with gradients enabled. ``is_recorded``: whether a replay may need them.
    ``holds``: for each output value of a recorded operator (hold_from, rank of backward's first demand, bytes). ``signature``: of
    the first operator, with shapes: the plan is considered only for steps that begin so. ``peak_bytes``: what an operator allocates for a moment,
    its outputs included. ``backward``: (name, peak_bytes) of each backward operator. ``moves``: of each moved value what the runtime needs.
    """

    signature: str
    names: tuple[str, ...]
    has_grad_mode: tuple[bool, ...]
    is_recorded: tuple[bool, ...]
    holds: tuple[tuple[tuple[int, int, int], ...], ...]
    peak_bytes: tuple[int, ...]
    backward: tuple[tuple[str, int], ...]
    moves: tuple[MoveRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An action for each value of one step.

    Attributes:
        fingerprint: of the trace it was made for.
        solver: the name of the solver that made it; ``nearby`` where it was made for the same step on other sizes and judged on these.
        budget_bytes: what it was asked to fit, whole step.
        peak_bytes, plain_peak_bytes: predicted peak with and without the plan, whole step.
        time_ns, plain_time_ns: predicted time with and without the plan.
        resident_bytes, source_bytes, source_gradient_bytes: there before the step; of these, what no operator that was seen made (parameters, buffers, the
            batch, gradients); of these, gradients.
        kept_bytes, recomputed_bytes, replayed_ops: what the simulator counts (see ``Simulation``).
        bound_ns: a proved lower bound on the time of any plan at this budget, or 0 where none was computed; of solver ``milp``, on that of the
            plans it is exact for.
        gap_ns: what the step takes beside its operators and replays: the model's Python code, autograd, and seeing each operator.
        hold_from: for each value of the trace, from which demand on it is held (see the NOTE in ``simulate``).
        moves: the values that leave the device meanwhile, or are held in fewer bytes; channels: where to, or how, as fast as they were measured.
        moved_bytes, copy_ns, stall_ns, coded_bytes, coding_ns: of the moves (see ``Simulation``).
    """

    fingerprint: str
    solver: str
    budget_bytes: int
    peak_bytes: int
    plain_peak_bytes: int
    time_ns: int
    plain_time_ns: int
    kept_bytes: int
    recomputed_bytes: int
    replayed_ops: int
    resident_bytes: int
    source_bytes: int
    source_gradient_bytes: int = 0
    bound_ns: int
    gap_ns: int
    hold_from: tuple[int, ...] = field(repr=False)
    skeleton: Skeleton = field(repr=False)
    moves: tuple[Move, ...] = field(default=(), repr=False)
    channels: tuple[Channel, ...] = ()
    moved_bytes: int = 0
    copy_ns: int = 0
    stall_ns: int = 0
    coded_bytes: int = 0
    coding_ns: int = 0

    @property
    def drops_nothing(self) -> bool:
        """Whether it holds everything on the device, as it is."""
        return not self.moves and not any(self.skeleton.is_recorded)

    @property
    def leaves_device(self) -> bool:
        """Whether it moves values to a place off the device."""
        return bool(self.off_device)

    @property
    def off_device(self) -> tuple[Channel, ...]:
        """The places off the device that it moves values to."""
        used = {move.tier for move in self.moves}
        return tuple(channel for tier, channel in enumerate(self.channels) if tier in used and not channel.is_codec)

    @property
    def lossy_codecs(self) -> tuple[str, ...]:
        """The codecs that it rounds values with."""
        found = {codec_of(self.channels[move.tier].name) for move in self.moves}
        return tuple(sorted({known[0].name for known in found if known is not None and not known[0].is_exact}))

    def judged(self, trace: Trace) -> Simulation:
        """What the plan costs by the times of a trace, which is that it was made for or that one timed anew."""
        return simulate(trace, self.hold_from, is_closed=True, moves=self.moves, channels=self.channels)

    @property
    def step_time_ns(self) -> int:
        """Predicted time of the step as it runs, with what it takes beside its operators whatever the plan."""
        return self.time_ns + self.gap_ns

    @property
    def overhead(self) -> float:
        """Predicted extra time as a ratio to the plain step: 0.1 is a tenth slower."""
        return self.time_ns / max(self.plain_time_ns, 1) - 1

    def _repr_html_(self) -> str:
        rows = [
            ("peak of the whole step", format_bytes(self.peak_bytes), format_bytes(self.plain_peak_bytes)),
            ("time of its operators", f"{format_seconds(self.time_ns)} ({self.overhead:+.1%})", format_seconds(self.plain_time_ns)),
            ("kept for backward", format_bytes(self.kept_bytes), "-"),
            ("recomputed", f"{format_bytes(self.recomputed_bytes)} by {self.replayed_ops} operators", "-"),
        ]
        rows += [("moved, both ways", format_bytes(self.moved_bytes), "-")] if self.moved_bytes else []
        rows += [("compressed", format_bytes(self.coded_bytes), "-")] if self.coded_bytes else []
        title = f"Plan of solver {self.solver} for {format_bytes(self.budget_bytes)}, predicted"
        return html_table(title, ("", "planned", "plain"), rows)

    def to_json(self) -> str:
        """Writes the plan as JSON; ``from_json`` reads it back equal."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads what ``to_json`` wrote.

        Raises:
            PlanError: the text is not a plan of ours, is damaged, or is of another version.
        """
        body = read_json(text, FORMAT, VERSION)
        try:
            plan = _plan_from_body(body)
            check(plan)
        except FieldError as error:
            raise PlanError(f"the plan is damaged: {error}; solve for it again") from error
        return plan

    def save(self, path: str | Path) -> None:
        """Writes the plan to a file.

        Raises:
            PlanError: the file cannot be written.
        """
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan from a file.

        Raises:
            PlanError: the file cannot be read or holds no plan of ours.
        """
        return read_file(path, cls.from_json)


def read_file(path: str | Path, parse: Callable[[str], T]) -> T:
    """Reads one of our files and has what is said of its contents name it."""
    text = read_text(path)
    try:
        return parse(text)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file of ours, with an error of ours where that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        raise PlanError(f"asked to write {path}, which failed: {error}; give a path that can be written") from error


def read_text(path: str | Path) -> str:
    """Reads a text file of ours, with an error of ours where that fails."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        raise PlanError(f"asked to read {path}, which failed: {error}; give the path of a file that punar wrote") from error


_TEXTS = ("fingerprint", "solver")
_PEAKS = ("budget_bytes", "peak_bytes", "plain_peak_bytes", "resident_bytes", "source_bytes", "source_gradient_bytes")
_COSTS = (
    "time_ns",
    "plain_time_ns",
    "bound_ns",
    "gap_ns",
    "kept_bytes",
    "recomputed_bytes",
    "replayed_ops",
    "moved_bytes",
    "copy_ns",
    "stall_ns",
    "coded_bytes",
    "coding_ns",
)
_SPEEDS = tuple(f.name for f in fields(Channel) if f.name != "name")
_MOST_COST = 1 << 62
"""Sums over a step may exceed what one of its operators can take."""


def _plan_from_body(body: dict[str, Any]) -> Plan:
    """Reads each field for itself; ``check`` sees whether they go together.

    Raises:
        FieldError: a field is not what it must be.
    """
    part = Field("", body).members(("format", "version", *_TEXTS, *_PEAKS, *_COSTS, "hold_from", "skeleton", "moves", "channels"))
    texts = {name: part[name].text() for name in _TEXTS}
    numbers = {name: part[name].number(most=_MOST_COST) for name in (*_PEAKS, *_COSTS)}
    hold_from = part["hold_from"].numbers(most=NEVER)
    moves = tuple(_move_from(move) for move in part["moves"].items())
    channels = tuple(_channel_from(channel) for channel in part["channels"].items())
    bones = _skeleton_from(part["skeleton"])
    return Plan(**texts, **numbers, hold_from=hold_from, skeleton=bones, moves=moves, channels=channels)  # type: ignore[arg-type]


def _move_from(found: Field) -> Move:
    part = found.members(("value", "land", "fetch", "tier"))
    return Move(**{name: part[name].number() for name in ("value", "land", "fetch", "tier")})


def _channel_from(found: Field) -> Channel:
    part = found.members(("name", *_SPEEDS))
    return Channel(name=part["name"].text(), **{name: part[name].number() for name in _SPEEDS})


def _skeleton_from(found: Field) -> Skeleton:
    part = found.members(("signature", "names", "has_grad_mode", "is_recorded", "holds", "peak_bytes", "backward", "moves"))
    rows = {name: len(part[name].items()) for name in ("names", "has_grad_mode", "is_recorded", "holds", "peak_bytes")}
    if len({*rows.values()}) != 1:
        raise FieldError(f"skeleton's rows are not equally many: {', '.join(f'{name} {count}' for name, count in rows.items())}")
    return Skeleton(
        signature=part["signature"].text(),
        names=part["names"].texts(),
        has_grad_mode=part["has_grad_mode"].flags(),
        is_recorded=part["is_recorded"].flags(),
        holds=tuple(tuple(_hold_from_row(hold) for hold in row.items()) for row in part["holds"].items()),
        peak_bytes=part["peak_bytes"].numbers(),
        backward=tuple(_backward_from_row(row) for row in part["backward"].items()),
        moves=tuple(MoveRow(*(column.number() for column in row.columns(*MoveRow._fields))) for row in part["moves"].items()),
    )


def _hold_from_row(row: Field) -> tuple[int, int, int]:
    hold_from, rank, size = row.columns("hold_from", "rank", "bytes")
    return hold_from.number(most=NEVER), rank.number(), size.number()


def _backward_from_row(row: Field) -> tuple[str, int]:
    name, size = row.columns("name", "peak_bytes")
    return name.text(), size.number()


def check(plan: Plan) -> None:
    """Raises ``FieldError`` where parts of a plan contradict one another, so that one of them must be damaged."""
    if not re.fullmatch("[0-9a-f]{32}", plan.fingerprint):
        raise FieldError(f"fingerprint is {plan.fingerprint!r}, it must be 32 hexadecimal digits")
    if not plan.solver:
        raise FieldError("solver is empty, it must name the solver")
    for name in ("peak_bytes", "plain_peak_bytes"):
        if getattr(plan, name) < plan.resident_bytes:
            raise FieldError(f"{name} is {getattr(plan, name)}, less than the {plan.resident_bytes} B of resident_bytes")
    if plan.time_ns < plan.plain_time_ns:
        raise FieldError(f"time_ns is {plan.time_ns}, less than the {plan.plain_time_ns} ns of plain_time_ns")
    _check_holds(plan)
    _check_moves(plan)


def _check_holds(plan: Plan) -> None:
    """The skeleton repeats what ``hold_from`` says of the values that replays make or start from.

    Every value that is dropped and held again later is among them (``lineage.close``), of the others some.
    """
    bones = plan.skeleton
    for place, (is_recorded, row) in enumerate(zip(bones.is_recorded, bones.holds, strict=True)):
        if is_recorded != bool(row):
            raise FieldError(f"skeleton.holds[{place}] has {len(row)} values, skeleton.is_recorded[{place}] is {is_recorded}")
    rows = [hold for row in bones.holds for hold in row]
    ranks = [rank for _, rank, _ in rows if rank]
    if len(ranks) != len(set(ranks)):
        raise FieldError("skeleton.holds gives two values the same rank")
    here, there = Counter(hold for hold, _, _ in rows), Counter(plan.hold_from)
    for hold in here.keys() | there.keys():
        if here[hold] > there[hold] or (0 < hold < NEVER and here[hold] < there[hold]):
            raise FieldError(f"hold_from has {there[hold]} times {hold}, skeleton.holds {here[hold]} times: they are not of one plan")


def _check_moves(plan: Plan) -> None:
    """The skeleton repeats what ``moves`` says, and nothing that is dropped moves."""
    if tuple((row.fetch, row.tier) for row in plan.skeleton.moves) != tuple((move.fetch, move.tier) for move in plan.moves):
        raise FieldError("skeleton.moves and moves are not of one plan")
    for place, (row, move) in enumerate(zip(plan.skeleton.moves, plan.moves, strict=True)):
        if not row.maker < row.land < len(plan.skeleton.names):
            raise FieldError(
                f"skeleton.moves[{place}] lands before row {row.land} of {len(plan.skeleton.names)}, it is made by row {row.maker}"
            )
        if move.tier >= len(plan.channels):
            raise FieldError(f"moves[{place}].tier is {move.tier}, there are {len(plan.channels)} channels")
        if move.value >= len(plan.hold_from) or plan.hold_from[move.value]:
            raise FieldError(f"moves[{place}] moves value {move.value}, which is not held in forward")
    for channel in plan.channels:
        if not channel.write_bytes_per_s or not channel.read_bytes_per_s:
            raise FieldError(f"channel {channel.name!r} has no speed")
        if channel.is_codec != (codec_of(channel.name) is not None) or not channel.block_bytes:
            raise FieldError(
                f"channel {channel.name!r} keeps {channel.block_kept} B of each {channel.block_bytes}, which no codec of that name does"
            )


def plain_plan(trace: Trace) -> Plan:
    """The plan of a step that holds everything."""
    plan = make_plan(trace, (0,) * len(trace.values), solver="none", budget_bytes=0)
    return replace(plan, budget_bytes=plan.peak_bytes)


def make_plan(
    trace: Trace,
    hold_from: Sequence[int],
    *,
    solver: str,
    budget_bytes: int,
    bound_ns: int = 0,
    moves: Sequence[Move] = (),
    channels: Sequence[Channel] = (),
) -> Plan:
    """Closes ``hold_from`` over what replays need, has it judged, and writes it up as a plan."""
    closed = tuple(min(hold, NEVER) for hold in close(trace, hold_from, rounded(moves, channels)))
    judged = simulate(trace, closed, is_closed=True, moves=moves, channels=channels)
    plain = simulate(trace, (0,) * len(trace.values))
    return Plan(
        fingerprint=trace.fingerprint,
        solver=solver,
        budget_bytes=budget_bytes,
        peak_bytes=judged.peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
        time_ns=judged.time_ns,
        plain_time_ns=plain.time_ns,
        kept_bytes=judged.kept_bytes,
        recomputed_bytes=judged.recomputed_bytes,
        replayed_ops=judged.replayed_ops,
        resident_bytes=trace.resident_bytes,
        source_bytes=int(trace.meta.get("source_bytes", trace.resident_bytes)),
        source_gradient_bytes=int(trace.meta.get("source_gradient_bytes", 0)),
        bound_ns=bound_ns,
        gap_ns=gap_ns_of(trace),
        hold_from=closed,
        skeleton=_skeleton(trace, closed, moves),
        moves=tuple(moves),
        channels=tuple(channels) if moves else (),
        moved_bytes=judged.moved_bytes,
        copy_ns=judged.copy_ns,
        stall_ns=judged.stall_ns,
        coded_bytes=judged.coded_bytes,
        coding_ns=judged.coding_ns,
    )


def moved(plan: Plan, extra_bytes: int) -> Plan:
    """The same plan beside more resident bytes."""
    if not extra_bytes:
        return plan
    sizes = {name: getattr(plan, name) + extra_bytes for name in ("budget_bytes", "peak_bytes", "plain_peak_bytes", "resident_bytes")}
    return replace(plan, **sizes)


def gap_ns_of(trace: Trace) -> int:
    """What a traced step takes beside its operators: as it was measured, else by a rule of thumb."""
    return int(trace.meta.get("gap_ns", _WATCH_NS * len(trace.ops)))


def _skeleton(trace: Trace, hold_from: tuple[int, ...], moves: Sequence[Move]) -> Skeleton:
    recorded = recorded_ops(trace, hold_from)
    rank = trace.demand_rank
    ops = trace.forward_ops
    sizes = [trace.storages[value.storage].bytes for value in trace.values]
    row_of = {op.id: row for row, op in enumerate(ops)} if moves else {}
    makers = [trace.ops[trace.values[move.value].producer] for move in moves]
    return Skeleton(
        signature=next((op.signature for op in ops if op.has_grad_mode), ""),
        names=tuple(op.name for op in ops),
        has_grad_mode=tuple(op.has_grad_mode for op in ops),
        is_recorded=tuple(recorded[op.id] for op in ops),
        holds=tuple(tuple((hold_from[v], rank[v], sizes[v]) for v in op.outputs) if recorded[op.id] else () for op in ops),
        peak_bytes=tuple(op.peak_bytes for op in ops),
        backward=tuple((op.name, op.peak_bytes) for op in trace.ops if op.is_backward),
        moves=tuple(
            MoveRow(
                maker=row_of[maker.id],
                place=maker.outputs.index(move.value),
                land=row_of[move.land],
                fetch=move.fetch,
                rank=rank[move.value],
                bytes=sizes[move.value],
                tier=move.tier,
            )
            for move, maker in zip(moves, makers, strict=True)
        ),
    )
