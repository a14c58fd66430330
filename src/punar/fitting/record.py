"""What a search for a size found, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from punar.markup import html_table
from punar.plan import Plan
from punar.reporting.table import format_columns
from punar.units import format_bytes, format_seconds

Goal = Literal["batch", "length", "throughput"]
GOALS: tuple[Goal, ...] = ("batch", "length", "throughput")

HEADER = ("size", "steps", "plain peak", "least peak", "plan's peak", "extra", "time", "per second", "fits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One size whose step was traced and planned for.

    Attributes:
        size: what ``make_batch`` was given.
        micro_batches: how many such batches make an optimizer's step; above 1, gradients are there before each step, as from the second one on.
        plain_peak_bytes, least_peak_bytes: predicted peaks of the plain step, and of the plan of least peak; None where the step had to run to be recorded
            and ran out of memory.
        plan: the fastest that fits the budget; None where none does.
        time_ns: predicted time of all micro-batches under the plan, and of the optimizer's step where it was told; 0 without a plan.
        measured_peak_bytes, measured_ns: of a real step under the plan; None where there was none, or it ran out of memory.
        is_feasible: whether a plan fits, and a real step, where there was one, stayed within the budget.
    """

    size: int
    micro_batches: int = 1
    plain_peak_bytes: int | None
    least_peak_bytes: int | None
    plan: Plan | None = field(default=None, repr=False)
    time_ns: int = 0
    measured_peak_bytes: int | None = None
    measured_ns: int | None = None
    is_feasible: bool

    @property
    def per_second(self) -> float:
        """How many of what ``size`` counts are done in a second, as measured where it was, else as predicted; 0 where nothing fits."""
        time_ns = self.time_ns if self.measured_ns is None else self.measured_ns
        return self.size * self.micro_batches / time_ns * 1e9 if time_ns and self.is_feasible else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The trial as JSON-able data, of the plan its predicted peak and extra time."""
        names = ("size", "micro_batches", "plain_peak_bytes", "least_peak_bytes", "time_ns", "measured_peak_bytes", "measured_ns")
        return {
            **{name: getattr(self, name) for name in (*names, "is_feasible", "per_second")},
            "peak_bytes": None if self.plan is None else self.plan.peak_bytes,
            "overhead": None if self.plan is None else self.plan.overhead,
        }

    def row(self) -> tuple[str, ...]:
        """The cells under ``HEADER``."""
        plan = self.plan
        peaks = tuple("-" if size is None else format_bytes(size) for size in (self.plain_peak_bytes, self.least_peak_bytes))
        if plan is None:
            return (
                str(self.size),
                str(self.micro_batches),
                *peaks,
                *["-"] * 4,
                "no, out of memory" if self.least_peak_bytes is None else "no",
            )
        told = (format_seconds(self.time_ns if self.measured_ns is None else self.measured_ns), f"{self.per_second:.4g}")
        fits = "no, measured" if not self.is_feasible else "predicted" if self.measured_peak_bytes is None else "measured"
        return (str(self.size), str(self.micro_batches), *peaks, format_bytes(plan.peak_bytes), f"{plan.overhead:.1%}", *told, fits)

    def failed(self, measured_peak_bytes: int | None) -> Trial:
        """The same, known not to fit."""
        return replace(self, is_feasible=False, measured_peak_bytes=measured_peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The largest size that fits a budget, or the one of most samples a second. ``str()`` of it is a text with a table.

    Attributes:
        maximize: what was asked for. device: the name of the device. budget_bytes: of the whole step.
        size: the answer, as ``make_batch`` takes it. micro_batches: how many such batches to accumulate in an optimizer's step.
        plan: what ``punar.Remat(plan=...)`` obeys in a step of that size. peak_bytes: its predicted peak.
        measured_peak_bytes: of a real step under the plan; None where none was run.
        per_second: how many of what ``size`` counts (samples, or positions of each sample) are done in a second; measured where ``is_measured``.
        next_size, next_peak_bytes: the next larger size, and the least peak that any plan known reaches there, above the budget; None where
            the search was ended by ``most`` or ``trials``, the peak also where the step ran out of memory when it was recorded.
        trials: every size that was traced, by size. candidates: of ``"throughput"`` those that fit, the most per second first.
        unknown: the operator whose result depends on data, or ``its path``, so that steps were not traced but ran to be recorded; "" where they were traced.
    """

    maximize: Goal
    device: str
    budget_bytes: int
    size: int
    micro_batches: int
    plan: Plan = field(repr=False)
    peak_bytes: int
    measured_peak_bytes: int | None
    per_second: float
    is_measured: bool
    next_size: int | None
    next_peak_bytes: int | None
    trials: tuple[Trial, ...] = field(repr=False)
    candidates: tuple[Trial, ...] = field(default=(), repr=False)
    unknown: str = ""

    @property
    def is_confirmed(self) -> bool:
        """Whether a real step of this size ran under the plan, within the budget."""
        return self.measured_peak_bytes is not None

    def to_dict(self) -> dict[str, Any]:
        """The answer as JSON-able data, without the plan."""
        names = ("maximize", "device", "budget_bytes", "size", "micro_batches", "peak_bytes", "measured_peak_bytes", "per_second")
        rest = ("is_measured", "is_confirmed", "next_size", "next_peak_bytes", "unknown")
        return {
            **{name: getattr(self, name) for name in (*names, *rest)},
            "trials": [trial.to_dict() for trial in self.trials],
            "candidates": [trial.to_dict() for trial in self.candidates],
        }

    @property
    def sentence(self) -> str:
        """The answer in a line."""
        peak = f"{format_bytes(self.peak_bytes)} predicted{f' from a step that ran, since {self.unknown} depends on data' if self.unknown else ''}"
        if self.measured_peak_bytes is not None:
            peak += f", {format_bytes(self.measured_peak_bytes)} measured"
        of = f"of {format_bytes(self.budget_bytes)} on {self.device}"
        if self.maximize == "throughput":
            steps = f"{self.micro_batches} accumulated batches of {self.size}" if self.micro_batches > 1 else f"a batch of {self.size}"
            return f"most samples a second: {steps}, {self.per_second:.4g} {'measured' if self.is_measured else 'predicted'}; peak {peak}, {of}"
        return f"largest {self.maximize}: {self.size}, {self.plan.overhead:+.1%} time; peak {peak}, {of}; {self._end()}"

    def _end(self) -> str:
        """What is known of the next larger size."""
        if self.next_size is None:
            return "larger ones were not tried"
        if self.next_peak_bytes is None:
            return f"{self.next_size} ran out of memory"
        return f"{self.next_size} would need {format_bytes(self.next_peak_bytes - self.budget_bytes)} more than that"

    @property
    def header(self) -> tuple[str, ...]:
        """The table's columns."""
        return HEADER

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells under ``HEADER``: the candidates, best first, or all trials by size."""
        return [trial.row() for trial in self.candidates or self.trials]

    def __str__(self) -> str:
        return f"{self.sentence}\n{format_columns(self.header, self.rows())}"

    def _repr_html_(self) -> str:
        return html_table(self.sentence, self.header, self.rows(), left=0)
