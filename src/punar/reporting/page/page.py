"""All that a page of one step shows, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from punar.plan.plan import write_text
from punar.reporting.explain import Explanation
from punar.reporting.page.block import Block
from punar.reporting.page.curve import Curve
from punar.reporting.page.memory import Memory
from punar.reporting.page.modules import ModuleRow
from punar.reporting.report import Report, StepLike

MOST_STEPS = 1000
"""Of how many steps what was measured is drawn at most; of more, each row stands for several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """What one step measured, or several in a row: their highest peaks and longest time. Units: bytes of the whole step, nanoseconds.

    ``first``: its number, from 1 on. ``measured_peak_bytes``, ``predicted_peak_bytes``: None where none was watched, or obeyed a plan.
    """

    first: int
    measured_peak_bytes: int | None
    predicted_peak_bytes: int | None
    time_ns: int
    is_traced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One step under a plan, or the plain one; all is predicted but ``report`` and ``steps``.

    Attributes:
        explanation: what sets the peak, what becomes of the values and why.
        curve: what memory costs in time.
        plain, planned: memory over time without and with the plan; the same where there is none.
        modules: by module. block: the plan of one block; None where forward is empty.
        report: what a ``Remat`` predicted and measured; None where nothing was run. steps: step by step.
    """

    explanation: Explanation
    curve: Curve
    plain: Memory
    planned: Memory
    modules: tuple[ModuleRow, ...]
    block: Block | None
    report: Report | None = None
    steps: tuple[StepRow, ...] = ()

    @property
    def has_plan(self) -> bool:
        """Whether the step obeys a plan."""
        return self.explanation.budget_bytes is not None

    def to_html(self) -> str:
        """The page, with all that it needs inside: it asks the network for nothing.

        Raises:
            MissingDependency: bokeh or jinja2 is not installed.
        """
        from punar.reporting.page.render import render

        return render(self)

    def save(self, path: str | Path) -> None:
        """Writes the page.

        Raises:
            MissingDependency: bokeh or jinja2 is not installed.
            PlanError: the file cannot be written.
        """
        write_text(path, self.to_html())


def step_rows(steps: Iterable[StepLike], most: int = MOST_STEPS) -> tuple[StepRow, ...]:
    """What steps measured, thinned to at most ``most`` rows: none hides its highest peak."""
    found = list(steps)
    size = max(1, -(-len(found) // most))
    return tuple(_row(start, found[start : start + size]) for start in range(0, len(found), size))


def _row(start: int, steps: Sequence[StepLike]) -> StepRow:
    return StepRow(
        first=start + 1,
        measured_peak_bytes=_highest([step.measured_peak_bytes for step in steps]),
        predicted_peak_bytes=_highest([step.predicted_peak_bytes for step in steps]),
        time_ns=max(step.time_ns for step in steps),
        is_traced=any(step.is_traced for step in steps),
    )


def _highest(sizes: Sequence[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
