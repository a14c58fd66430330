"""The programme of 'held, or made again once': when each operator runs again, and what is alive at each moment.

NOTE. The columns, all between 0 and 1; for a given choice of what to drop the others have one value.

1. Free values are those that a replay may make. ``drop[v]``: a value is dropped (``hold_from`` 1), else it is held from forward on (0).
2. A *stage* is the time from one first demand for a free value to the next; stage 0 is what comes before them all. ``back[op, stage]``: an
   operator has run again by the end of a stage. A dropped value is back once it was asked for, or once a dropped value that reads it is;
   ``again[op]`` is where it ends, and what it costs.
3. A value is *away* in a stage where it is dropped and not back. A reader is *pending* where it will run again and has not. A value is alive,
   once the step's own references are gone, where it is not away and a save of it is not released or a reader of it is pending.
4. In every stage each operator of the step has its room beside what is alive. So has each operator that runs again, beside what
   is alive just before it: what the replay has made so far is back, what comes later is not.
5. In-place writes: each version that was made again is a copy of its own, so that such an operator needs room for one more. The original storage is
   alive where some saved version is not dropped; a held version that was overwritten while a reader is pending is a copy as well.
6. Rare cases (a value that is back while the step itself still refers to it; what the trace's backward saves) are counted too low, never too
   high, so that the optimum is still a lower bound of the family's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import gcd

from punar.ir import EventKind, Trace
from punar.ir.lineage import Lineage, lineage_of
from punar.solvers.highs import Programme


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is alive at some operator's run, by who decides on it.

    ``stage``; ``bytes``: alive whatever is decided, with the operator's room. ``kept``: for each storage that only saves keep, their versions.
    ``returned``: values that come as copies beside a storage that is there anyway. ``loose``: values that pending readers alone
    keep. ``cloned``: saved values that were overwritten, of which pending readers keep a copy.
    """

    stage: int
    bytes: int
    kept: tuple[tuple[int, ...], ...] = ()
    returned: tuple[int, ...] = ()
    loose: tuple[int, ...] = ()
    cloned: tuple[int, ...] = ()


