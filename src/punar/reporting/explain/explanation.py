"""The whole explanation of one step: plain data first, then texts and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from punar.errors import PlanMismatch, UsageError
from punar.ir.trace import Trace
from punar.markup import html_table
from punar.plan.plan import Plan
from punar.plan.playback import Peak, Playback, play
from punar.reporting.explain.advice import Advice, advise, floor_of
from punar.reporting.explain.choices import ACTIONS, Choice, choices_of, totals
from punar.reporting.explain.holders import PARTS, Holder, grouped, holders_at
from punar.reporting.explain.moment import Moment
from punar.reporting.explain.places import title_of
from punar.reporting.table import format_columns
from punar.units import format_bytes, format_seconds

SHOWN = 12
"""How many rows of a table a text shows, before one for the others; the data has them all."""

_WORTH_A_ROW = 0.001
"""What is less than this part of the saved bytes is among the others."""


class Table(NamedTuple):
    """A table for people; the first ``left`` columns are aligned to the left."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int


class Section(NamedTuple):
    """A part of the text. ``notes``: sentences under the table, if there is one."""

    title: str
    notes: tuple[str, ...] = ()
    table: Table | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The plan of least peak, as ``budget="min"`` makes it, or the explained one where that is lower. Units: bytes of the whole step, predicted.

    Attributes:
        bytes: its peak. overhead: its extra time as a ratio to the plain step.
        floor_bytes: what no plan of these operators can go below (proved). text: these as a sentence.
    """

    bytes: int
    overhead: float
    floor_bytes: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a step needs the memory it does; ``str()`` of it is a text for people. All is predicted, from operators' times as measured.

    Attributes:
        device: where the step was recorded.
        solver, budget_bytes, overhead: of the plan; ``plain``, None and 0 without one.
        plain_peak_bytes: of the step without a plan.
        peak: the moment of the most bytes.
        holders: what each module holds then; they add up to the peak's bytes.
        choices: what was kept, recomputed, moved and compressed, and why.
        dropped_ns_per_mib: what a MiB of what is recomputed takes to be made again, on average; 0 where nothing is.
        least: the least peak that is known.
        advice: what would lower that, the most first.
    """

    device: str
    solver: str
    budget_bytes: int | None
    overhead: float
    plain_peak_bytes: int
    peak: Moment
    holders: tuple[Holder, ...]
    choices: tuple[Choice, ...]
    dropped_ns_per_mib: float
    least: Least
    advice: tuple[Advice, ...]

    def to_dict(self) -> dict[str, Any]:
        """The explanation as JSON-able data."""
        body = asdict(self)
        body["holders"] = [asdict(holder) | {"bytes": holder.bytes, "share": self._share(holder.bytes)} for holder in self.holders]
        body["peak"]["text"] = str(self.peak)
        body["totals"] = dict(totals(self.choices))
        return body

    def sections(self) -> tuple[Section, ...]:
        """The text's parts, in order."""
        return (
            Section(f"The peak of {self._title()}", (str(self.peak),)),
            Section("What is there at the peak", table=self._holders_table()),
            Section("What becomes of what autograd saves, and why", self._totals_notes(), self._choices_table()),
            Section("The least peak", (self.least.text,)),
            Section("What would lower it", self._advice_notes()),
        )

    def __str__(self) -> str:
        return "\n\n".join(map(_section_text, self.sections()))

    def _repr_html_(self) -> str:
        empty = Table((), (), 0)
        parts = ((section, section.table or empty) for section in self.sections())
        return "".join(html_table(s.title, table.header, table.rows, left=table.left, notes=s.notes) for s, table in parts)

    def _title(self) -> str:
        if self.budget_bytes is None:
            return f"the plain step, {self.device}"
        return (
            f"a step within {format_bytes(self.budget_bytes)}, solver {self.solver}, {self.overhead:+.1%} time, {self.device}; "
            f"plain {format_bytes(self.plain_peak_bytes)}"
        )

    def _share(self, size: int) -> float:
        return size / max(self.peak.bytes, 1)

    def _holders_table(self) -> Table:
        rows = grouped(self.holders)
        shown = [name for name in PARTS if any(getattr(row, name) for row in rows)]
        titles = [name.removesuffix("_bytes") for name in shown]
        cells = [
            [row.module, str(row.modules), *(_size(getattr(row, name)) for name in shown), *self._sum(row.bytes)] for row in rows[:SHOWN]
        ]
        if rest := rows[SHOWN:]:
            parts = [_size(sum(getattr(row, name) for row in rest)) for name in shown]
            modules = str(sum(row.modules for row in rest))
            cells.append(["others", modules, *parts, *self._sum(sum(row.bytes for row in rest))])
        return Table(("module", "×", *titles, "all", "share"), cells, left=1)

    def _sum(self, size: int) -> tuple[str, str]:
        return format_bytes(size), f"{self._share(size):.1%}"

    def _totals_notes(self) -> tuple[str, ...]:
        sizes = totals(self.choices)
        listed = ", ".join(f"{format_bytes(sizes[action])} {action}" for action in ACTIONS if sizes[action])
        text = f"Of all that forward makes and backward needs: {listed or 'nothing'}."
        if self.dropped_ns_per_mib:
            text += f" What is recomputed takes {format_seconds(self.dropped_ns_per_mib)} a MiB on average: cheap and dear are said beside that."
        return (text,)

    def _advice_notes(self) -> tuple[str, ...]:
        texts = tuple(advice.text for advice in self.advice) or ("Nothing that is known here, by a hundredth or more.",)
        if not self.peak.outside_bytes:
            return texts
        lead = (
            f"The peak of {format_bytes(self.peak.outside_bytes)} is lower where what sets it allocates less: an optimizer with `foreach=False` or `fused=True`, "
            "for example, makes no lists of temporaries. What forward and backward need is lowered by these:"
        )
        return (lead, *texts)

    def _choices_table(self) -> Table:
        header = ("", "operator", "module", "why", "values", "bytes", "again, a MiB", "replays")
        least_bytes = _WORTH_A_ROW * sum(choice.bytes for choice in self.choices)
        shown = [choice for choice in self.choices[:SHOWN] if choice.bytes >= least_bytes]
        rows = [
            [
                choice.action,
                choice.operator,
                choice.module,
                choice.why,
                str(choice.values),
                format_bytes(choice.bytes),
                "-" if choice.remake_ns_per_mib is None else format_seconds(choice.remake_ns_per_mib),
                format_seconds(choice.replay_ns) if choice.replay_ns else "-",
            ]
            for choice in shown
        ]
        if rest := self.choices[len(shown) :]:
            replays = sum(choice.replay_ns for choice in rest)
            sizes = [str(sum(choice.values for choice in rest)), format_bytes(sum(choice.bytes for choice in rest))]
            rows.append(["others", "", "", "", *sizes, "-", format_seconds(replays) if replays else "-"])
        return Table(header, rows, left=4)


