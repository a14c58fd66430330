"""A plan: what becomes of each value of a traced step, with what it is predicted to cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from punar.errors import PlanError
from punar.ir.lineage import NEVER, close, recorded_ops
from punar.ir.trace import Trace, read_json
from punar.plan.simulate import simulate

FORMAT = "punar-plan"
VERSION = 1

_WATCH_NS = 15_000
"""What a step takes beside its operators, for each of them, until it has been measured; see ``benchmarks/overhead.py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """What the runtime follows, without the trace: one row for each forward operator, in order.

    ``names``: operators. ``has_grad_mode``: whether they ran with gradients enabled. ``is_recorded``: whether a replay may need them.
    ``holds``: for each output value of a recorded operator (hold_from, rank of backward's first demand, bytes). ``signature``: of
    the first operator, with shapes: the plan is considered only for steps that begin so. ``peak_bytes``: what an operator allocates for a moment,
    its outputs included. ``backward``: (name, peak_bytes) of each backward operator.
    """

    signature: str
    names: tuple[str, ...]
    has_grad_mode: tuple[bool, ...]
    is_recorded: tuple[bool, ...]
    holds: tuple[tuple[tuple[int, int, int], ...], ...]
    peak_bytes: tuple[int, ...]
    backward: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An action for each value of one step.

    Attributes:
        fingerprint: of the trace it was made for.
        solver: the name of the solver that made it.
        budget_bytes: what it was asked to fit, whole step.
        peak_bytes, plain_peak_bytes: predicted peak with and without the plan, whole step.
        time_ns, plain_time_ns: predicted time with and without the plan.
        kept_bytes, recomputed_bytes, replayed_ops: what the simulator counts (see ``Simulation``).
        bound_ns: a proved lower bound on the time of any plan at this budget, or 0 where none was computed.
        gap_ns: what the step takes beside its operators and replays: the model's Python code, autograd, and seeing each operator.
        hold_from: for each value of the trace, from which demand on it is held (see the NOTE in ``simulate``).
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
    bound_ns: int
    gap_ns: int
    hold_from: tuple[int, ...] = field(repr=False)
    skeleton: Skeleton = field(repr=False)

    @property
    def step_time_ns(self) -> int:
        """Predicted time of the step as it runs, with what it takes beside its operators whatever the plan."""
        return self.time_ns + self.gap_ns

    @property
    def overhead(self) -> float:
        """Predicted extra time as a ratio to the plain step: 0.1 is a tenth slower."""
        return self.time_ns / max(self.plain_time_ns, 1) - 1

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
        del body["format"], body["version"]
        try:
            return _plan_from_body(body)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"the plan is damaged: {type(error).__name__}: {error}; solve for it again") from error

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
        return cls.from_json(read_text(path))


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file of ours, with an error of ours where that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"asked to write {path}, which failed: {error}; give a path that can be written") from error


def read_text(path: str | Path) -> str:
    """Reads a text file of ours, with an error of ours where that fails."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"asked to read {path}, which failed: {error}; give the path of a file that punar wrote") from error


def _plan_from_body(body: dict[str, Any]) -> Plan:
    raw = body.pop("skeleton")
    skeleton = Skeleton(
        signature=str(raw["signature"]),
        names=tuple(map(str, raw["names"])),
        has_grad_mode=tuple(map(bool, raw["has_grad_mode"])),
        is_recorded=tuple(map(bool, raw["is_recorded"])),
        holds=tuple(tuple((int(h), int(r), int(b)) for h, r, b in row) for row in raw["holds"]),
        peak_bytes=tuple(map(int, raw["peak_bytes"])),
        backward=tuple((str(name), int(size)) for name, size in raw["backward"]),
    )
    lengths = {len(skeleton.names), len(skeleton.has_grad_mode), len(skeleton.is_recorded), len(skeleton.holds), len(skeleton.peak_bytes)}
    if len(lengths) != 1:
        raise ValueError(f"the skeleton's rows have lengths {sorted(lengths)}")
    hold_from = tuple(map(int, body.pop("hold_from")))
    texts = {name: str(body.pop(name)) for name in ("fingerprint", "solver")}
    numbers = {name: int(value) for name, value in body.items()}
    return Plan(skeleton=skeleton, hold_from=hold_from, **texts, **numbers)  # type: ignore[arg-type]


def make_plan(trace: Trace, hold_from: Sequence[int], *, solver: str, budget_bytes: int, bound_ns: int = 0) -> Plan:
    """Closes ``hold_from`` over what replays need, has it judged, and writes it up as a plan."""
    closed = close(trace, hold_from)
    judged = simulate(trace, closed, is_closed=True)
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
        bound_ns=bound_ns,
        gap_ns=gap_ns_of(trace),
        hold_from=closed,
        skeleton=_skeleton(trace, closed),
    )


def gap_ns_of(trace: Trace) -> int:
    """What a traced step takes beside its operators: as it was measured, else by a rule of thumb."""
    return int(trace.meta.get("gap_ns", _WATCH_NS * len(trace.ops)))


def _skeleton(trace: Trace, hold_from: tuple[int, ...]) -> Skeleton:
    recorded = recorded_ops(trace, hold_from)
    rank = trace.demand_rank
    ops = trace.forward_ops
    sizes = [trace.storages[value.storage].bytes for value in trace.values]
    return Skeleton(
        signature=next((op.signature for op in ops if op.has_grad_mode), ""),
        names=tuple(op.name for op in ops),
        has_grad_mode=tuple(op.has_grad_mode for op in ops),
        is_recorded=tuple(recorded[op.id] for op in ops),
        holds=tuple(tuple((min(hold_from[v], NEVER), rank[v], sizes[v]) for v in op.outputs) if recorded[op.id] else () for op in ops),
        peak_bytes=tuple(op.peak_bytes for op in ops),
        backward=tuple((op.name, op.peak_bytes) for op in trace.ops if op.is_backward),
    )
