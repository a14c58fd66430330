"""The forward pass in pieces that can be decided one by one: what to hold, and what to run again.

NOTE. Why pieces.

1. Every value that autograd saved is at hand when backward asks for it: held, or made again. A replay that reads such a value
   therefore adds no need for it; it only adds a need for the values that were not saved.
2. So operators belong together only where one reads what another makes and autograd did not save, or where they read the same such
   value. These connected *pieces* are small: what stands between saved values.
3. Which operators of a piece to run again, at a given price for holding each value, is a least cut: an operator on the sink's
   side runs again and pays its time; a value that is needed and whose producer does not run again is held and pays its price.

Source: the min-cut formulation of what to save between forward and backward, as in torch._functorch.partitioners (Horace He et al.).
Ours has prices of time and memory on one scale, and pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from punar.ir.derived import derived
from punar.ir.lineage import lineage_of
from punar.ir.trace import Trace
from punar.plan.cut import INFINITE, Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Units of operators that must be decided together. A unit is one operator, or those that write the same storage one after another.

    ``units``: in forward order. ``saved[k]``: of what ``units[k]`` makes, the values that autograd saved and that could be dropped, one for each
    storage. ``between``: the values that were not saved and may have to be held when a unit that reads them runs again. ``makers[k]``: the
    place in ``units`` of the maker of ``between[k]``, -1 where that cannot run again. ``readers[k]``: the places in ``units`` of what reads it.
    ``joint``: (value, places): saved values that are held unless all the units at the places run again.
    """

    units: tuple[tuple[int, ...], ...]
    costs: tuple[int, ...]
    saved: tuple[tuple[int, ...], ...]
    between: tuple[int, ...]
    makers: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    joint: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def ops(self, rerun: Iterable[int]) -> list[int]:
        """The operators of some of the units, given by their places."""
        return [op for at in rerun for op in self.units[at]]

    def rerun(self, price: Callable[[int], float], low: frozenset[int] = frozenset(), high: frozenset[int] | None = None) -> frozenset[int]:
        """The places in ``units`` that run again in a cheapest decision, between ``low`` and ``high``; the fewest where equal."""
        if len(self.units) == 1 and not self.between and not self.joint:
            return frozenset({0}) if sum(map(price, self.saved[0])) > self.costs[0] else low
        network = Network(2 + len(self.units) + len(self.between) + len(self.joint))
        for at, cost in enumerate(self.costs):
            fixed = INFINITE if high is not None and at not in high else cost
            network.link(0, 2 + at, 0.0 if at in low else fixed)
            network.link(2 + at, 1, INFINITE if at in low else sum(map(price, self.saved[at])))
        for k, value in enumerate(self.between):
            node = 2 + len(self.units) + k
            network.link(2 + self.makers[k] if self.makers[k] >= 0 else 0, node, price(value))
            for reader in self.readers[k]:
                network.link(node, 2 + reader, INFINITE)
        for node, (value, places) in enumerate(self.joint, start=2 + len(self.units) + len(self.between)):
            network.link(node, 1, price(value))
            for at in places:
                network.link(2 + at, node, INFINITE)
        side = network.sink_side()
        return frozenset(at for at in range(len(self.units)) if side[2 + at])

    def held(self, rerun: frozenset[int]) -> list[int]:
        """The values that are held where ``rerun`` runs again."""
        held = [value for at, values in enumerate(self.saved) if at not in rerun for value in values]
        held += [value for value, places in self.joint if not rerun.issuperset(places)]
        for value, maker, readers in zip(self.between, self.makers, self.readers, strict=True):
            if maker not in rerun and any(reader in rerun for reader in readers):
                held.append(value)
        return held

    def cost_ns(self, rerun: frozenset[int]) -> int:
        return sum(self.costs[at] for at in rerun)


@derived
def pieces_of(trace: Trace) -> tuple[Piece, ...]:
    """All pieces of a trace, in forward order of their first operators.

    Complexity: nearly linear in the operators.
    """
    line = lineage_of(trace)
    kept = set(_droppable(trace))
    readers, cone = _cone(trace)
    units, pieces = _Sets(cone), _Sets(cone)
    for op in cone:
        for old, new in line.writes[op]:
            if line.producer[old] in cone and not line.is_source[old]:
                units.join(line.producer[old], line.producer[new])
                pieces.join(line.producer[old], line.producer[new])
    for value, ops in readers.items():
        for op in [*ops, line.producer[value]] if line.can_replay[value] else ops:
            pieces.join(ops[0], op)
    grouped = units.members()
    rows = [[grouped[first] for first in dict.fromkeys(units.root(op) for op in ops)] for ops in pieces.members().values()]
    return tuple(_piece(trace, row, kept, readers) for row in rows)


