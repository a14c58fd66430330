"""The report of one ``Remat``: what was planned, and what its steps then measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Protocol

from punar.markup import html_table
from punar.plan.plan import Plan
from punar.reporting.table import format_columns
from punar.units import format_bytes, format_seconds


class StepLike(Protocol):
    """What a report asks of the record of one finished step."""

    @property
    def measured_peak_bytes(self) -> int | None: ...
    @property
    def predicted_peak_bytes(self) -> int | None: ...
    @property
    def time_ns(self) -> int: ...
    @property
    def kept_bytes(self) -> int: ...
    @property
    def recomputed_bytes(self) -> int: ...
    @property
    def replayed_operators(self) -> int: ...
    @property
    def moved_bytes(self) -> int: ...
    @property
    def coded_bytes(self) -> int: ...
    @property
    def evicted_bytes(self) -> int: ...
    @property
    def is_traced(self) -> bool: ...
    @property
    def plan(self) -> Plan | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Several steps in one line: the highest peaks, the median time, and the last step's bytes and operators.

    ``unwatched``: how many of them have no measured peak.
    ``peak_bytes`` is None where none of them was watched, ``predicted_peak_bytes`` where none of them obeyed a plan.
    """

    steps: int
    unwatched: int
    peak_bytes: int | None
    predicted_peak_bytes: int | None
    time_ns: int
    kept_bytes: int
    recomputed_bytes: int
    replayed_operators: int
    moved_bytes: int = 0
    coded_bytes: int = 0
    evicted_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a ``Remat`` planned and what it measured; ``str()`` of it is a text for people.

    Attributes:
        device: where the step ran.
        budget: as the user gave it, or ``"of the plan"``.
        plan: the plan that was obeyed last, else the one in force; None where there is none (yet).
        traced: the steps that recorded a trace, or None where there was none.
        obeyed: the steps that followed ``plan`` (or only measured, where the budget is None), or None.
        others: the steps that followed other plans, made for other shapes for example, or None.
        ignored: the steps for which the plan that was given was not made, or None.
        drifts: where steps and their plans differed, and what was done about it, in lines.
    """

    device: str
    budget: str
    plan: Plan | None
    traced: Measured | None
    obeyed: Measured | None
    others: Measured | None = None
    ignored: Measured | None = None
    drifts: tuple[str, ...] = ()

    @classmethod
    def of_steps(
        cls,
        steps: Iterable[StepLike],
        *,
        device: str,
        budget: object,
        plan: Plan | None,
        is_plan_given: bool = False,
        drifts: Iterable[str] = (),
    ) -> Report:
        """Sums up the steps of a ``Remat``. ``plan``: the one in force."""
        rows = tuple(steps)
        followed = [step for step in rows if step.plan is not None]
        shown = followed[-1].plan if followed else plan
        return cls(
            device=device,
            budget="of the plan" if is_plan_given else str(budget),
            plan=shown,
            traced=measure([step for step in rows if step.is_traced]),
            obeyed=measure([step for step in followed if is_same(step.plan, shown)]),
            others=measure([step for step in followed if not is_same(step.plan, shown)]),
            ignored=measure([step for step in rows if step.plan is None and not step.is_traced]),
            drifts=tuple(drifts),
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able data, without the plan's table of values."""
        plan = self.plan
        return {
            "device": self.device,
            "budget": self.budget,
            "plan": None if plan is None else _plan_fields(plan),
            "traced": None if self.traced is None else asdict(self.traced),
            "obeyed": None if self.obeyed is None else asdict(self.obeyed),
            "others": None if self.others is None else asdict(self.others),
            "ignored": None if self.ignored is None else asdict(self.ignored),
            "drifts": list(self.drifts),
        }

    def __str__(self) -> str:
        lines = [f"punar report, device {self.device}, budget {self._budget_text()}"]
        if self.obeyed is None and self.traced is None and self.ignored is None:
            return lines[0] + "\nno step has finished yet"
        lines.append(format_columns(("", "predicted", "measured"), self.rows(), left=1))
        lines.extend(self.notes())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        title = f"punar report, device {self.device}, budget {self._budget_text()}"
        if self.obeyed is None and self.traced is None and self.ignored is None:
            return html_table(title, (), (), notes=("no step has finished yet",))
        return html_table(title, ("", "predicted", "measured"), self.rows(), notes=self.notes())

    def _budget_text(self) -> str:
        if self.plan is None:
            return self.budget
        return f"{self.budget} = {format_bytes(self.plan.budget_bytes)} of the whole step, solver {self.plan.solver}"

    def rows(self) -> list[tuple[str, str, str]]:
        """What, as predicted and as measured, for people."""
        plan, seen = self.plan, self.obeyed
        moves = (("moved_bytes", "moved, both ways"), ("coded_bytes", "compressed"))
        moved = [
            (title, format_bytes(getattr(plan, name)), format_bytes(getattr(seen, name)) if seen else "-")
            for name, title in moves
            if plan and getattr(plan, name)
        ]
        return [
            ("peak, whole step", format_bytes(plan.peak_bytes) if plan else "-", peak_text(seen)),
            ("peak, plain step", format_bytes(plan.plain_peak_bytes) if plan else "-", "-"),
            ("time of a step", format_seconds(plan.step_time_ns) if plan else "-", format_seconds(seen.time_ns) if seen else "-"),
            ("operators, plain", format_seconds(plan.plain_time_ns) if plan else "-", "-"),
            ("operators, extra", f"{plan.overhead:.1%}" if plan else "-", "-"),
            ("kept for backward", format_bytes(plan.kept_bytes) if plan else "-", format_bytes(seen.kept_bytes) if seen else "-"),
            ("recomputed", format_bytes(plan.recomputed_bytes) if plan else "-", format_bytes(seen.recomputed_bytes) if seen else "-"),
            ("operators replayed", str(plan.replayed_ops) if plan else "-", str(seen.replayed_operators) if seen else "-"),
            *moved,
        ]

    def notes(self) -> list[str]:
        """Sentences about what the rows count and what they leave out."""
        notes = []
        if self.obeyed:
            notes.append(f"measured: highest peak and median time of {count(self.obeyed.steps, 'step')}")
        if self.obeyed and self.obeyed.unwatched:
            notes.append(f"{self.obeyed.unwatched} of them, or their backward passes, ran unwatched; their peaks are not measured")
        if self.others:
            promised = "" if self.others.predicted_peak_bytes is None else f", {format_bytes(self.others.predicted_peak_bytes)} predicted"
            steps = count(self.others.steps, "step")
            notes.append(f"{steps} under other plans, of other shapes or times: highest peak {peak_text(self.others)} measured{promised}")
        if self.ignored:
            peak = peak_text(self.ignored)
            notes.append(
                f"{count(self.ignored.steps, 'step')} without a plan made for it: nothing was recomputed, highest peak {peak} measured"
            )
        if self.traced:
            evicted = (
                f", evicted {format_bytes(self.traced.evicted_bytes)}, peak {peak_text(self.traced)}" if self.traced.evicted_bytes else ""
            )
            notes.append(
                f"traced: {count(self.traced.steps, 'step')}, median {format_seconds(self.traced.time_ns)}{evicted}, not counted above"
            )
        if self.drifts:
            notes.append(f"{count(len(self.drifts), 'note')} of drift, the last: {self.drifts[-1]}")
        if self.plan and self.plan.bound_ns:
            plans = "plan that makes each value again at most once" if self.plan.solver == "milp" else "plan"
            notes.append(f"no {plans} at this budget can be faster than {format_seconds(self.plan.bound_ns)} (proved)")
        return notes


