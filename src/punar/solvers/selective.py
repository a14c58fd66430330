"""Selective recomputation: the dear operators' results are held, the cheap ones' made again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from punar.ir import Trace
from punar.ir.blocks import layout_of
from punar.plan import Plan
from punar.solvers.base import fixed

DEAR = frozenset({"matmul", "attention", "convolution"})


@dataclass(frozen=True, slots=True)
class Selective:
    """Holds the results of matrix products, attention and convolutions; makes all others again when backward first needs them."""

    name: ClassVar[str] = "selective"
    source: ClassVar[str] = (
        "Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198, section 5"
    )

    def solve(self, trace: Trace, budget_bytes: int) -> Plan:
        return fixed(trace, selected(trace), self.name, budget_bytes)


def selected(trace: Trace) -> list[int]:
    """``hold_from`` of the plan; a value that is made again is held from the demand for its latest user on."""
    layout = layout_of(trace)
    hold = [0] * len(trace.values)
    for value in trace.values:
        if value.producer >= 0 and trace.ops[value.producer].kind not in DEAR:
            hold[value.id] = max(layout.clock[layout.last_use[value.id]], 1) if layout.last_use[value.id] >= 0 else 1
    return hold
