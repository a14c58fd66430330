"""Binomial checkpointing: the fewest extra forward steps for a chain of equal steps with a given number of snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import comb
from typing import ClassVar

from punar.ir import Trace
from punar.ir.blocks import Layout, cuts_of, layout_of
from punar.plan import Plan, make_plan
from punar.solvers.base import fastest


def extra_steps(steps: int, snapshots: int) -> int:
    """The fewest forward steps beyond the first sweep that reverse a chain, its start among the snapshots.

    Source: Griewank, Walther 2000, Algorithm 799: Revolve, doi:10.1145/347837.347846, Theorem 1: with r such that
    comb(s + r - 1, s) < n <= comb(s + r, s), the forward steps are r * n - comb(s + r, s + 1).
    """
    if steps <= 1:
        return 0
    repeats = 0
    while comb(snapshots + repeats, snapshots) < steps:
        repeats += 1
    return repeats * steps - comb(snapshots + repeats, snapshots + 1)


@lru_cache(maxsize=65536)
def first_snapshot(steps: int, snapshots: int) -> int:
    """After how many steps to take the next snapshot: the first of the places that reach ``extra_steps``."""
    return min(range(1, steps), key=lambda m: m + extra_steps(m, snapshots) + extra_steps(steps - m, snapshots - 1))


@dataclass(frozen=True, slots=True)
class Revolve:
    """Takes each block as one step; as many snapshots as the budget allows, for the fewest recomputed blocks."""

    name: ClassVar[str] = "revolve"
    source: ClassVar[str] = "Griewank, Walther 2000, Algorithm 799: Revolve, doi:10.1145/347837.347846"

    def solve(self, trace: Trace, budget_bytes: int) -> Plan:
        steps = max(len(cuts_of(trace)) - 1, 1)
        plans = (make_plan(trace, revolved(trace, s), solver=self.name, budget_bytes=budget_bytes) for s in snapshot_counts(steps))
        return fastest(trace, plans, budget_bytes)


def snapshot_counts(steps: int) -> Iterator[int]:
    """All counts up to 16, then every fourth part more: more than ``steps`` are of no use."""
    count = 1
    while count < steps:
        yield count
        count += max(1, count // 16 * 4)
    yield steps


def revolved(trace: Trace, snapshots: int) -> list[int]:
    """``hold_from`` of the schedule: what crosses a snapshot's cut is held from when backward enters the stretch that it was taken for."""
    layout, cuts = layout_of(trace), cuts_of(trace)
    hold = [0] * len(trace.values)
    for start, end in pairwise(cuts):
        hold_between(trace, layout, hold, start, end, max(layout.entry(start, end), 1))
    stretches = [(0, len(cuts) - 1, snapshots, 0)]
    while stretches:
        low, high, left, entry = stretches.pop()
        if high - low < 2:
            continue
        middle = low + first_snapshot(high - low, left) if left > 1 else high - 1
        hold_across(trace, layout, hold, cuts, middle, entry if left > 1 else max(layout.entry(cuts[middle], cuts[high]), 1))
        stretches.append((low, middle, left, max(layout.entry(cuts[low], cuts[middle]), 1)))
        if left > 1:
            stretches.append((middle, high, left - 1, entry))
    return hold


def hold_between(trace: Trace, layout: Layout, hold: list[int], start: int, end: int, entry: int) -> None:
    """Holds what the places ``start`` to ``end - 1`` make from ``entry`` on."""
    for place in range(start, end):
        for value in trace.ops[layout.ops[place]].outputs:
            hold[value] = entry


def hold_across(trace: Trace, layout: Layout, hold: list[int], cuts: tuple[int, ...], cut: int, entry: int) -> None:
    """Holds what the block before a cut makes and something after it uses from ``entry`` on."""
    for place in range(cuts[cut - 1], cuts[cut]):
        for value in trace.ops[layout.ops[place]].outputs:
            if layout.last_use[value] >= cuts[cut]:
                hold[value] = min(hold[value], entry)
