"""Optimal persistent checkpointing of a chain of unequal blocks, by dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from punar.ir import Trace
from punar.ir.blocks import cuts_of, layout_of
from punar.ir.lineage import lineage_of
from punar.plan import Plan, make_plan
from punar.plan.simulate import simulate
from punar.solvers.base import fastest
from punar.solvers.revolve import hold_across, hold_between

INFINITE = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Blocks 0 to n - 1 of a chain. ``inputs[k]``: units of what block ``k`` reads; ``inners[k]``: of all that its backward needs, its output
    included; ``times[k]``: of its forward."""

    inputs: tuple[int, ...]
    inners: tuple[int, ...]
    times: tuple[float, ...]


class Table:
    """The least forward time, the first pass included, to reverse the blocks ``low`` to ``high`` with ``room`` units besides the input of ``low``.

    Two cases: the first block's inner values are kept, and the rest is reversed in what remains; or the input of a later block is kept, the
    rest from there is reversed first, and what comes before it after a second forward from the input of ``low``. A block alone needs its inner values.

    Complexity: O(n^2 * units) states, O(n) each.

    Source: Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova 2019, Optimal checkpointing for heterogeneous chains, arXiv:1911.13214, Theorem 1
    (there C1 and C2), without the backward's own scratch.
    """

    def __init__(self, chain: Chain, room: int) -> None:
        self.chain = chain
        blocks = len(chain.times)
        self.time = [[[INFINITE] * (room + 1) for _ in range(blocks)] for _ in range(blocks)]
        self.choice = [[[-1] * (room + 1) for _ in range(blocks)] for _ in range(blocks)]
        for length in range(blocks):
            for low in range(blocks - length):
                for m in range(room + 1):
                    self.fill(low, low + length, m)

    def fill(self, low: int, high: int, room: int) -> None:
        chain, best, choice = self.chain, INFINITE, -1
        rest = room - chain.inners[low]
        if rest >= 0:
            best, choice = chain.times[low] + (self.time[low + 1][high][rest] if low < high else 0.0), low
        passed = 0.0
        for middle in range(low + 1, high + 1):
            passed += chain.times[middle - 1]
            left = room - chain.inputs[middle]
            if left < 0:
                continue
            total = passed + self.time[middle][high][left] + self.time[low][middle - 1][room]
            if total < best:
                best, choice = total, middle
        self.time[low][high][room], self.choice[low][high][room] = best, choice


@dataclass(frozen=True, slots=True)
class Rotor:
    """Takes the blocks as a chain, merged to at most ``blocks``, and memory in ``units``; asks the programme for the budget and less."""

    units: int = 60
    blocks: int = 24
    name: ClassVar[str] = "rotor"
    source: ClassVar[str] = (
        "Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova 2019, Optimal checkpointing for heterogeneous chains, arXiv:1911.13214"
    )

    def solve(self, trace: Trace, budget_bytes: int) -> Plan:
        holds = dict.fromkeys([*self.holds(trace), (0,) * len(trace.values)])
        plans = (make_plan(trace, hold, solver=self.name, budget_bytes=budget_bytes) for hold in holds)
        return fastest(trace, plans, budget_bytes)

    def holds(self, trace: Trace, most: int = 1 << 20) -> list[tuple[int, ...]]:
        """``hold_from`` of what the programme chooses for rising amounts of memory; at most so many of them."""
        cuts = merged(cuts_of(trace), self.blocks)
        plain = simulate(trace, [0] * len(trace.values))
        unit = max(-(-plain.kept_bytes // self.units), 1)
        chain = chain_of(trace, cuts, unit)
        table = Table(chain, self.units + len(cuts))
        rooms = [room for room in range(self.units + len(cuts)) if table.time[0][-1][room] < INFINITE]
        return [tuple(decode(trace, cuts, table, room)) for room in rooms[:: max(1, -(-len(rooms) // most))]]


def merged(cuts: Sequence[int], blocks: int) -> tuple[int, ...]:
    """At most ``blocks`` stretches of neighbouring blocks."""
    size = max(-(-(len(cuts) - 1) // blocks), 1)
    return (*cuts[:-1:size], cuts[-1])


def chain_of(trace: Trace, cuts: Sequence[int], unit: int) -> Chain:
    """The blocks between cuts as a chain, bytes in units rounded up."""
    layout, line = layout_of(trace), lineage_of(trace)
    inputs, inners, times = [], [], []
    for start, end in pairwise(cuts):
        ops = [trace.ops[op] for op in layout.ops[start:end]]
        made = [v for op in ops for v in op.outputs if line.is_saved[v] or layout.last_use[v] >= end]
        inputs.append(-(-layout.crossing[start] // unit))
        inners.append(-(-sum(line.bytes[v] for v in made) // unit))
        times.append(float(sum(op.time_ns + trace.overhead_ns for op in ops)))
    return Chain(inputs=tuple(inputs), inners=tuple(inners), times=tuple(times))


def decode(trace: Trace, cuts: tuple[int, ...], table: Table, room: int) -> list[int]:
    """``hold_from`` of the programme's choices: each is made when backward enters the stretch that it is made for, the first ones in forward."""
    layout = layout_of(trace)
    hold = [0] * len(trace.values)
    for start, end in pairwise(cuts):
        hold_between(trace, layout, hold, start, end, max(layout.entry(start, end), 1))
    stretches = [(0, len(cuts) - 2, room, 0)]
    while stretches:
        low, high, left, entry = stretches.pop()
        middle = table.choice[low][high][left]
        if middle == low:
            hold_between(trace, layout, hold, cuts[low], cuts[low + 1], entry)
            if low < high:
                stretches.append((low + 1, high, left - table.chain.inners[low], entry))
            continue
        hold_across(trace, layout, hold, cuts, middle, entry)
        stretches.append((middle, high, left - table.chain.inputs[middle], entry))
        stretches.append((low, middle - 1, left, max(layout.entry(cuts[low], cuts[middle]), 1)))
    return hold
