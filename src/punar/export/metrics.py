"""What is exported of a step, once for all exporters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from punar.torch.session import StepStats

_NS_PER_S = 1_000_000_000

Unit = Literal["bytes", "seconds", "ratio", ""]
Kind = Literal["last", "sum", "spread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of a step.

    Attributes:
        name: without its unit. unit: ``bytes``, ``seconds``, ``ratio``, or "" for a count.
        kind: what is told of several steps: the ``last`` one's, their ``sum``, or how they are ``spread``.
        read: the number of a step; None where it has none, which leaves the last one standing.
        text: what it is, as a sentence.
    """

    name: str
    unit: Unit
    kind: Kind
    read: Callable[[StepStats], int | float | None]
    text: str

    @property
    def full_name(self) -> str:
        """With its unit: ``measured_peak_bytes``."""
        return f"{self.name}_{self.unit}" if self.unit else self.name


METRICS = (
    Metric(name="step", unit="seconds", kind="spread", read=lambda s: s.time_ns / _NS_PER_S, text="Wall time of the block."),
    Metric(
        name="measured_peak",
        unit="bytes",
        kind="last",
        read=lambda s: s.measured_peak_bytes,
        text="Peak of the whole step as counted while it ran, of the last block that was watched.",
    ),
    Metric(
        name="predicted_peak",
        unit="bytes",
        kind="last",
        read=lambda s: s.predicted_peak_bytes,
        text="Peak of the whole step that the plan promised.",
    ),
    Metric(
        name="budget",
        unit="bytes",
        kind="last",
        read=lambda s: None if s.plan is None else s.plan.budget_bytes,
        text="Budget of the plan obeyed.",
    ),
    Metric(
        name="plan_overhead",
        unit="ratio",
        kind="last",
        read=lambda s: None if s.plan is None else s.plan.overhead,
        text="Extra time of the plan obeyed, in parts of the plain step's: predicted.",
    ),
    Metric(
        name="kept",
        unit="bytes",
        kind="last",
        read=lambda s: s.kept_bytes,
        text="What is held for backward, by the plan's account.",
    ),
    Metric(name="recomputed", unit="bytes", kind="sum", read=lambda s: s.recomputed_bytes, text="What replays allocated."),
    Metric(name="replayed_operators", unit="", kind="sum", read=lambda s: s.replayed_operators, text="Operators that ran again."),
    Metric(name="moved", unit="bytes", kind="sum", read=lambda s: s.moved_bytes, text="Copied off the device and back, each way counted."),
    Metric(name="stall", unit="seconds", kind="sum", read=lambda s: s.stall_ns / _NS_PER_S, text="Time waited for copies."),
    Metric(name="coded", unit="bytes", kind="sum", read=lambda s: s.coded_bytes, text="Of the values that were held in fewer bytes."),
    Metric(name="coding", unit="seconds", kind="sum", read=lambda s: s.coding_ns / _NS_PER_S, text="Time taken by encoding and decoding."),
    Metric(
        name="unmoved_values",
        unit="",
        kind="sum",
        read=lambda s: s.unmoved_values,
        text="Values that were to be moved or compressed and could not.",
    ),
    Metric(name="drifts", unit="", kind="sum", read=lambda s: s.drifts, text="Notes of drift: see docs/drift.md."),
    Metric(
        name="rescues", unit="", kind="sum", read=lambda s: s.rescues, text="Times that a step was repeated since it ran out of memory."
    ),
    Metric(name="traced_steps", unit="", kind="sum", read=lambda s: int(s.is_traced), text="Blocks that were recorded."),
    Metric(
        name="evicted", unit="bytes", kind="sum", read=lambda s: s.evicted_bytes, text="Dropped to keep a recorded step under its budget."
    ),
)
"""All numbers of a step. A count of steps is that of the ``spread`` one."""
