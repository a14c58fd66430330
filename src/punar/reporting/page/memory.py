"""Memory over time, thinned to what a page can hold: no stretch of time hides its highest moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from punar.ir.trace import Trace
from punar.plan.plan import Plan
from punar.plan.strata import Stratum, sort_bytes
from punar.reporting.explain.gradients import gradients_of
from punar.reporting.explain.places import OUTSIDE, module_of

STRETCHES = 600
"""In how many stretches of time a step is shown at most; of each the highest moment and the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A step's memory over time, predicted. Units: nanoseconds from the step's start, bytes.

    Attributes:
        resident_bytes: there all the time: parameters, buffers, the batch, the optimizer's state.
        peak_bytes: the most of the whole step. end_ns: when the step ends.
        moments: what is there from when on, in order. changes: how many there were before they were thinned.
        operators, modules: of each moment, what runs and where it belongs.
        phases: ``forward``, ``backward``, ``replay``, or ``start`` before anything ran.
    """

    resident_bytes: int
    peak_bytes: int
    end_ns: int
    moments: tuple[Stratum, ...]
    changes: int
    operators: tuple[str, ...]
    modules: tuple[str, ...]
    phases: tuple[str, ...]


def memory_of(trace: Trace, plan: Plan | None, *, end_ns: int, stretches: int = STRETCHES) -> Memory:
    """The memory of a step under a plan, or of the plain one, with at most two moments of each stretch of time.

    Args:
        end_ns: when the step ends, as its playback says.
    """
    gradients = gradients_of(trace)
    if plan is None:
        strata = sort_bytes(trace, (0,) * len(trace.values), gradients=gradients)
    else:
        strata = sort_bytes(trace, plan.hold_from, gradients=gradients, is_closed=True, moves=plan.moves, channels=plan.channels)
    moments = tuple(thinned(strata, end_ns, stretches))
    return Memory(
        resident_bytes=trace.resident_bytes,
        peak_bytes=trace.resident_bytes + max(moment.bytes for moment in moments),
        end_ns=end_ns,
        moments=moments,
        changes=len(strata),
        operators=tuple("" if moment.op < 0 else trace.ops[moment.op].name for moment in moments),
        modules=tuple(OUTSIDE if moment.op < 0 else module_of(trace, moment.op) for moment in moments),
        phases=tuple(_phase(trace, moment) for moment in moments),
    )


def thinned(strata: Sequence[Stratum], end_ns: int, stretches: int) -> Iterator[Stratum]:
    """Of each stretch of time the first of the highest moments, and the last moment."""
    if len(strata) <= 2 * stretches:
        yield from strata
        return
    for _, members in groupby(strata, key=lambda moment: moment.time_ns * stretches // max(end_ns, 1)):
        yield from _kept_of(members)


def _kept_of(members: Iterable[Stratum]) -> list[Stratum]:
    stretch = list(members)
    highest = max(stretch, key=lambda moment: moment.bytes)
    return [highest] if highest is stretch[-1] else [highest, stretch[-1]]


def _phase(trace: Trace, moment: Stratum) -> str:
    if moment.op < 0:
        return "start"
    return "replay" if moment.is_replay else "backward" if trace.ops[moment.op].is_backward else "forward"