def _droppable(trace: Trace) -> list[int]:
    """The saved values that can be made again and whose storage that frees: no other saved version of it must stay."""
    line = lineage_of(trace)
    saved = trace.saved_values()
    pinned = {line.storage[v] for v in saved if not line.can_replay[v] or line.is_free[v]}
    return [v for v in saved if line.bytes[v] and line.storage[v] not in pinned]


@derived
def _cone(trace: Trace) -> tuple[dict[int, list[int]], list[int]]:
    """For each value that a replay may need and autograd did not save the operators that may then read it; and all operators of replays."""
    line = lineage_of(trace)
    readers: dict[int, list[int]] = {}
    seen: set[int] = set()
    stack = sorted({line.producer[v] for v in _droppable(trace)})
    while stack:
        op = stack.pop()
        if op in seen:
            continue
        seen.add(op)
        for value in line.reads[op]:
            if line.is_saved[value] or line.is_free[value] or line.is_source[value]:
                continue
            readers.setdefault(value, []).append(op)
            if line.can_replay[value]:
                stack.append(line.producer[value])
    return {value: sorted(readers[value]) for value in sorted(readers)}, sorted(seen)


class _Sets:
    """Disjoint sets of operators.

    Source: Tarjan 1975, Efficiency of a Good But Not Linear Set Union Algorithm, doi:10.1145/321879.321884; with path halving.
    """

    def __init__(self, ops: Iterable[int]) -> None:
        self.parent = {op: op for op in ops}

    def root(self, op: int) -> int:
        parent = self.parent
        while parent[op] != op:
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.root(one), self.root(other)))
        self.parent[high] = low

    def members(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for op in self.parent:
            found.setdefault(self.root(op), []).append(op)
        return found


def _piece(trace: Trace, units: list[list[int]], kept: set[int], readers: dict[int, list[int]]) -> Piece:
    line = lineage_of(trace)
    at = {op: k for k, unit in enumerate(units) for op in unit}
    read = dict.fromkeys(v for unit in units for op in unit for v in line.reads[op] if v in readers)
    outside = {v: sorted({at[op] for op in readers[v]} - {at.get(line.producer[v], -1)}) for v in read}
    between = [v for v in read if outside[v]]
    return Piece(
        units=tuple(map(tuple, units)),
        costs=tuple(sum(trace.ops[op].time_ns + trace.overhead_ns for op in unit) for unit in units),
        saved=tuple(tuple({line.storage[v]: v for op in unit for v in trace.ops[op].outputs if v in kept}.values()) for unit in units),
        between=tuple(between),
        makers=tuple(at.get(line.producer[v], -1) if line.can_replay[v] else -1 for v in between),
        readers=tuple(tuple(outside[v]) for v in between),
    )


def by_operator(trace: Trace, piece: Piece, kept: Iterable[int]) -> Piece:
    """The same piece with each operator as a unit, and only the values ``kept`` of what autograd saved.

    A storage that is written into is held unless all that writes it, up to its last version that backward asks for, runs again. To hold another
    version of a storage that autograd saved costs nothing: it may be there anyway.
    """
    line = lineage_of(trace)
    ops = sorted(op for unit in piece.units for op in unit)
    at = {op: place for place, op in enumerate(ops)}
    chains = {v: writers(trace, piece, v) for v in kept}
    joint = {v: tuple(at[op] for op in chain) for v, chain in chains.items() if len(chain) > 1}
    fine = _piece(trace, [[op] for op in ops], set(kept) - joint.keys(), _cone(trace)[0])
    shared = _saved_storages(trace)
    between = [k for k, v in enumerate(fine.between) if line.storage[v] not in shared]
    return replace(
        fine,
        between=tuple(fine.between[k] for k in between),
        makers=tuple(fine.makers[k] for k in between),
        readers=tuple(fine.readers[k] for k in between),
        joint=tuple(joint.items()),
    )


@derived
def _saved_storages(trace: Trace) -> frozenset[int]:
    return frozenset(lineage_of(trace).storage[v] for v in trace.saved_values())


def writers(trace: Trace, piece: Piece, value: int) -> list[int]:
    """The operators of a piece that write a value's storage, up to its last version that backward asks for."""
    line = lineage_of(trace)
    storage = line.storage[value]
    ops = [op for unit in piece.units for op in unit if any(line.storage[v] == storage for v in trace.ops[op].outputs)]
    last = max((op for op in ops if _is_asked(trace, op, storage)), default=-1)
    return sorted(op for op in ops if op <= last)


def has_versions(trace: Trace, chain: Iterable[int], value: int) -> bool:
    """Whether backward asks for several versions of a value's storage, all made by the operators ``chain``."""
    return sum(_is_asked(trace, op, lineage_of(trace).storage[value]) for op in chain) > 1


def _is_asked(trace: Trace, op: int, storage: int) -> bool:
    line = lineage_of(trace)
    return any(line.storage[v] == storage and trace.demand_rank[v] for v in trace.ops[op].outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One step of a piece from holding everything to running again all it can: ``rerun`` after the step, nested in the steps before.

    ``cost_ns``: what the step adds; ``ratio``: that per byte. ``freed``: values held before and not after; ``taken``: the other way round.
    """

    piece: int
    cost_ns: int
    bytes: int
    rerun: frozenset[int]
    ratio: float
    freed: tuple[int, ...]
    taken: tuple[int, ...]


@derived
def flips_of(trace: Trace) -> tuple[tuple[Flip, ...], ...]:
    """For each piece its steps of least time per byte, by rising ratio: the lower convex hull of (bytes held, time).

    Equal pieces (same costs and sizes) are worked out once.

    Source: Gallo, Grigoriadis, Tarjan 1989, A Fast Parametric Maximum Flow Algorithm, doi:10.1137/0218003, for the nesting of the cuts.
    """
    known: dict[tuple[object, ...], list[frozenset[int]]] = {}
    return tuple(flips_of_piece(trace, number, piece, known) for number, piece in enumerate(pieces_of(trace)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the first flips of a piece come to: ``ops`` run again; ``change``: (bytes, value) no longer held, negative where it is held instead."""

    ops: tuple[int, ...]
    change: tuple[tuple[int, int], ...]


@derived
def stages_of(trace: Trace) -> tuple[tuple[Stage, ...], ...]:
    """For each piece what no, one, two, ... of its flips come to."""
    sizes = lineage_of(trace).bytes
    return tuple(tuple(_stages(piece, flips, sizes)) for piece, flips in zip(pieces_of(trace), flips_of(trace), strict=True))


def _stages(piece: Piece, flips: Iterable[Flip], sizes: tuple[int, ...]) -> Iterator[Stage]:
    yield Stage(ops=(), change=())
    change: dict[int, int] = {}
    for flip in flips:
        for value, sign in [(v, 1) for v in flip.freed] + [(v, -1) for v in flip.taken]:
            change[value] = change.get(value, 0) + sign * sizes[value]
        yield Stage(ops=tuple(piece.ops(flip.rerun)), change=tuple((size, value) for value, size in change.items() if size))


def flips_of_piece(trace: Trace, number: int, piece: Piece, known: dict[tuple[object, ...], list[frozenset[int]]]) -> tuple[Flip, ...]:
    """The steps of one piece; ``known`` remembers the decisions for pieces of the same costs and sizes."""
    sizes = lineage_of(trace).bytes
    rows = tuple(tuple(sizes[v] for v in row) for row in (*piece.saved, piece.between))
    shape = (piece.costs, piece.makers, piece.readers, rows, tuple((sizes[v], places) for v, places in piece.joint))
    if shape not in known:
        known[shape] = _hull(piece, sizes)
    return tuple(_flip(number, piece, low, high, sizes) for low, high in zip(known[shape], known[shape][1:], strict=False))


def _hull(piece: Piece, sizes: tuple[int, ...]) -> list[frozenset[int]]:
    """The decisions on the hull, nested, from running nothing again to what holds the least bytes at the least time."""
    dearest = (sum(piece.costs) + 1.0) * 2
    most = piece.rerun(lambda v: dearest * sizes[v])
    return [frozenset(), *_between(piece, sizes, frozenset(), most)] if most else [frozenset()]


def _between(piece: Piece, sizes: tuple[int, ...], low: frozenset[int], high: frozenset[int]) -> list[frozenset[int]]:
    """The decisions on the hull after ``low`` up to ``high``."""
    freed = _held_bytes(piece, sizes, low) - _held_bytes(piece, sizes, high)
    ratio = (piece.cost_ns(high) - piece.cost_ns(low)) / freed
    middle = piece.rerun(lambda v: ratio * (1 + 1e-12) * sizes[v], low, high)
    if middle in (low, high) or _held_bytes(piece, sizes, middle) in (_held_bytes(piece, sizes, low), _held_bytes(piece, sizes, high)):
        return [high]
    return _between(piece, sizes, low, middle) + _between(piece, sizes, middle, high)


def _held_bytes(piece: Piece, sizes: tuple[int, ...], rerun: frozenset[int]) -> int:
    return sum(sizes[v] for v in piece.held(rerun))


def _flip(number: int, piece: Piece, low: frozenset[int], high: frozenset[int], sizes: tuple[int, ...]) -> Flip:
    before, after = piece.held(low), piece.held(high)
    cost = piece.cost_ns(high) - piece.cost_ns(low)
    freed = sum(sizes[v] for v in before) - sum(sizes[v] for v in after)
    return Flip(
        piece=number,
        cost_ns=cost,
        bytes=freed,
        ratio=cost / freed,
        rerun=high,
        freed=tuple(v for v in before if v not in after),
        taken=tuple(v for v in after if v not in before),
    )
