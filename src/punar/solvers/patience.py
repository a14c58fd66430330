"""Judging plans that may make values again far too often to be worth simulating to the end."""

from __future__ import annotations

from collections.abc import Sequence

from punar.ir import Trace
from punar.plan.pressure import pressure_of
from punar.plan.simulate import Simulation, TooManyReplays, highest, simulate

MOST_PASSES = 4
"""How many times the forward operators may be replayed in all before a plan is given up."""

GIVEN_UP = Simulation(peak_bytes=1 << 62, time_ns=1 << 62, kept_bytes=0, recomputed_bytes=0, replayed_ops=0, peak_event=0)
"""What stands for a plan that was given up: it fits no budget."""


def judged(trace: Trace, hold_from: Sequence[int]) -> Simulation:
    """Simulates a plan as ``simulate`` does; ``GIVEN_UP`` where it replays more than ``MOST_PASSES`` forward passes."""
    try:
        return simulate(trace, hold_from, most_replays=MOST_PASSES * len(trace.forward_ops))
    except TooManyReplays:
        return GIVEN_UP


def judged_by_cell(trace: Trace, closed: Sequence[int]) -> tuple[Simulation, list[int]]:
    """The same for a ``hold_from`` that is closed, with the highest bytes in each cell of the pressure."""
    cell = pressure_of(trace).cell
    try:
        return highest(trace, closed, cell, is_closed=True, most_replays=MOST_PASSES * len(trace.forward_ops))
    except TooManyReplays:
        return GIVEN_UP, []
