"""Recomputation of whole blocks: of each, of every few, of about sqrt(n)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from punar.errors import UsageError
from punar.ir import Trace
from punar.ir.blocks import cuts_of
from punar.plan import Plan
from punar.solvers.base import fixed
from punar.solvers.segments import grouped


@dataclass(frozen=True, slots=True)
class Full:
    """Recomputes every block from what crosses its boundary; blocks are found by structure."""

    name: ClassVar[str] = "full"
    source: ClassVar[str] = "torch.utils.checkpoint applied to each block; Chen et al. 2016, arXiv:1604.06174"

    def solve(self, trace: Trace, budget_bytes: int) -> Plan:
        return fixed(trace, grouped(trace, 1), self.name, budget_bytes)


@dataclass(frozen=True, slots=True)
class Every:
    """Recomputes the blocks in groups of ``blocks``, each group from what crosses its boundary."""

    blocks: int = 2
    name: ClassVar[str] = "every"
    source: ClassVar[str] = "torch.utils.checkpoint_sequential; Chen et al. 2016, arXiv:1604.06174"

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise UsageError(f"solver 'every:{self.blocks}' was asked for: groups have at least 1 block; write 'every:2', for example")

    def solve(self, trace: Trace, budget_bytes: int) -> Plan:
        return fixed(trace, grouped(trace, self.blocks), f"every:{self.blocks}", budget_bytes)


@dataclass(frozen=True, slots=True)
class Sqrt:
    """Recomputes the n blocks in about sqrt(n) groups of about sqrt(n)."""

    name: ClassVar[str] = "sqrt"
    source: ClassVar[str] = "Chen, Xu, Zhang, Guestrin 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, section 4.1"

    def solve(self, trace: Trace, budget_bytes: int) -> Plan:
        blocks = max(len(cuts_of(trace)) - 1, 1)
        return fixed(trace, grouped(trace, max(round(blocks**0.5), 1)), self.name, budget_bytes)