def measure(steps: Sequence[StepLike]) -> Measured | None:
    """Sums up steps; None where there are none."""
    if not steps:
        return None
    return Measured(
        steps=len(steps),
        unwatched=sum(step.measured_peak_bytes is None for step in steps),
        peak_bytes=max((step.measured_peak_bytes for step in steps if step.measured_peak_bytes is not None), default=None),
        predicted_peak_bytes=max((step.predicted_peak_bytes for step in steps if step.predicted_peak_bytes is not None), default=None),
        time_ns=int(median(step.time_ns for step in steps)),
        kept_bytes=steps[-1].kept_bytes,
        recomputed_bytes=steps[-1].recomputed_bytes,
        replayed_operators=steps[-1].replayed_operators,
        moved_bytes=steps[-1].moved_bytes,
        coded_bytes=steps[-1].coded_bytes,
        evicted_bytes=steps[-1].evicted_bytes,
    )


def is_same(plan: Plan | None, other: Plan | None) -> bool:
    """Whether two plans do the same to the same step at the same budget; their times may have been learned anew."""
    if plan is None or other is None:
        return plan is other
    return all(getattr(plan, name) == getattr(other, name) for name in ("budget_bytes", "peak_bytes", "hold_from", "moves", "fingerprint"))


def peak_text(seen: Measured | None) -> str:
    """The highest measured peak, or a dash."""
    return "-" if seen is None or seen.peak_bytes is None else format_bytes(seen.peak_bytes)


def count(number: int, noun: str) -> str:
    """``"1 step"``, ``"2 steps"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _plan_fields(plan: Plan) -> dict[str, Any]:
    names = ("fingerprint", "solver", "budget_bytes", "peak_bytes", "plain_peak_bytes", "time_ns", "plain_time_ns", "kept_bytes")
    return {
        name: getattr(plan, name)
        for name in (
            *names,
            "recomputed_bytes",
            "replayed_ops",
            "resident_bytes",
            "bound_ns",
            "step_time_ns",
            "moved_bytes",
            "stall_ns",
            "coded_bytes",
            "coding_ns",
        )
    }
