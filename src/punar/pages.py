"""A recorded step as one page of HTML: gathers what the page shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from punar.arguments import EXACT
from punar.ir import Trace
from punar.plan import Plan, simulate
from punar.plan.playback import Playback
from punar.planning import codec_channels
from punar.profiles import Profile, explain, trace_of
from punar.reporting.explain import check_plan
from punar.reporting.explain.explanation import play_plan
from punar.reporting.page import Curve, CurvePoint, NamedPoint, Page, block_of, memory_of, modules_of, step_rows
from punar.reporting.report import Report, StepLike
from punar.solvers import frontier_points
from punar.solvers import solve as solve_trace
from punar.solvers.rotor import Rotor

if TYPE_CHECKING:
    from punar.plan.moves import Channel

PEERS = ("none", "full", "every:2", "every:4", "sqrt", "selective")
"""The solvers that have one plan whatever the budget."""

_MOST_ROTOR = 6
"""So many plans of ``rotor``, which has one for each budget, are shown at most."""

_ANY_BUDGET = 1 << 62


def page_of(profile: Profile, plan: Plan | None = None, *, report: Report | None = None, steps: Iterable[StepLike] = ()) -> Page:
    """All that is known of a profiled step under a plan, or of the plain one, to be saved as a page.

    Args:
        report, steps: of the ``Remat`` that ran it, where one did.

    Raises:
        UsageError: the profile or the plan is none.
        PlanMismatch: the plan was made for another step.
    """
    trace = trace_of(profile)
    check_plan(trace, plan)
    if plan is not None:  # a Remat's plan may count more than was there when its step was recorded
        trace = replace(trace, resident_bytes=max(trace.resident_bytes, plan.resident_bytes))
    explanation = explain(Profile(trace=trace), plan)
    plain, planned = play_plan(trace, None), play_plan(trace, plan)
    memory = memory_of(trace, None, end_ns=plain.end_ns)
    return Page(
        explanation=explanation,
        curve=_curve(trace, plan, planned),
        plain=memory,
        planned=memory if plan is None else memory_of(trace, plan, end_ns=planned.end_ns),
        modules=modules_of(trace, plain, planned, explanation.choices),
        block=block_of(trace, plan, planned),
        report=report,
        steps=step_rows(steps),
    )


def _curve(trace: Trace, plan: Plan | None, planned: Playback) -> Curve:
    """The frontier with the plan and the peers on it: by the ways that the plan was given to move and compress, else by the exact codecs."""
    channels: tuple[Channel, ...] = codec_channels(trace, "min", "auto", EXACT)
    if plan is not None and plan.channels:
        channels = plan.channels
    plain_ns = max(trace.plain_time_ns, 1)
    points = tuple(
        CurvePoint(peak_bytes=point.peak_bytes, overhead=point.time_ns / plain_ns - 1, bound=bound_ns / plain_ns - 1)
        for point, bound_ns in frontier_points(trace, channels)
    )
    found = {(plan.peak_bytes, plan.overhead): name for name in reversed(PEERS) for plan in [solve_trace(trace, _ANY_BUDGET, name)]}
    peers = tuple(NamedPoint(name=name, peak_bytes=size, overhead=overhead) for (size, overhead), name in found.items())
    rotor = _rotor(trace, plain_ns)
    chosen = None
    if plan is not None:  # by the times that the curve is of: the plan's own may be older
        cost = planned.cost
        chosen = NamedPoint(name=f"this plan ({plan.solver})", peak_bytes=cost.peak_bytes, overhead=cost.time_ns / plain_ns - 1)
    return Curve(points=points, chosen=chosen, peers=(*reversed(peers), *rotor))


def _rotor(trace: Trace, plain_ns: int) -> list[NamedPoint]:
    """What the optimal programme for chains makes of the step, by rising peak: where one plan of it beats another in both, only that one."""
    judged = [simulate(trace, hold) for hold in dict.fromkeys(Rotor().holds(trace, _MOST_ROTOR))]
    points: list[NamedPoint] = []
    for cost in sorted(judged, key=lambda cost: (cost.peak_bytes, cost.time_ns)):
        overhead = cost.time_ns / plain_ns - 1
        if overhead > 0 and (not points or overhead < points[-1].overhead):
            points.append(NamedPoint(name="rotor", peak_bytes=cost.peak_bytes, overhead=overhead))
    return points
