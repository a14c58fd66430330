"""Keeps live bytes under a budget while nothing is planned yet: drops saved values as memory runs short, and makes them again when they are asked for.

NOTE. What an evictor may drop, and what it must hold for that.

1. A value is *at hand* while ``base`` is a tensor on its storage: saved values are, until they are dropped. Values that nobody saved are not held
   at all, so that they die as in the plain step.
2. Only what frees memory is dropped: a value of which nobody but its handles holds the storage, as its reference count says.
3. A value that is dropped, or that a dropped one is made from and that is not at hand, is *required*: what its operator reads is held from then
   on (``need``), or required in turn. Where the lineage leads to something that is gone and cannot be made, nothing is dropped.
4. A value that has handles is held again when a replay makes it. Others live as long as that replay needs them.
5. Memory that the plain step would have freed by now may live on by Rule 3: the trace is told when the plain step's would have gone.

Source: M. Kirisame, S. Lyubomirsky, A. Haan, J. Brennan, M. He, J. Roesch, T. Chen, Z. Tatlock, "Dynamic Tensor Rematerialization", ICLR 2021,
arXiv:2006.09616: the heuristic h_DTR with equivalence classes (section 4.1 and appendix C), which takes the value of least compute per byte and
staleness, where compute includes that of dropped neighbours; the search among a sample (section 5, appendix E). Deviations: lineages begin at values
that are at hand when something is dropped, instead of at constants, and staleness counts operators instead of seconds.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Container, Iterable, Iterator
from math import isqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from punar.torch.meter import Meter, StorageObserver, StorageRecord
from punar.torch.records import RecordedOp, Value, checksum, detached
from punar.torch.replay import ReplayCount, clone_storage, replay
from punar.torch.undo import bytes_of

if TYPE_CHECKING:
    from punar.torch.online import OnlineHandle
    from punar.torch.tracer import Loan

_SAMPLE = 48
"""So many values are compared at a time, or the square root of all where that is more."""

_BEST = 4
"""One in so many of those compared is dropped before others are."""

_MOST_REPLAYS = 16
"""Where so many times the operators of the forward pass were replayed, the budget is one that no plan will reach either: nothing more is dropped."""

_FEWEST_REPLAYS = 4096


class Component:
    """Dropped values that are made from one another, with the time that making all of them takes: a class of a union-find."""

    __slots__ = ("into", "time_ns")

    def __init__(self, time_ns: int) -> None:
        self.time_ns = time_ns
        self.into: Component | None = None

    def root(self) -> Component:
        here = self
        while here.into is not None:
            if here.into.into is not None:
                here.into = here.into.into
            here = here.into
        return here

    def take(self, other: Component) -> None:
        """Both are one from now on."""
        mine, theirs = self.root(), other.root()
        if mine is not theirs:
            theirs.into = mine
            mine.time_ns += theirs.time_ns


class Evictable(Value):
    """A value that keeps its lineage while it is at hand.

    ``handles``: those of its saves, ``saves`` the number of them that are alive. ``need``: how many required values' operators read it (Rule 3).
    ``number``: the trace's for its storage. ``used``: the clock when it was last used; ``time_ns``: of its operator. ``below``: classes of values that were
    made from it and dropped. ``source``: weakly, a tensor that an operator read, of a value that no recorded operator made; ``storage``: its storage.
    """

    __slots__ = (
        *("below", "component", "evictor", "handles", "is_required", "is_source", "need", "number", "place", "saves", "source"),
        *("storage", "time_ns", "used"),
    )

    is_shared = False

    def __init__(self, evictor: Evictor, record: StorageRecord, op: RecordedOp | None, time_ns: int = 0) -> None:
        super().__init__(op=op, writes=record.writes, nbytes=record.nbytes)
        self.evictor = evictor
        self.number = record.number
        self.handles: list[weakref.ref[OnlineHandle]] = []
        self.saves = self.need = 0
        self.place = -1
        self.used = evictor.clock
        self.time_ns = time_ns
        self.is_required = self.is_source = False
        self.component: Component | None = None
        self.below: list[Component] = []
        self.source: weakref.ref[Tensor] | None = None
        self.storage: weakref.ref[torch.UntypedStorage] | None = None

    def __del__(self) -> None:
        if self.place >= 0:
            self.evictor.leave_pool(self)

    def is_held_from(self, clock: int) -> bool:
        """Rule 4: held again where somebody will ask for it, or several will."""
        return self.saves > 0 or self.need > 1

    def hold(self, base: Tensor, *, is_just_written: bool = False) -> None:
        """A replay has made the value again."""
        self.base, self.versions = base, (base._version,)
        self.evictor.come_back(self, base)

    def alive_handles(self) -> Iterator[OnlineHandle]:
        for reference in self.handles:
            handle = reference()
            if handle is not None:
                yield handle

    def own_references(self) -> int:
        """How many tensors of ours are on the storage."""
        return len({id(self.base), *(id(handle.tensor) for handle in self.alive_handles())})


class Evictor:
    """Drops values of one step (see the NOTE). ``source_bytes``: what is there beside what operators made; ``budget_bytes``: of the whole step.

    ``tainted``: numbers of operators that are not to be replayed; ``freed``: of storages whose contents come and go; ``sums``: checksums of storages.
    ``spared``: storages that backward was lent and has not given back. ``is_short``: the last operator began beyond the budget, since nothing was left to
    drop.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        meter: Meter,
        count: ReplayCount,
        observer: StorageObserver,
        tainted: Container[int],
        freed: Container[int],
        sums: dict[int, int],
    ) -> None:
        self.budget_bytes = budget_bytes
        self.source_bytes = 0
        self.meter, self.count, self.observer = meter, count, observer
        self.tainted, self.freed, self.sums = tainted, freed, sums
        self.clock = self.recorded = self.replayed = 0
        self.pool: list[weakref.ref[Evictable]] = []
        self.pool_bytes = 0
        self.lingering: list[weakref.ref[Evictable]] = []
        self.spared: Container[int] = ()
        self.live_at: dict[int, int] = {}
        self.is_short = False
        self.draw = random.Random(0)  # the user's generators are not touched

    # -- what may be dropped -----------------------------------------------------------------------------------------------

    def enter_pool(self, value: Evictable) -> None:
        if value.op is not None and value.place < 0:
            value.place = len(self.pool)
            self.pool.append(weakref.ref(value))
            self.pool_bytes += value.nbytes

    def leave_pool(self, value: Evictable) -> None:
        """The last one takes its place."""
        place, value.place = value.place, -1
        if place < 0:
            return
        self.pool_bytes -= value.nbytes
        last = self.pool.pop()
        moved = last()
        if place < len(self.pool):
            self.pool[place] = last
            if moved is not None:
                moved.place = place

    def spare(self, loans: Iterable[Loan]) -> None:
        """Nothing is dropped of what backward has now."""
        self.spared = {loan.storage for loan in loans}

    def make_room(self, more_bytes: int, locked: Container[Value] = ()) -> None:
        """Drops values until so many more bytes fit the budget, or nothing is left to drop."""
        may_drop = self.replayed <= max(_FEWEST_REPLAYS, _MOST_REPLAYS * self.recorded)
        while may_drop and self.is_over(more_bytes):
            count = len(self.pool)
            sample = max(_SAMPLE, isqrt(count))
            places = range(count) if count <= sample else self.draw.sample(range(count), sample)
            may_drop = self.drop_best(places, more_bytes, locked) or (count > sample and self.drop_best(range(count), more_bytes, locked))
        self.is_short = not may_drop and self.is_over(more_bytes)

    def is_over(self, more_bytes: int) -> bool:
        """Whether so many more bytes do not fit the budget."""
        return self.meter.used(self.meter.live, self.source_bytes) + more_bytes > self.budget_bytes

    def drop_best(self, places: range | list[int], more_bytes: int, locked: Container[Value]) -> bool:
        """Drops some of the values at these places of the pool, those first that cost least; says whether any could be."""
        found = [value for value in (self.pool[place]() for place in places) if value is not None and value not in locked]
        small = self.pool_bytes // (100 * max(1, len(self.pool)))
        found.sort(key=lambda value: (value.nbytes < small, self.score(value)))
        dropped, enough = 0, max(1, len(found) // _BEST)
        for value in found:
            dropped += self.drop(value)
            if dropped >= enough or not self.is_over(more_bytes):
                break
        return dropped > 0

    def score(self, value: Evictable) -> float:
        """The paper's heuristic: time to make it again, with its dropped neighbours, for each byte and each operator since its last use."""
        staleness = self.clock - value.used + 1
        return (value.time_ns + self.neighbours_ns(value)) / (max(1, value.nbytes) * staleness)

    def neighbours_ns(self, value: Evictable) -> int:
        """What making the value's dropped neighbours takes; those that died unsaved are its ancestors up to what is at hand."""
        time_ns, roots = 0, {below.root() for below in value.below}
        stack, seen = [value], {value}
        while stack and len(seen) < _SAMPLE:
            op = stack.pop().op
            for above in () if op is None else op.values:
                if above in seen or above.base is not None or not isinstance(above, Evictable):
                    continue
                seen.add(above)
                if above.component is not None:
                    roots.add(above.component.root())
                elif above.op is not None:
                    time_ns += above.time_ns
                    stack.append(above)
        return time_ns + sum(root.time_ns for root in roots)

    def drop(self, value: Evictable) -> bool:
        """Drops a value, where that frees its storage and it can be made again; says whether it was."""
        base, op = value.base, value.op
        if base is None or op is None or base._version not in value.versions:
            return False
        storage = base.untyped_storage()
        record: StorageRecord = storage._punar  # type: ignore[attr-defined]
        if storage._cdata in self.spared or record.writes != value.writes or self.references(storage) > value.own_references():
            return False
        if any(handle.is_modified() or handle.tensor.requires_grad for handle in value.alive_handles()):
            return False  # a leaf is held as it is: who else has it cannot be counted
        expected = self.sums.get(record.number) if record.observer is self.observer else None
        if not self.closes(op) or (expected is not None and checksum(base) != expected):
            self.leave_pool(value)  # for good
            return False
        if not value.saves and record.observer is self.observer:
            self.observer.on_storage_freed(record.number)  # in the plain step it is gone already, else it lives on
        record.observer = None
        del storage
        for handle in value.alive_handles():
            handle.drop(value)
        value.base = None
        del base
        self.leave_pool(value)
        self.count.evicted_bytes += value.nbytes
        self.require(value)
        return True

    def references(self, storage: torch.UntypedStorage) -> int:
        """How many tensors are on a storage, beside this object."""
        return int(torch._C._storage_Use_Count(storage._cdata)) - 1

    # -- lineages ----------------------------------------------------------------------------------------------------------

    def closes(self, op: RecordedOp) -> bool:
        """Whether an operator can run again from what is there now (Rule 3)."""
        stack, seen = [op], {op.number}
        while stack:
            op = stack.pop()
            if op.number in self.tainted:
                return False
            for value in op.values:
                if value.base is not None:
                    continue
                assert isinstance(value, Evictable)
                if value.is_required:
                    continue
                if value.op is None:
                    if self.found(value) is None:
                        return False
                elif value.op.number not in seen:
                    seen.add(value.op.number)
                    stack.append(value.op)
        return True

    def found(self, value: Evictable) -> Tensor | None:
        """A tensor on the storage of a value that no operator makes again, where it still is what was read."""
        storage = None if value.storage is None else value.storage()
        if storage is None or value.number in self.freed or storage.nbytes() < value.nbytes:
            return None
        record = getattr(storage, "_punar", None)
        if record is None or record.writes != value.writes:
            return None
        tensor = None if value.source is None else value.source()
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            if tensor is None or tensor.untyped_storage()._cdata != storage._cdata:
                return bytes_of(storage)
        return detached(tensor) if tensor._version in value.versions else None

    def require(self, value: Evictable) -> None:
        """The value is not at hand and will be made again."""
        stack: list[Evictable] = [value]
        while stack:
            value = stack.pop()
            if value.is_required or value.op is None:
                continue
            value.is_required = True
            self.join(value, value.op)
            for above in value.op.values:
                assert isinstance(above, Evictable)
                above.need += 1
                if above.base is None and above.op is None:
                    self.grab(above)
                elif above.base is None:
                    stack.append(above)

    def unrequire(self, value: Evictable) -> None:
        """The value is at hand again, or nobody needs it any more: lets go of what was held for it."""
        stack = [value]
        while stack:
            value = stack.pop()
            if not value.is_required or value.op is None:
                continue
            value.is_required = False
            if value.component is not None:
                value.component.root().time_ns -= value.time_ns
                value.component = None
            for above in value.op.values:
                assert isinstance(above, Evictable)
                above.need -= 1
                if above.need or above.saves or (above.is_source and above.base is not None):
                    continue  # a source is there anyway, and a loan of it is known to be back by how many refer to it
                if above.base is None:
                    stack.append(above)
                elif above.base.untyped_storage()._cdata in self.spared:
                    self.lingering.append(weakref.ref(above))  # as with a source, until the loan is back
                else:
                    self.leave_pool(above)
                    above.base = None

    def join(self, value: Evictable, op: RecordedOp) -> None:
        """A dropped value is one class with its dropped neighbours."""
        component = value.component = Component(value.time_ns)
        for below in value.below:
            component.take(below)
        for above in op.values:
            assert isinstance(above, Evictable)
            if above.component is not None:
                component.take(above.component)
            if component not in above.below:
                above.below = [*{below.root(): None for below in above.below if below.root().time_ns > 0}, component]

    def grab(self, value: Evictable) -> None:
        """Holds what no operator makes again."""
        base = self.found(value)
        assert base is not None  # ``closes`` has looked
        value.base, value.versions = base, (base._version,)
        if not value.is_source:
            self.lingering.append(weakref.ref(value))

    def come_back(self, value: Evictable, base: Tensor) -> None:
        """The value is at hand again, on a new storage: to the trace it is the old one, where anybody saved it."""
        record = self.meter.record_of(base)
        assert record is not None
        record.state, record.writes = weakref.ref(value), value.writes
        if value.number in self.sums:
            self.sums[value.number] = checksum(base)  # what a kernel leaves unwritten, such as a workspace's padding, is another one's
        if value.saves:
            record.observer, record.number = self.observer, value.number
        value.used = self.clock
        for handle in value.alive_handles():
            handle.restore(base)
        self.unrequire(value)
        self.enter_pool(value)

    def bring(self, value: Evictable) -> None:
        """Makes a dropped value again.

        Raises:
            ReplayError: an operator of its lineage failed, or what it reads was freed meanwhile.
            SavedTensorModified: what it reads was written into.
        """
        replay(value, 0, self.meter, self.count, self.before_replayed)

    def before_replayed(self, op: RecordedOp, uses: dict[Value, int]) -> None:
        """Makes room for an operator of a replay, which goes on to need ``uses``."""
        self.clock += 1
        self.replayed += 1
        self.make_room(op.peak_bytes, uses)
        self.note_live(op.number)

    def note_live(self, number: int) -> None:
        """An operator is about to run, beside what is alive now."""
        self.live_at[number] = max(self.live_at.get(number, 0), self.meter.live)

    # -- ends and writes -----------------------------------------------------------------------------------------------------

    def attach(self, value: Evictable, handle: OnlineHandle) -> None:
        """The value is saved (once more): it is at hand by its handle."""
        value.handles.append(weakref.ref(handle))
        value.saves += 1
        value.used = self.clock
        handle.value = value
        if value.base is None:
            value.base, value.versions = handle.tensor, (handle.version,)
            self.unrequire(value)
        self.enter_pool(value)

    def let_go(self, value: Evictable) -> None:
        """Autograd lets one of the value's saves go."""
        value.saves -= 1
        if value.saves:
            return
        if value.base is None:
            self.observer.on_storage_freed(value.number)
            if not value.need:
                self.unrequire(value)
        elif not value.need:
            self.leave_pool(value)
            value.base = None
        elif not value.is_source:
            self.lingering.append(weakref.ref(value))

    def before_write(self, record: StorageRecord) -> None:
        """A storage is about to be overwritten: what was saved of it is left to its handles, as in eager; what lineages read of it is copied."""
        value = record.state() if record.state is not None else None
        if not isinstance(value, Evictable):
            return
        value.source = value.storage = None
        if value.base is None or value.writes != record.writes:
            return
        for handle in value.alive_handles():
            handle.value = None
        value.handles, value.saves = [], 0
        self.leave_pool(value)
        if not value.need:
            value.base = None
            return
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            value.base = clone_storage(value.base)
        value.versions = (value.base._version,)
        copied = self.meter.record_created(value.base)
        assert copied is not None
        copied.state, copied.writes = weakref.ref(value), value.writes
        self.enter_pool(value)

    def ended(self) -> list[int]:
        """Storages that would be gone by now in the plain step, since only lineages hold them (Rule 5)."""
        ended, lingering = [], []
        for reference in self.lingering:
            value = reference()
            if value is None or value.base is None:
                continue
            storage = value.base.untyped_storage()
            if not value.need and not value.saves and storage._cdata not in self.spared:
                self.leave_pool(value)
                value.base = None
                continue
            record: StorageRecord = storage._punar  # type: ignore[attr-defined]
            if record.observer is not self.observer:
                continue
            if value.saves or self.references(storage) > 1:
                lingering.append(reference)
                continue
            record.observer = None
            ended.append(record.number)
        self.lingering = lingering
        return ended
