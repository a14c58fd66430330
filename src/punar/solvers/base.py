"""What a solver is, and how one that cannot meet a budget says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from punar.errors import InfeasibleBudget
from punar.ir import EventKind, Trace
from punar.plan import Plan, make_plan
from punar.plan.plan import moved
from punar.plan.simulate import alive_at
from punar.units import format_bytes

NAMED_HOLDERS = 8
"""How many holders of the peak an error lists in its text; its attribute has all of them."""


class Solver(Protocol):
    """A frozen dataclass whose fields are its options: registered by name, spelled ``name{field=value}``."""

    name: str
    source: str

    def solve(self, trace: Trace, budget_bytes: int) -> Plan:
        """Finds a plan whose predicted peak is at most ``budget_bytes``.

        Raises:
            InfeasibleBudget: this solver knows no plan that fits.
        """


def fixed(trace: Trace, hold_from: Sequence[int], solver: str, budget_bytes: int) -> Plan:
    """The one plan of a solver without choice, or the error that says what it needs."""
    plan = make_plan(trace, hold_from, solver=solver, budget_bytes=budget_bytes)
    if plan.peak_bytes > budget_bytes:
        raise infeasible(trace, plan, hint=f"solver {solver!r} has this one plan only; ask 'auto', which reaches lower budgets")
    return plan


def fastest(trace: Trace, plans: Iterable[Plan], budget_bytes: int) -> Plan:
    """The fastest of some plans that fits, or the error that says what the one of least peak needs."""
    found = list(plans)
    fitting = [plan for plan in found if plan.peak_bytes <= budget_bytes]
    if not fitting:
        raise infeasible(trace, min(found, key=lambda plan: plan.peak_bytes), hint="or ask 'auto', which reaches lower budgets")
    return min(fitting, key=lambda plan: (plan.time_ns, plan.peak_bytes))


def infeasible(trace: Trace, least: Plan, *, hint: str) -> InfeasibleBudget:
    """The error for ``least.budget_bytes`` when ``least`` is the plan of least peak."""
    holders = holders_at_peak(trace, least)
    message = "\n".join(
        [
            (
                f"asked for a step within {format_bytes(least.budget_bytes)} ({least.budget_bytes} B), solver {least.solver!r} found none: "
                f"the least peak it reaches is {format_bytes(least.peak_bytes)} ({least.peak_bytes} B), of which "
                f"{format_bytes(least.resident_bytes)} were on the device before the step. At that peak are alive:"
            ),
            *holder_lines(holders),
            f"Give at least {least.peak_bytes} B, or make the batch smaller; {hint}.",
        ]
    )
    error = InfeasibleBudget(message, budget_bytes=least.budget_bytes, least_bytes=least.peak_bytes, holders=holders)
    error.moved = lambda extra_bytes: infeasible(trace, moved(least, extra_bytes), hint=hint)
    return error


def holder_lines(holders: Sequence[tuple[str, str, int]]) -> list[str]:
    """The largest holders, one a line, and the sum of the others."""
    lines = [f"  {format_bytes(size):>10}  {module or '(no module)'}: {name}" for module, name, size in holders[:NAMED_HOLDERS]]
    if len(holders) > NAMED_HOLDERS:
        lines.append(f"  {format_bytes(sum(h[2] for h in holders[NAMED_HOLDERS:])):>10}  in {len(holders) - NAMED_HOLDERS} smaller ones")
    return lines


def holders_at_peak(trace: Trace, plan: Plan) -> tuple[tuple[str, str, int], ...]:
    """What is alive where a plan's predicted peak stands, as (module path, operator, bytes), largest first.

    What was there before the step is left out. The operator at the peak, or the replay that backward's demand sets off there, counts with
    what it adds.
    """
    judged = plan.judged(trace)
    alive = alive_at(trace, plan.hold_from, judged.peak_event, plan.moves, plan.channels)
    rest = judged.peak_bytes - trace.resident_bytes - sum(size for _, size in alive)
    sizes: dict[tuple[str, str], int] = {}
    for op, size in [*alive, (_op_at(trace, judged.peak_event), rest)]:
        key = (trace.ops[op].module, trace.ops[op].name) if op >= 0 else ("", "given")
        sizes[key] = sizes.get(key, 0) + size
    return tuple(sorted(((module, name, size) for (module, name), size in sizes.items() if size > 0), key=lambda h: (-h[2], h[0], h[1])))


def _op_at(trace: Trace, place: int) -> int:
    kind, id = trace.events[place]
    return id if kind == EventKind.RUN else trace.values[trace.saves[id].value].producer
