"""A plan made for other sizes of a step, judged on these."""

from __future__ import annotations

from collections.abc import Iterable

from punar.ir import Trace
from punar.plan.plan import Plan, make_plan

NEARBY = "nearby"
"""What stands for the solver in a plan that was taken over from a step of other sizes."""

_MOST_JUDGED = 3
"""So many plans are judged, those of the steps that are nearest in bytes first."""


def nearby_plan(trace: Trace, known: Iterable[Plan], budget_bytes: int, plain_peak_bytes: int) -> Plan | None:
    """The fastest of some plans for this step on other sizes that fits a budget on these; None where none of the nearest does.

    What decides is this step's own peak, as the simulator counts it: a plan says which values are held, not how many bytes. ``known``: plans for
    traces of which ``trace.is_resized`` holds; ``plain_peak_bytes``: of this step.
    """
    nearest = sorted(known, key=lambda plan: abs(plan.plain_peak_bytes - plan.resident_bytes - plain_peak_bytes + trace.resident_bytes))
    actions = list(dict.fromkeys((plan.hold_from, plan.moves, plan.channels) for plan in nearest))[:_MOST_JUDGED]
    judged = (
        make_plan(trace, hold_from, solver=NEARBY, budget_bytes=budget_bytes, moves=moves, channels=channels)
        for hold_from, moves, channels in actions
    )
    return min((plan for plan in judged if plan.peak_bytes <= budget_bytes), key=lambda plan: plan.time_ns, default=None)
