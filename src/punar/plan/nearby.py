"""A plan made for other sizes of a step, judged on these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from punar.ir import Trace
from punar.plan.plan import Plan, make_plan

NEARBY = "nearby"
"""What stands for the solver in a plan that was taken over from a step of other sizes."""

_MOST_JUDGED = 3
"""So many plans are judged."""


def plans_of_other_sizes(trace: Trace, known: Iterable[tuple[Plan, Trace]], plain_peak_bytes: int) -> Iterator[Plan]:
    """Up to three plans that differ, made for this step on other sizes, those of the sizes that are nearest in bytes first; looked for as they are asked for.

    ``known``: plans with the traces that they are for; ``plain_peak_bytes``: of this step.
    """

    def distance(pair: tuple[Plan, Trace]) -> int:
        plan, _ = pair
        return abs(plan.plain_peak_bytes - plan.resident_bytes - plain_peak_bytes + trace.resident_bytes)

    found: set[tuple[object, ...]] = set()
    for plan, other in sorted(known, key=distance):
        actions = (plan.hold_from, plan.moves, plan.channels)
        if actions not in found and trace.is_resized(other):
            found.add(actions)
            yield plan
            if len(found) == _MOST_JUDGED:
                return


def nearby_plan(trace: Trace, known: Iterable[Plan], budget_bytes: int) -> Plan | None:
    """The fastest of some plans for this step on other sizes that fits a budget on these; None where none does.

    What decides is this step's own peak, as the simulator counts it: a plan says which values are held, not how many bytes.
    """
    judged = (
        make_plan(trace, plan.hold_from, solver=NEARBY, budget_bytes=budget_bytes, moves=plan.moves, channels=plan.channels)
        for plan in known
    )
    return min((plan for plan in judged if plan.peak_bytes <= budget_bytes), key=lambda plan: plan.time_ns, default=None)
