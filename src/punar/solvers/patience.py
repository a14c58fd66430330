"""Judging plans that may make values again far too often to be worth simulating to the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from punar.ir import Trace
from punar.plan.simulate import Simulation, simulate

MOST_PASSES = 4
"""How many times the forward operators may be replayed in all before a plan is given up."""

GIVEN_UP = Simulation(peak_bytes=1 << 62, time_ns=1 << 62, kept_bytes=0, recomputed_bytes=0, replayed_ops=0, peak_event=0)
"""What stands for a plan that was given up: it fits no budget."""


class _TooMany(Exception):
    """More was replayed than we wait for."""


def judged(
    trace: Trace, hold_from: Sequence[int], on_run: Callable[[int, int, bool], None] | None = None, *, is_closed: bool = False
) -> Simulation:
    """Simulates a plan as ``simulate`` does; ``GIVEN_UP`` where it replays more than ``MOST_PASSES`` forward passes."""
    left = MOST_PASSES * len(trace.forward_ops)

    def watch(place: int, bytes: int, is_replay: bool) -> None:
        nonlocal left
        left -= is_replay
        if left < 0:
            raise _TooMany
        if on_run is not None:
            on_run(place, bytes, is_replay)

    try:
        return simulate(trace, hold_from, is_closed=is_closed, on_run=watch)
    except _TooMany:
        return GIVEN_UP
