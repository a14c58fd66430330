"""Two plans for one step, side by side: what they cost, and which values they treat differently."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from punar.errors import PlanMismatch
from punar.ir.lineage import lineage_of
from punar.ir.trace import Trace
from punar.plan.plan import Plan
from punar.reporting.explain import check_plan
from punar.reporting.explain.places import module_of, pattern_of
from punar.units import format_bytes, format_seconds

KEPT, RECOMPUTED = "kept", "recomputed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Values that one plan treats in one way and the other in another; ``bytes``: of their storages, None where the trace is not at hand.

    ``before``, ``after``: ``kept``, ``recomputed``, ``moved to`` a place or ``compressed by`` a codec. ``module``, ``operator``: who makes them,
    numbers that differ between repeated modules are ``*``; "" without the trace.
    """

    before: str
    after: str
    values: int
    bytes: int | None = None
    module: str = ""
    operator: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComparison:
    """Two plans for one step.

    Attributes:
        first, second: the plans.
        values: how many values the step has. differing: how many of them the plans treat differently.
        changes: the same by what becomes of them, the most values first.
        places: with a trace, of the values that autograd saved, by who makes them, the most bytes first.
    """

    first: Plan
    second: Plan
    values: int
    differing: int
    changes: tuple[Change, ...]
    places: tuple[Change, ...]

    @classmethod
    def of(cls, first: Plan, second: Plan, trace: Trace | None = None) -> PlanComparison:
        """Compares two plans; ``trace``: of the step that both are for.

        Raises:
            PlanMismatch: they are for different steps, or not for that of the trace.
        """
        if (first.fingerprint, len(first.hold_from)) != (second.fingerprint, len(second.hold_from)):
            raise PlanMismatch(
                f"asked to compare two plans, found them made for different steps ({first.fingerprint[:8]}, {len(first.hold_from)} values; "
                f"{second.fingerprint[:8]}, {len(second.hold_from)} values); compare plans for one trace"
            )
        if trace is not None:
            check_plan(trace, first)
            check_plan(trace, second)
        before, after = treatments(first), treatments(second)
        different = [value for value, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        counted = Counter((before[value], after[value]) for value in different)
        return cls(
            first=first,
            second=second,
            values=len(before),
            differing=len(different),
            changes=tuple(Change(before=a, after=b, values=count) for (a, b), count in counted.most_common()),
            places=() if trace is None else _places(trace, before, after),
        )

    def rows(self) -> list[tuple[str, str, str, str]]:
        """What each plan predicts, and by how much the second differs; under ``HEADER``."""
        a, b = self.first, self.second
        sizes = [("budget", "budget_bytes"), ("peak", "peak_bytes"), ("kept", "kept_bytes"), ("recomputed", "recomputed_bytes")]
        sizes += [("moved", "moved_bytes"), ("compressed", "coded_bytes")]
        times = [("time", "time_ns"), ("waiting", "stall_ns"), ("no plan below", "bound_ns")]
        return [
            ("solver", a.solver, b.solver, ""),
            *((title, *_cells(getattr(a, name), getattr(b, name), format_bytes)) for title, name in sizes),
            *((title, *_cells(getattr(a, name), getattr(b, name), format_seconds)) for title, name in times),
            ("extra time", f"{a.overhead:.1%}", f"{b.overhead:.1%}", f"{b.overhead - a.overhead:+.1%}"),
            ("replayed operators", str(a.replayed_ops), str(b.replayed_ops), f"{b.replayed_ops - a.replayed_ops:+d}"),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-able data, without the plans."""
        return {
            "fingerprint": self.first.fingerprint,
            "values": self.values,
            "differing": self.differing,
            "changes": [{"before": change.before, "after": change.after, "values": change.values} for change in self.changes],
            "places": [asdict(place) for place in self.places],
        }


HEADER = ("", "first", "second", "difference")
PLACES_HEADER = ("module", "operator", "first", "second", "values", "bytes")


def place_rows(places: tuple[Change, ...]) -> list[tuple[str, ...]]:
    """The cells under ``PLACES_HEADER``."""
    return [
        (place.module, place.operator, place.before, place.after, str(place.values), format_bytes(place.bytes or 0)) for place in places
    ]


def treatments(plan: Plan) -> list[str]:
    """What becomes of each value of the step under a plan, as a word or two."""
    found = [RECOMPUTED if hold else KEPT for hold in plan.hold_from]
    for move in plan.moves:
        channel = plan.channels[move.tier]
        found[move.value] = f"{'compressed by' if channel.is_codec else 'moved to'} {channel.name}"
    return found


def _places(trace: Trace, before: list[str], after: list[str]) -> tuple[Change, ...]:
    """The saved values that are treated differently, one a storage, by operator and part of the model."""
    line = lineage_of(trace)
    made = [value for value in trace.saved_values() if line.producer[value] >= 0]
    groups: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for value in {line.storage[value]: value for value in made}.values():
        if before[value] != after[value]:
            op = line.producer[value]
            groups[pattern_of(module_of(trace, op)), trace.ops[op].name, before[value], after[value]].append(value)
    found = [
        Change(before=a, after=b, values=len(values), bytes=sum(line.bytes[value] for value in values), module=module, operator=operator)
        for (module, operator, a, b), values in groups.items()
    ]
    return tuple(sorted(found, key=lambda place: (-(place.bytes or 0), place.module, place.operator)))


def _cells(before: int, after: int, written: Any) -> tuple[str, str, str]:
    change = after - before
    return written(before), written(after), f"{'+' if change >= 0 else '-'}{written(abs(change))}" if change else "="