class Stages:
    """What the NOTE's columns are made of, read off a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.line = trace, lineage_of(trace)
        self.free = candidates(trace, self.line)
        self.readers = readers(self.line, self.free)
        self.ops = sorted({self.line.producer[v] for v in self.free})
        self.outputs = {op: [v for v in self.free if self.line.producer[v] == op] for op in self.ops}
        self.asked = self.first_demands()
        self.count = len(self.asked)
        self.changes = self.change_stages()

    def first_demands(self) -> dict[int, int]:
        """For each free saved value the stage that its first demand begins, from 1."""
        asked: dict[int, int] = {}
        is_free = set(self.free)
        for kind, id in self.trace.events:
            value = self.trace.saves[id].value if kind == EventKind.DEMAND else -1
            if value in is_free and value not in asked:
                asked[value] = len(asked) + 1
        return asked

    def change_stages(self) -> dict[int, list[int]]:
        """For each operator the stages in which it may run again."""
        changes: dict[int, list[int]] = {}
        for op in reversed(self.ops):
            found: set[int] = set()
            for v in self.outputs[op]:
                found |= {self.asked[v]} if v in self.asked else set()
                found |= {stage for reader in self.readers.get(v, ()) for stage in changes[reader]}
            limit = max((self.asked[v] for v in self.outputs[op] if v in self.asked), default=self.count)
            if all(v in self.asked for v in self.outputs[op]):
                found = {stage for stage in found if stage <= limit}
            changes[op] = sorted(found)
        return changes


def candidates(trace: Trace, line: Lineage) -> list[int]:
    """The values whose ``hold_from`` matters: those that replays may make."""
    found: set[int] = set()
    stack = [v for v in trace.saved_values() if line.can_replay[v] and not line.is_free[v]]
    while stack:
        v = stack.pop()
        if v in found or not line.can_replay[v] or line.is_free[v]:
            continue
        found.add(v)
        stack.extend(line.reads[line.producer[v]])
    return sorted(found)


def readers(line: Lineage, free: Sequence[int]) -> dict[int, list[int]]:
    """For each value the operators that read it and make a free one."""
    found: dict[int, list[int]] = defaultdict(list)
    for op in sorted({line.producer[w] for w in free}):
        for u in line.reads[op]:
            found[u].append(op)
    return found


def walked(stages: Stages) -> Walk:
    """Goes through the plain step once."""
    walk = Walk(stages)
    for kind, id in stages.trace.events:
        walk.pass_event(kind, id)
    return walk


class Walk:
    """The plain step, with what decisions keep set apart. ``before[stage]``: what is alive when its demand comes."""

    def __init__(self, stages: Stages) -> None:
        self.stages, self.trace, self.line = stages, stages.trace, stages.line
        self.is_free = set(stages.free)
        self.stage = 0
        self.is_used: set[int] = set()
        self.saves: dict[int, list[int]] = defaultdict(list)
        self.unread = {u: set(ops) for u, ops in stages.readers.items()}
        self.overwritten: set[int] = set()
        self.highest: dict[Moment, int] = {}
        self.before: dict[int, Moment] = {}

    def moments(self) -> list[Moment]:
        """The runs of the step's own operators, the highest one of those with the same values alive."""
        return [replace(moment, bytes=high) for moment, high in self.highest.items()]

    def pass_event(self, kind: EventKind, id: int) -> None:
        if kind == EventKind.RUN:
            self.run(id)
            return
        if kind == EventKind.FREE:
            self.is_used.discard(id)
            return
        value = self.trace.saves[id].value
        if kind == EventKind.SAVE:
            self.saves[self.line.storage[value]].append(value)
        elif kind == EventKind.RELEASE:
            self.saves[self.line.storage[value]].remove(value)
        elif kind == EventKind.DEMAND and self.stages.asked.get(value) == self.stage + 1:
            self.stage += 1
            self.before[self.stage] = self.alive()

    def run(self, op: int) -> None:
        for u in self.line.reads[op]:
            if u in self.unread:
                self.unread[u].discard(op)
        self.overwritten.update(old for old, _ in self.line.writes[op])
        self.overwritten.update(self.trace.ops[op].clobbers)
        moment = self.alive()
        key = replace(moment, bytes=0)
        self.highest[key] = max(self.highest.get(key, 0), moment.bytes + self.trace.ops[op].peak_bytes)
        self.is_used.update(self.line.storage[v] for v in self.line.creates[op])

    def alive(self) -> Moment:
        size, kept, returned, cloned = self.trace.resident_bytes, [], [], []
        for s in sorted(self.is_used | {s for s, saves in self.saves.items() if saves}):
            keepers = sorted(set(self.saves.get(s, ())))
            cloned += [v for v in keepers if v in self.overwritten and v in self.unread]
            if self.trace.storages[s].is_source:
                continue
            if s in self.is_used or not self.is_free.issuperset(keepers):
                size += self.trace.storages[s].bytes
                returned += [v for v in keepers if v in self.is_free]
            else:
                kept.append(tuple(keepers))
        loose = [u for u, unread in self.unread.items() if not unread and self.is_loose(u)]
        return Moment(
            stage=self.stage, bytes=size, kept=tuple(kept), returned=tuple(returned), loose=tuple(sorted(loose)), cloned=tuple(cloned)
        )

    def is_loose(self, value: int) -> bool:
        storage = self.line.storage[value]
        if not self.line.bytes[value] or value in self.saves.get(storage, ()):
            return False
        is_there = storage in self.is_used or bool(self.saves.get(storage)) or self.trace.storages[storage].is_source
        return value in self.overwritten or not is_there


