"""A training run under several budgets beside the plain one: the demo's result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from punar.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of all steps.

    Attributes:
        budget: as it was asked, or ``"plain"``.
        budget_bytes: the budget as bytes of the whole step; for the plain run, what it needs.
        predicted_peak_bytes, measured_peak_bytes: of the whole step. The measured one is the highest of the steps that obey the plan.
        time_ratio: seconds of forward and backward relative to the plain run's same step: the median over the steps that obey the plan.
        kept_bytes: what is held for backward when forward ends, measured in the last step.
        recomputed_bytes, replayed_operators: what backward computed again, measured in the last step.
        loss: of the last step.
        moved_bytes: copied off the device and back in the last step, each way counted.
        identical: whether every loss, and weights, buffers, optimizer and random state at the end, are the plain run's bit for bit.
    """

    budget: str
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    time_ratio: float
    kept_bytes: int
    recomputed_bytes: int
    replayed_operators: int
    loss: float
    identical: bool
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All rows of a demo, the plain run first."""

    device: str
    rows: tuple[Row, ...]

    @property
    def is_identical(self) -> bool:
        """Whether every run ended with the plain run's weights."""
        return all(row.identical for row in self.rows)

    @property
    def has_moves(self) -> bool:
        """Whether something was moved off the device in any run."""
        return any(row.moved_bytes for row in self.rows)

    def over_budget(self) -> tuple[Row, ...]:
        """The rows whose measured peak is above their budget."""
        return tuple(row for row in self.rows if row.measured_peak_bytes > row.budget_bytes)

    def to_json(self) -> str:
        """``{"device": ..., "rows": [...]}`` with the fields of ``Row``."""
        return json.dumps({"device": self.device, "rows": [asdict(row) for row in self.rows]}, indent=2)


HEADER = ("budget", "in bytes", "peak, predicted", "peak, measured", "time", "kept", "recomputed", "replayed ops", "loss", "identical")


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The cells of the table, under ``header``. Sizes are of the whole step, times relative to the plain run."""
    return [(*_cells(row), *([format_bytes(row.moved_bytes)] if comparison.has_moves else [])) for row in comparison.rows]


def header(comparison: Comparison) -> tuple[str, ...]:
    """The columns' names."""
    return (*HEADER, "moved") if comparison.has_moves else HEADER


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.budget,
        format_bytes(row.budget_bytes),
        format_bytes(row.predicted_peak_bytes),
        format_bytes(row.measured_peak_bytes),
        f"{row.time_ratio:.2f}x",
        format_bytes(row.kept_bytes),
        format_bytes(row.recomputed_bytes),
        str(row.replayed_operators),
        f"{row.loss:.6f}",
        "yes" if row.identical else "NO",
    )
