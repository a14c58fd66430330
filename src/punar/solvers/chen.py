"""Chen's greedy segments: a new one wherever the last has made enough bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from punar.ir import Trace
from punar.ir.blocks import cuts_of, layout_of
from punar.ir.lineage import lineage_of
from punar.plan import Plan, make_plan
from punar.solvers.base import fastest
from punar.solvers.segments import segmented


@dataclass(frozen=True, slots=True)
class ChenGreedy:
    """Cuts a segment at the first boundary of a block after ``b`` bytes were made in it, for ``searches`` values of ``b``."""

    searches: int = 8
    name: ClassVar[str] = "chen-greedy"
    source: ClassVar[str] = "Chen, Xu, Zhang, Guestrin 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, Algorithm 3"

    def solve(self, trace: Trace, budget_bytes: int) -> Plan:
        sizes = block_bytes(trace)
        most = max(sum(sizes), 1)
        holds = dict.fromkeys(tuple(segmented(trace, greedy_cuts(trace, most >> k))) for k in range(self.searches))
        plans = (make_plan(trace, hold, solver=self.name, budget_bytes=budget_bytes) for hold in holds)
        return fastest(trace, plans, budget_bytes)


def block_bytes(trace: Trace) -> list[int]:
    """What each block makes."""
    cuts, layout, sizes = cuts_of(trace), layout_of(trace), lineage_of(trace).bytes
    made = [sum(sizes[v] for v in trace.ops[op].outputs) for op in layout.ops]
    return [sum(made[start:end]) for start, end in pairwise(cuts)]


def greedy_cuts(trace: Trace, enough: int) -> tuple[int, ...]:
    """The cuts of the blocks at which more than ``enough`` bytes were made since the last one."""
    cuts = cuts_of(trace)
    chosen, made = [cuts[0]], 0
    for cut, size in zip(cuts[1:-1], block_bytes(trace), strict=False):
        made += size
        if made > enough:
            chosen.append(cut)
            made = 0
    return (*chosen, cuts[-1])
