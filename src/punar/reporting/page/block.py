"""The plan of one block as a graph: its operators in layers, what each reads, and what becomes of what it makes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from punar.ir.blocks import cuts_of, layout_of, runs_of
from punar.ir.trace import Op, Trace
from punar.plan.plan import Plan
from punar.plan.playback import Playback
from punar.reporting.explain.places import OUTSIDE

MOST_NODES = 120
"""How many operators are drawn at most."""

Fate = Literal["made before the block", "kept", "recomputed", "moved", "compressed", "not needed"]
FATES: tuple[Fate, ...] = ("kept", "recomputed", "moved", "compressed", "not needed", "made before the block")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator. Units: bytes that it allocates as results, nanoseconds.

    ``fate``: what becomes of what it makes: ``not needed`` by backward, or, of an operator in front of the block, ``made before the block``. ``layer``: one below the
    lowest that it reads from; ``place``: in the layer, with its middle at 0.
    """

    op: int
    name: str
    module: str
    source: str
    fate: Fate
    bytes: int
    time_ns: int
    layer: int
    place: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block. ``edges``: (reads from, reader) as places in ``nodes``. ``count``: how many blocks are equal; ``cut``: how many operators are not drawn."""

    title: str
    count: int
    cut: int
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]


def block_of(trace: Trace, plan: Plan | None, planned: Playback) -> Block | None:
    """The middle one of the blocks that repeat over most of forward, else the longest stretch between cuts; None of an empty forward pass."""
    start, end, count = _place_of(trace)
    ops = [trace.ops[op] for op in layout_of(trace).ops[start:end]]
    ops = [op for op in ops if op.outputs]
    shown = ops[:MOST_NODES]
    if not shown:
        return None
    title = _common([op.module for op in shown]) or OUTSIDE
    edges = _edges(trace, shown)
    before = sorted({reads for reads, _ in edges} - {op.id for op in shown})
    everything = [*(trace.ops[op] for op in before), *shown]
    layers = _layers(everything, edges)
    fates = _fates(trace, plan, planned)
    columns: dict[int, list[int]] = defaultdict(list)
    for op in everything:
        columns[layers[op.id]].append(op.id)
    nodes = tuple(
        Node(
            op=op.id,
            name=op.name,
            module=op.module or OUTSIDE,
            source=op.source,
            fate="made before the block" if op.id in before else fates.get(op.id, "not needed"),
            bytes=sum(trace.storages[trace.values[value].storage].bytes for value in op.outputs if not trace.values[value].version),
            time_ns=op.time_ns,
            layer=layers[op.id],
            place=columns[layers[op.id]].index(op.id) - (len(columns[layers[op.id]]) - 1) / 2,
        )
        for op in everything
    )
    at = {op.id: place for place, op in enumerate(everything)}
    return Block(
        title=title, count=count, cut=len(ops) - len(shown), nodes=nodes, edges=tuple((at[reads], at[reader]) for reads, reader in edges)
    )


def _place_of(trace: Trace) -> tuple[int, int, int]:
    """Where in forward the block is, and how many there are like it."""
    runs = runs_of(trace)
    if runs:
        start = runs[0].start + runs[0].length * (runs[0].count // 2)
        return start, start + runs[0].length, runs[0].count
    cuts = cuts_of(trace)
    start, end = max(pairwise(cuts), key=lambda pair: pair[1] - pair[0], default=(0, len(layout_of(trace).ops)))
    return start, end, 1


def _edges(trace: Trace, ops: list[Op]) -> list[tuple[int, int]]:
    """(operator read from, operator that reads); sources, such as parameters, are left out."""
    found = ((trace.values[value].producer, op.id) for op in ops for value in op.inputs)
    return list(dict.fromkeys((reads, reader) for reads, reader in found if reads >= 0 and reads != reader))


def _layers(ops: list[Op], edges: list[tuple[int, int]]) -> dict[int, int]:
    """Each operator is below all that it reads from; ops are in the order of forward."""
    reads = defaultdict(list)
    for producer, reader in edges:
        reads[reader].append(producer)
    layers: dict[int, int] = {}
    for op in ops:
        layers[op.id] = max((layers[producer] + 1 for producer in reads[op.id]), default=0)
    return layers


def _fates(trace: Trace, plan: Plan | None, planned: Playback) -> dict[int, Fate]:
    """What becomes of what an operator makes, where backward needs it; of several values the last rule that applies."""
    fates: dict[int, Fate] = {trace.values[save.value].producer: "kept" for save in trace.saves}
    fates.update({run.op: "recomputed" for run in planned.runs if run.is_replay})
    if plan is not None:
        for move in plan.moves:
            fates[trace.values[move.value].producer] = "compressed" if plan.channels[move.tier].is_codec else "moved"
    return fates


def _common(modules: list[str]) -> str:
    """The path that all of these modules are in."""
    paths = [module.split(".") for module in modules if module]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