def explain_step(trace: Trace, plan: Plan | None, least: Plan) -> Explanation:
    """Explains a traced step under a plan, or the plain one.

    Args:
        trace: with as many resident bytes as the plan counts.
        least: the plan of least peak, of which the minimum is told.

    Raises:
        UsageError: the plan is none.
        PlanMismatch: it was made for another step.
    """
    for found in (plan, least):
        check_plan(trace, found)
    played = play_plan(trace, plan)
    at_least = play_plan(trace, least)
    choices, dropped_ns_per_mib = choices_of(trace, plan, played)
    lowest, whose = least, 'budget="min"'
    if plan is not None and played.peak.bytes < at_least.peak.bytes:
        lowest, at_least, whose = plan, played, "This plan"
    return Explanation(
        device=trace.device,
        solver="plain" if plan is None else plan.solver,
        budget_bytes=None if plan is None else plan.budget_bytes,
        overhead=0.0 if plan is None else plan.overhead,
        plain_peak_bytes=played.peak.bytes if plan is None else plan.plain_peak_bytes,
        peak=Moment.of(trace, played.peak, 0 if plan is None else plan.peak_bytes),
        holders=holders_at(trace, played.peak),
        choices=choices,
        dropped_ns_per_mib=dropped_ns_per_mib,
        least=_least(trace, lowest, at_least.peak, whose),
        advice=advise(trace, lowest, at_least.peak),
    )


def check_plan(trace: Trace, plan: Plan | None) -> None:
    """Raises ``UsageError`` where this is no plan, ``PlanMismatch`` where it is of another step."""
    if plan is not None and not isinstance(plan, Plan):
        raise UsageError(f"asked to show a plan, found a {type(plan).__name__}; give what punar.solve or punar.Plan.load returned")
    if plan is not None and (plan.fingerprint != trace.fingerprint or len(plan.hold_from) != len(trace.values)):
        found = (
            f"for {len(plan.hold_from)} values by a record of {len(trace.values)}, of the same operators"
            if plan.fingerprint == trace.fingerprint
            else f"for the step {plan.fingerprint[:8]} by the record of the step {trace.fingerprint[:8]}"
        )
        raise PlanMismatch(f"asked to show a plan {found}; give the profile that the plan was made from, or solve for this one")


def play_plan(trace: Trace, plan: Plan | None) -> Playback:
    """The step under a plan, or the plain one."""
    if plan is None:
        return play(trace, (0,) * len(trace.values))
    return play(trace, plan.hold_from, is_closed=True, moves=plan.moves, channels=plan.channels)


def _least(trace: Trace, plan: Plan, peak: Peak, whose: str) -> Least:
    floor = floor_of(trace)
    text = f"{whose} reaches {format_bytes(peak.bytes)}, set by {title_of(trace, peak.op)}; it takes {plan.overhead:.1%} more time than the plain step. "
    taker = "it" if floor.op == peak.op else title_of(trace, floor.op)
    text += f"No plan of these operators needs less than {format_bytes(floor.bytes)}, which {taker} takes alone, beside what is resident (proved)."
    return Least(bytes=peak.bytes, overhead=plan.overhead, floor_bytes=floor.bytes, text=text)


def _size(size: int) -> str:
    return format_bytes(size) if size else "-"


def _section_text(section: Section) -> str:
    lines = [section.title]
    if section.table is not None:
        lines.append(format_columns(section.table.header, section.table.rows, left=section.table.left))
    return "\n".join([*lines, *section.notes])