class Choice:
    """The programme of one trace and budget."""

    def __init__(self, stages: Stages, budget_bytes: int, solver: str) -> None:
        self.stages, self.trace, self.line, self.budget = stages, stages.trace, stages.line, budget_bytes
        self.programme = Programme(solver)
        column = self.programme.column
        self.drop = {v: column(is_integer=True) for v in stages.free}
        self.again = {op: column(self.trace.ops[op].time_ns + self.trace.overhead_ns, is_integer=False) for op in stages.ops}
        self.back = {op: {stage: column(is_integer=False) for stage in stages.changes[op][:-1]} for op in stages.ops}
        self.named: dict[tuple[object, ...], int] = {}
        self.known: set[tuple[int, int]] = set()
        self.last = {value.storage: value.id for value in self.trace.values}
        versions = Counter(value.storage for value in self.trace.values)
        self.is_single = [versions[storage.id] == 1 for storage in self.trace.storages]
        for op in reversed(stages.ops):
            self.tie_operator(op)
        for v in stages.free:
            self.tie_idle(v)
        walk = walked(stages)
        self.before = walk.before
        for moment in walk.moments():
            self.tie_memory(moment, {}, {})
        for value, stage in stages.asked.items():
            self.tie_replay(self.line.producer[value], stage)

    def back_at(self, op: int, stage: int) -> int | None:
        """The column that says whether an operator has run again by a stage; None where it cannot have."""
        changes = self.stages.changes[op]
        if not changes or stage < changes[0]:
            return None
        if stage >= changes[-1]:
            return self.again[op]
        return self.back[op][max(s for s in changes if s <= stage)]

    def tie_operator(self, op: int) -> None:
        """Rule 2, for each stage in which something may change."""
        row, outputs = self.programme.row, self.stages.outputs[op]
        for stage in self.stages.changes[op]:
            here = self.back_at(op, stage)
            assert here is not None
            reasons: dict[int, float] = {here: -1.0}
            for v in outputs:
                if self.stages.asked.get(v, stage + 1) <= stage:
                    row(0.0, {here: 1.0, self.drop[v]: -1.0})
                    reasons[self.drop[v]] = 1.0
                    continue
                for reader in self.stages.readers.get(v, ()):
                    other = self.back_at(reader, stage)
                    if other is not None:
                        row(-1.0, {here: 1.0, other: -1.0, self.drop[v]: -1.0})
                        reasons[self.needed(v, other)] = 1.0
            row(0.0, reasons)
            if len(outputs) == 1:
                row(0.0, {self.drop[outputs[0]]: 1.0, here: -1.0})
            before = self.back_at(op, stage - 1)
            if before is not None and before != here:
                row(0.0, {here: 1.0, before: -1.0})

    def needed(self, value: int, back: int) -> int:
        """Whether a reader that is back needed a value: it is dropped. Of an operator's only value that is known, where it runs again at all."""
        if len(self.stages.outputs[self.line.producer[value]]) == 1:
            return back
        key = ("needed", value, back)
        if key not in self.named:
            self.named[key] = self.programme.column(is_integer=False)
            for column in (self.drop[value], back):
                self.programme.row(0.0, {column: 1.0, self.named[key]: -1.0})
        return self.named[key]

    def tie_idle(self, value: int) -> None:
        """A value that autograd did not save is dropped only where something that reads it runs again: else the decision means nothing."""
        if not self.line.is_saved[value]:
            self.programme.row(0.0, {self.drop[value]: -1.0, **{self.again[reader]: 1.0 for reader in self.stages.readers.get(value, ())}})

    def away(self, value: int, when: Mapping[int, int], stage: int) -> dict[int, int]:
        """Rule 3, as a sum of columns. ``when``: for operators the stage that they have come to, where it is not ``stage``."""
        op = self.line.producer[value]
        stage = when.get(op, stage)
        if value not in self.drop or stage >= self.stages.asked.get(value, stage + 1):
            return {}
        back = self.back_at(op, stage)
        if back is None:
            return {self.drop[value]: 1}
        if len(self.stages.outputs[op]) == 1:
            return {self.drop[value]: 1, back: -1}
        return {self.both(self.drop[value], back): 1}

    def both(self, drop: int, back: int) -> int:
        """Whether one of several values of an operator is away: it is dropped, and the operator is not back."""
        key = ("away", drop, back)
        if key not in self.named:
            self.named[key] = self.programme.column(is_integer=False)
            self.programme.row(0.0, {drop: 1.0, self.named[key]: -1.0})
            self.programme.row(-1.0, {back: -1.0, self.named[key]: -1.0})
        return self.named[key]

    def pending(self, value: int, when: Mapping[int, int], stage: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each reader that may be pending the columns that say so, with their signs."""
        found: list[tuple[tuple[int, int], ...]] = []
        for reader in self.stages.readers.get(value, ()):
            again, back = self.again[reader], self.back_at(reader, when.get(reader, stage))
            if back is None:
                found.append(((again, 1),))
            elif back != again:
                found.append(((again, 1), (back, -1)))
        return tuple(found)

    def at_least(self, *reasons: tuple[int, tuple[tuple[int, int], ...]]) -> int | None:
        """A column that is no less than any of some sums, given as (constant, signed columns), nor than 0; None where there is none."""
        if not reasons:
            return None
        if reasons not in self.named:
            self.named[reasons] = self.programme.column(is_integer=False)
            for constant, terms in reasons:
                entries = {self.named[reasons]: 1.0}
                for column, sign in terms:
                    entries[column] = entries.get(column, 0.0) - sign
                self.programme.row(constant, entries)
        return self.named[reasons]

    def whole(self, versions: Sequence[int], when: Mapping[int, int], stage: int) -> int | None:
        """Whether the original storage is alive that saves of these versions keep (Rule 5)."""
        last = self.last[self.line.storage[versions[0]]]
        reasons = [(1, ((self.drop[v], -1),)) for v in versions]
        if last not in versions:
            dropped = ((self.drop[last], -1),) if last in self.drop else ()
            reasons += [(0, (*terms, *dropped)) for terms in self.pending(last, when, stage)]
        return self.at_least(*reasons)

    def tie_replay(self, op: int, stage: int) -> bool:
        """Rule 4 for an operator that runs again in a stage; says whether that is new."""
        if (op, stage) in self.known:
            return False
        self.known.add((op, stage))
        size = self.trace.ops[op].peak_bytes + sum(self.line.bytes[new] for _, new in self.line.writes[op])
        entries: dict[int, int] = defaultdict(int)
        for at, sign in ((stage, 1), (stage - 1, -1)):
            column = self.back_at(op, at)
            if column is not None:
                entries[column] += sign * size
        when = {other: stage if other < op else stage - 1 for other in self.stages.ops}
        self.tie_memory(self.before[stage], when, entries)
        return True

    def tie_memory(self, moment: Moment, when: Mapping[int, int], room: Mapping[int, int]) -> None:
        """What is alive, with the ``room`` that columns need, is within the budget; bytes are counted in their common divisor."""
        sizes: dict[int, int] = defaultdict(int, room)
        free = self.budget - moment.bytes - self.add_values(sizes, moment, when)
        if sum(size for size in sizes.values() if size > 0) <= free:
            return
        unit = gcd(*sizes.values()) or 1
        largest = max((abs(size) for size in sizes.values()), default=0) / unit or 1.0
        self.programme.row(-(free // unit) / largest, {index: -size / unit / largest for index, size in sizes.items()})

    def add_values(self, sizes: dict[int, int], moment: Moment, when: Mapping[int, int]) -> int:
        """Adds the bytes of what is alive to the columns that say so; returns those that are there but for columns."""
        line, stage, fixed = self.line, moment.stage, 0
        for versions in moment.kept:
            size = line.bytes[versions[0]]
            if self.is_single[line.storage[versions[0]]]:
                fixed += size
                self.add(sizes, -size, self.away(versions[0], when, stage))
                continue
            self.add(sizes, size, {self.whole(versions, when, stage): 1})
            for v in versions:
                self.add_copy(sizes, v, when, stage)
        for v in moment.returned:
            self.add_copy(sizes, v, when, stage)
        for v in moment.loose:
            away = tuple((column, -sign) for column, sign in self.away(v, when, stage).items())
            column = self.at_least(*((0, (*terms, *away)) for terms in self.pending(v, when, stage)))
            self.add(sizes, line.bytes[v], {column: 1})
        for v in moment.cloned:
            dropped = ((self.drop[v], -1),) if v in self.drop else ()
            column = self.at_least(*((0, (*terms, *dropped)) for terms in self.pending(v, when, stage)))
            self.add(sizes, line.bytes[v], {column: 1})
        return fixed

    def add_copy(self, sizes: dict[int, int], value: int, when: Mapping[int, int], stage: int) -> None:
        """The copy of a saved value that was dropped and is back."""
        self.add(sizes, self.line.bytes[value], {self.drop[value]: 1})
        self.add(sizes, -self.line.bytes[value], self.away(value, when, stage))

    def add(self, sizes: dict[int, int], size: int, columns: Mapping[int | None, int] | Mapping[int, int]) -> None:
        for column, sign in columns.items():
            if column is not None:
                sizes[column] += sign * size

    def dropped(self, values: Sequence[float]) -> set[int]:
        """What a solution drops."""
        return {v for v, column in self.drop.items() if values[column] > 0.5}

    def exclude(self, dropped: AbstractSet[int]) -> None:
        """At least one value is decided otherwise."""
        ones = {column: -1.0 for v, column in self.drop.items() if v in dropped}
        zeros = {column: 1.0 for v, column in self.drop.items() if v not in dropped}
        self.programme.row(1.0 - len(ones), ones | zeros)

    def returns(self, dropped: AbstractSet[int]) -> dict[int, list[int]]:
        """For each stage the operators that run again in it, where exactly these values are dropped."""
        stages, when = self.stages, dict[int, int]()
        for op in reversed(stages.ops):
            found = [stages.asked[v] for v in stages.outputs[op] if v in dropped and v in stages.asked]
            found += [when[k] for v in stages.outputs[op] if v in dropped for k in stages.readers.get(v, ()) if k in when]
            if found:
                when[op] = min(found)
        grouped: dict[int, list[int]] = defaultdict(list)
        for op in sorted(when):
            grouped[when[op]].append(op)
        return grouped
