"""Records one whole step, forward and backward, as a ``Trace``; drops nothing.

A storage's last reference outside autograd's saved tensors cannot be seen directly, since while tracing every saved tensor is held.
It is the death of the last tensor object that the forward pass made on that storage.
"""

from __future__ import annotations

import statistics
import sys
import time
import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from punar.ir import Event, EventKind, Op, Trace, TraceBuilder
from punar.plan import Simulation
from punar.torch.follower import Handle
from punar.torch.meter import Meter, StorageRecord
from punar.torch.modules import ModulePaths, SourceLines
from punar.torch.operators import PLAIN_TYPES, OperatorInfo, in_backward, name_of, operator_info, outputs_in, signature_of, tensors_in
from punar.torch.random_state import generator_of
from punar.torch.records import Episode, Geometry, alias, checksum, is_fake, overlaps
from punar.torch.scratch import ScratchProbe

GONE = 6
"""A raw event: the storage was freed. Turned into ``FREE`` or a later ``RELEASE`` when the trace is built."""


_REPLAY_OVERHEAD_NS = 30_000
"""What recording one operator and running it again costs besides its kernel; see ``benchmarks/overhead.py``."""


class TracedHandle(Handle):
    """A held saved tensor that tells the tracer when it is asked for and let go.

    Autograd packs what an episode's first operator saves before that operator is seen: ``tracer`` is set once there is one.
    """

    __slots__ = ("number", "tracer")

    def __init__(self, tensor: Tensor, episode: Episode) -> None:
        super().__init__(tensor, episode)
        self.tensor = alias(tensor)  # the tensor itself must die with its users, to be seen
        self.tracer: Tracer | None = None
        self.number = -1

    def __del__(self) -> None:
        super().__del__()
        if self.tracer is not None:
            self.tracer.let_go(self.number)

    def unpack(self) -> Tensor:
        if self.tracer is None:
            return super().unpack()
        if not self.episode.has_begun_backward:
            self.tracer.look_at_sources()
        self.tracer.lend(self.number, self.tensor)
        tensor = super().unpack()
        return alias(tensor) if _is_plain(tensor) else tensor  # so that its end is seen


class _Watch:
    """What storages' records refer to: outlives the tracer, which forgets it when it closes."""

    __slots__ = ("tracer",)

    def __init__(self, tracer: Tracer) -> None:
        self.tracer: Tracer | None = tracer

    def on_storage_freed(self, number: int) -> None:
        if self.tracer is not None:
            self.tracer.note(GONE, number)


class Tracer:
    """Watches an episode. ``finish`` gives its trace."""

    def __init__(self, episode: Episode, meter: Meter, device: torch.device, gradients: list[StorageRecord], carried_bytes: int) -> None:
        self.meter = meter
        self.device = device
        self.episode = episode
        self.watch = _Watch(self)
        self.builder = TraceBuilder(str(device))
        self.rows: list[dict[str, Any]] = []
        self.raw: list[tuple[int, int]] = []
        self.current: list[int] = []
        self.versions: list[int] = []
        self.sums: dict[int, int] = {}
        self.blank: set[int] = set()
        self.sources: dict[int, weakref.ref[Any]] = {}
        self.leaves: dict[int, weakref.ref[Tensor]] = {}
        self.found: set[int] = set()
        self.optimizer_bytes = 0
        self.freed_between: set[int] = set()
        self.saved_on: dict[int, list[weakref.ref[TracedHandle]]] = {}
        self.carried: dict[int, tuple[int, int]] = {}
        self.lent: list[Loan] = []
        self.tainted: set[int] = set()
        self.made_in_backward: list[weakref.ref[StorageRecord]] = []
        self.users: dict[int, int] = {}
        self.tracked: dict[int, weakref.ref[Tensor]] = {}
        self.paths = ModulePaths()
        self.lines = SourceLines()
        self.made_node: dict[int, int] = {}
        self.probe = ScratchProbe()
        self.resident_before = meter.live
        self.carried_before = carried_bytes
        self.gradients_before = set(gradients)
        self.prelude: list[int] = []
        self.is_open = True
        self.is_cut = False
        self.peaks: dict[int, int] | None = None
        self.rows.append(_prelude_row())
        self.raw.append((EventKind.RUN, 0))
        self.start_probe()

    def start_probe(self) -> None:
        """Has what operators allocate and free inside one call watched, where no allocator keeps statistics."""
        if self.device.type == "cpu":
            self.probe.start()

    def note(self, kind: int, number: int) -> None:
        if self.is_open:
            self.raw.append((kind, number))

    def forget_leftovers(self, nbytes: int) -> None:
        """A step that failed left so much alive, its graph for example: it is there once more and no part of later steps."""
        self.resident_before -= nbytes
        self.carried_before -= min(nbytes, self.carried_before)

    # -- operators -----------------------------------------------------------------------------------------------------

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        info = operator_info(func)
        if torch._guards.TracingContext.try_get() is not None:
            return func(*args, **kwargs)  # torch.compile is compiling: these run on no data
        is_backward = in_backward()
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        read = [*tensors_in(info.replay_args(args)), *tensors_in(kwargs.values())]
        written = info.written(args, kwargs)
        targets = set(map(id, written))
        inputs = [value for value in (self.value_of(t, is_target=id(t) in targets) for t in read) if value >= 0]
        row = {
            "name": info.name,
            "kind": info.kind,
            "is_backward": is_backward,
            "has_grad_mode": torch.is_grad_enabled(),
            "module": sys.intern(self.paths.current() if not is_backward else _node_name()),
            "signature": signature_of(info.name, args, kwargs),
            "inputs": tuple(dict.fromkeys(inputs)),
            "is_replayable": not is_backward and self.is_replayable(info, tensors, args, kwargs),
            **(self.origin() if is_backward else self.place(len(self.rows))),
        }
        if self.lent:
            self.take_back()
        number = len(self.rows)
        self.rows.append(row)
        try:
            out = self.timed(number, row, func, args, kwargs)
        except BaseException:
            if len(self.rows) == number + 1:
                self.rows.pop()  # it may be caught, and the step go on: what failed is no part of it
            raise
        self.raw.append((EventKind.RUN, number))
        made = self.outputs(number, info, outputs_in(out), is_backward)
        row["outputs"] = tuple(made + self.overwritten(number, info, written))
        return out

    def place(self, number: int) -> dict[str, Any]:
        """Where a forward operator was called. The first one that runs after autograd has numbered a node is that node's."""
        self.made_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, number)
        return {"source": sys.intern(self.lines.current())}

    def origin(self) -> dict[str, Any]:
        """The forward operator whose node runs."""
        return {"forward": self.made_node.get(_place_in_backward()[1], -1)}

    def is_replayable(self, info: OperatorInfo, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not info.is_replayable or not all(type(t) in PLAIN_TYPES and t.layout is torch.strided for t in tensors):
            return False
        if info.is_random and generator_of(args, kwargs) is None:
            return False
        if info.is_factory and self.device.type != "cpu":
            return False  # that nothing unseen wrote into it could not be checked without waiting for the device
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        is_heavy = info.kind in ("matmul", "attention", "convolution")
        return not is_heavy or needs_grad or not torch.is_grad_enabled()

    def timed(self, number: int, row: dict[str, Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the operator and writes down its time and the most memory it took."""
        if self.device.type == "cuda":
            return self.timed_on_cuda(row, func, args, kwargs)
        with self.probe.mark(number):
            start = time.perf_counter_ns()
            out = func(*args, **kwargs)
            row["time_ns"] = time.perf_counter_ns() - start
        return out

    def timed_on_cuda(self, row: dict[str, Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        start = time.perf_counter_ns()
        out = func(*args, **kwargs)
        torch.cuda.synchronize(self.device)
        row["time_ns"] = time.perf_counter_ns() - start
        row["peak_bytes"] = max(0, torch.cuda.max_memory_allocated(self.device) - before)
        return out

    def outputs(self, number: int, info: OperatorInfo, tensors: list[Tensor], is_backward: bool) -> list[int]:
        made = []
        for tensor in tensors:
            record = self.meter.record_created(tensor) if info.makes else None
            if record is not None:
                storage = self.adopt(record, tensor, is_source=False)
                if is_backward:
                    self.made_in_backward.append(weakref.ref(record))
                made.append(self.add_value(storage, number))
                if info.is_uninitialized:
                    self.blank.add(storage)
                elif self.rows[number]["is_replayable"]:
                    self.sums[storage] = checksum(tensor)
            if not is_backward:
                self.track(tensor)
        return made

    def overwritten(self, number: int, info: OperatorInfo, written: list[Tensor]) -> list[int]:
        """New versions of the storages that the operator wrote into."""
        made, seen = [], set()
        for tensor in written:
            record = self.meter.record_of(tensor) if type(tensor) in PLAIN_TYPES else None
            if record is None or record in seen:
                continue
            seen.add(record)
            record.writes += 1
            record.state = None
            storage = self.adopt(record, tensor, is_source=True)
            if info.is_refill:
                self.freed_between.add(storage)
            beside = self.taint_overwritten_saves(storage, tensor)
            if storage in self.blank and not _fills(info, tensor, record):
                self.rows[number]["is_replayable"] = False  # the rest may be filled by what is not seen
            self.blank.discard(storage)
            self.sums.pop(storage, None)
            if info.hidden_writes is not None:
                self.rows[number]["clobbers"] = (*self.rows[number].get("clobbers", ()), self.current[storage])
                self.add_value(storage, -1)
                continue
            made.append(self.add_value(storage, number))
            if not self.episode.is_sealed:
                self.carry(beside, made[-1], number)
            if self.rows[number]["is_replayable"]:
                self.sums[storage] = checksum(tensor)
        return made

    # -- storages, values ------------------------------------------------------------------------------------------------

    def adopt(self, record: StorageRecord, tensor: Tensor, *, is_source: bool) -> int:
        """The number of a tensor's storage, given to it now where this tracer does not know it.

        What operators made before the episode began, such as noise that is added to the batch, is taken as made by one operator that begins it.
        """
        if record.observer is not self.watch:
            is_prelude = is_source and record.is_created and record not in self.gradients_before
            is_source = is_source and not is_prelude
            record.observer = self.watch
            record.number = self.builder.add_storage(
                bytes=self.round(record.nbytes), is_source=is_source, module=self.paths.current(), dtype=name_of(tensor.dtype)
            )
            self.current.append(-1)
            self.versions.append(-1)
            if is_source:
                self.add_value(record.number, -1)
                if not record.is_created:
                    self.found.add(record.number)
            if is_prelude:
                self.prelude.append(self.add_value(record.number, 0))
                self.resident_before -= record.nbytes
                self.carried_before = max(0, self.carried_before - record.nbytes)
                for user in (tensor, tensor._base):
                    if user is not None:
                        self.track(user)
        return record.number

    def round(self, nbytes: int) -> int:
        """CUDA's allocator hands out multiples of 512 B."""
        return -(-nbytes // 512) * 512 if self.device.type == "cuda" else nbytes

    def add_value(self, storage: int, producer: int) -> int:
        self.versions[storage] += 1
        self.current[storage] = self.builder.add_value(storage=storage, version=self.versions[storage], producer=producer)
        return self.current[storage]

    def value_of(self, tensor: Tensor, *, is_target: bool = False) -> int:
        """The value that a tensor reads; -1 for one that is not on a plain storage. ``is_target``: it is read to be overwritten."""
        if type(tensor) not in PLAIN_TYPES:
            return -1
        record = self.meter.record_of(tensor)
        if record is None:
            return -1
        storage = self.adopt(record, tensor, is_source=True)
        if self.builder.storages[storage].is_source and storage not in self.sources:
            self.sources[storage] = weakref.ref(tensor.untyped_storage())
        leaf = tensor._base if tensor._base is not None else tensor  # views before the episode's first operator were not seen
        if leaf.is_leaf and leaf.requires_grad:
            self.leaves[id(leaf)] = weakref.ref(leaf)
        expected = self.sums.get(storage)
        if (expected is not None and checksum(tensor) != expected) or (storage in self.blank and not is_target):
            self.taint(storage)
        return self.current[storage]

    def taint(self, storage: int) -> None:
        """A kernel that dispatched nothing wrote here: what it wrote is held, and its base is never replayed."""
        self.sums.pop(storage, None)
        self.blank.discard(storage)
        self.tainted.add(self.builder.values[self.current[storage]].producer)
        self.add_value(storage, -1)

    def taint_overwritten_saves(self, storage: int, written: Tensor) -> list[int]:
        """Backward will read what is written into saved tensors, if it does not raise: these are not for dropping.

        Returns the saves of the storage's latest version that have nothing of what is written.
        """
        beside = []
        for handle in (reference() for reference in self.saved_on.get(storage, ())):
            if handle is None:
                continue
            value = self.carried[handle.number][0] if handle.number in self.carried else self.builder.saves[handle.number].value
            if overlaps(Geometry(handle.tensor), written):
                self.tainted.add(self.builder.values[value].producer)
            elif value == self.current[storage]:
                beside.append(handle.number)
        return beside

    def carry(self, saves: list[int], value: int, row: int) -> None:
        """An operator made a new version of a storage that leaves these saves as they are: from now on they are saves of that one."""
        for number in saves:
            self.carried[number] = (value, row)

    def carry_saves(self) -> None:
        """Writes down of which version each save is, and moves its event behind the operator that made it (Rule 6 of traces)."""
        builder = self.builder
        saves: dict[int, list[int]] = {}
        for number, (value, row) in sorted(self.carried.items()):
            if number < len(builder.saves) and value < len(builder.values) and row < len(self.rows):  # else it was cut off
                builder.saves[number] = replace(builder.saves[number], value=value)
                saves.setdefault(row, []).append(number)
        if not saves:
            return
        moved = {number for numbers in saves.values() for number in numbers}
        raw = [event for event in self.raw if event[0] != EventKind.SAVE or event[1] not in moved]
        self.raw = []
        for event in raw:
            self.raw.append(event)
            if event[0] == EventKind.RUN:
                self.raw += [(EventKind.SAVE, number) for number in saves.get(event[1], ())]

    # -- lifetimes ---------------------------------------------------------------------------------------------------------

    def track(self, tensor: Tensor) -> None:
        """Counts a tensor object among its storage's users until it dies."""
        if type(tensor) not in PLAIN_TYPES or id(tensor) in self.tracked:
            return
        record = self.meter.record_of(tensor)
        if record is None or record.observer is not self.watch:
            return
        storage, key = record.number, id(tensor)
        self.users[storage] = self.users.get(storage, 0) + 1

        def on_death(_: weakref.ref[Tensor]) -> None:
            self.tracked.pop(key, None)
            self.users[storage] -= 1
            if not self.users[storage]:
                self.note(EventKind.FREE, storage)

        self.tracked[key] = weakref.ref(tensor, on_death)

    # -- saved tensors -----------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> TracedHandle:
        handle = TracedHandle(tensor, self.episode)
        self.watch_handle(handle, self.value_of(tensor))
        return handle

    def watch_handle(self, handle: TracedHandle, value: int) -> None:
        """From now on a saved tensor's end is written down, where it is a value that the trace can name."""
        if value >= 0:
            self.builder.add_save(value)
            handle.tracer, handle.number = self, len(self.builder.saves) - 1
            self.saved_on.setdefault(self.builder.values[value].storage, []).append(weakref.ref(handle))
            self.note(EventKind.SAVE, handle.number)

    def lend(self, number: int, tensor: Tensor) -> None:
        """Backward asks for a saved tensor."""
        self.take_back()
        self.note(EventKind.DEMAND, number)
        self.lent.append(Loan(number, *_place_in_backward(), *_references(tensor)))

    def take_back(self) -> None:
        """Notes what backward is done with that it was lent."""
        here = _place_in_backward()
        for loan in self.lent:
            if loan.is_back(*here):
                self.note(EventKind.RETURN, loan.number)
        self.lent = [loan for loan in self.lent if not loan.is_back(*here)]

    def let_go(self, number: int) -> None:
        """Autograd lets a saved tensor go."""
        self.lent = [loan for loan in self.lent if loan.number != number]
        self.note(EventKind.RELEASE, number)

    def gradients(self) -> list[weakref.ref[StorageRecord]]:
        """The storages that backward made and that are still there."""
        return [reference for reference in self.made_in_backward if reference() is not None]

    def look_at_sources(self) -> None:
        """Backward begins: a source without its bytes is a sharded parameter between its uses, which replays cannot rely on."""
        for number, reference in self.sources.items():
            storage = reference()
            if storage is not None and storage.nbytes() < self.builder.storages[number].bytes:
                self.freed_between.add(number)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def finish(self, *, is_backward_seen: bool, meta: dict[str, str]) -> Trace:
        """Closes the record and builds the trace."""
        source_gradient_bytes = self.source_gradient_bytes()
        self.close()
        self.rows[0]["outputs"] = tuple(self.prelude)
        peaks = self.peaks or {}
        times = _typical_times(self.rows)
        builder = self.builder
        self.carry_saves()
        created: list[int] = [0] * len(self.rows)
        for value in builder.values:
            if value.version == 0 and value.producer >= 0:
                created[value.producer] += builder.storages[value.storage].bytes
        for number, row in enumerate(self.rows):
            peak = row.pop("peak_bytes", peaks.get(number, 0))
            row["is_replayable"] &= number not in self.tainted
            row["is_replayable"] &= all(builder.values[value].storage not in self.freed_between for value in row["inputs"])
            builder.ops.append(Op(id=number, **{**row, "time_ns": times[number]}, peak_bytes=max(peak, created[number])))
        builder.events[:] = _settle(self.raw, builder)
        carried = 0 if self.is_cut else max(0, self.carried_bytes() - self.carried_before)
        meta = meta | {"source_bytes": str(self.source_bytes()), "carried_bytes": str(carried)}
        meta = meta | {"source_gradient_bytes": str(source_gradient_bytes)}
        resident_before = self.resident_before + carried
        resident_bytes = self.meter.resident_with(resident_before, self.source_bytes() + self.optimizer_bytes)
        return builder.build(resident_bytes=resident_bytes, is_backward_seen=is_backward_seen, meta=meta, overhead_ns=_REPLAY_OVERHEAD_NS)

    def peak_bytes(self, trace: Trace, plain: Simulation) -> int:
        """The most bytes that the step had which the trace was made from; ``plain``: what its own simulation says."""
        return plain.peak_bytes - int(trace.meta["carried_bytes"])

    @property
    def budget_bytes(self) -> int | None:
        """What the whole step is kept within while it is recorded, as far as that can be; None where nothing is dropped."""
        return None

    @property
    def is_exhausted(self) -> bool:
        """Whether its last operator began beyond that, since nothing was left to drop."""
        return False

    def cut(self) -> bool:
        """The pass failed: keeps what was recorded of its forward, followed by a backward that asks for its saves from the last to the first.

        Says whether there is anything in it that could be dropped.
        """
        end = next((place for place, event in enumerate(self.raw) if self.is_of_backward(*event)), len(self.raw))
        del self.raw[end:]
        rows = sum(kind == EventKind.RUN for kind, _ in self.raw)
        saves = sum(kind == EventKind.SAVE for kind, _ in self.raw)
        values = next((value.id for value in self.builder.values if value.producer >= rows), len(self.builder.values))
        storages = max((value.storage + 1 for value in self.builder.values[:values]), default=0)
        for table, count in (
            (self.rows, rows),
            (self.builder.saves, saves),
            (self.builder.values, values),
            (self.builder.storages, storages),
        ):
            del table[count:]
        self.found = {number for number in self.found if number < storages}
        released = {number for kind, number in self.raw if kind == EventKind.RELEASE}
        for number in reversed(range(saves)):
            if number not in released:
                self.raw += [(EventKind.DEMAND, number), (EventKind.RELEASE, number)]
        self.is_cut = True
        return saves > 0 and all("outputs" in row for row in self.rows[1:])

    def is_of_backward(self, kind: int, number: int) -> bool:
        """Whether a raw event is the first that a backward pass causes."""
        return kind == EventKind.DEMAND or (kind == EventKind.RUN and self.rows[number]["is_backward"])

    def source_bytes(self) -> int:
        """What the step read and no operator of ours made: parameters, buffers, the batch. A batch of an earlier step is no part of it."""
        gone = {number for kind, number in self.raw if kind == GONE}
        return sum(self.builder.storages[number].bytes for number in self.found - gone)

    def source_gradient_bytes(self) -> int:
        """Those of ``source_bytes`` that are gradients: of leaves that the step read, from before it."""
        leaves = [leaf for leaf in (reference() for reference in self.leaves.values()) if leaf is not None]
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None and type(leaf.grad) in PLAIN_TYPES]
        records = {self.meter.record_of(gradient) for gradient in gradients}
        known = {record.number for record in records if record is not None and record.observer is self.watch}
        return sum(self.builder.storages[number].bytes for number in known & self.found)

    def carried_bytes(self) -> int:
        """What the forward pass made and the user still holds, such as the loss: it is there beside the next step's until replaced."""
        gone = {number for kind, number in self.raw if kind == GONE}
        made = {value.storage for value in self.builder.values if value.producer >= 0 and not self.rows[value.producer]["is_backward"]}
        return sum(self.builder.storages[s].bytes for s in made - gone if not self.builder.storages[s].is_source)

    def pause(self) -> None:
        """The ``with`` block ends; backward may still come."""
        if self.peaks is None:
            self.peaks = self.probe.stop()

    def give_up_scratch(self) -> None:
        """The next episode begins, inside an operator's call, and nobody knew before that this one was over: its operators are taken to need their outputs alone."""
        if self.peaks is None:
            self.peaks = {}
            self.probe.park()

    def close(self) -> None:
        """Stops watching; safe to call twice."""
        self.pause()
        self.is_open = False
        self.watch.tracer = None
        self.tracked.clear()


_FILLING = frozenset(
    {"copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
)


def _fills(info: OperatorInfo, tensor: Tensor, record: StorageRecord) -> bool:
    """Whether an in-place operator overwrites the whole storage with what does not depend on its old contents."""
    _, base, overload = info.name.split(".")
    return tensor.numel() * tensor.element_size() == record.nbytes and (base in _FILLING or "out" in overload)


def _prelude_row() -> dict[str, Any]:
    return {
        "name": "punar.prelude",
        "kind": "prelude",
        "is_backward": False,
        "has_grad_mode": False,
        "module": "",
        "signature": "punar.prelude",
        "inputs": (),
        "is_replayable": False,
        "time_ns": 0,
    }


def _typical_times(rows: list[dict[str, Any]]) -> list[int]:
    """Each operator's time, as the median over those with its signature: one call alone is noise."""
    groups: dict[tuple[str, bool], list[int]] = {}
    for row in rows:
        groups.setdefault((row["signature"], row["is_backward"]), []).append(row["time_ns"])
    typical = {key: int(statistics.median_low(times)) for key, times in groups.items()}
    return [typical[row["signature"], row["is_backward"]] for row in rows]


class Loan(NamedTuple):
    """A saved tensor that a node of a backward pass was given; its storage, where known, had ``references`` before."""

    number: int
    task: int
    node: int
    storage: int
    references: int

    def is_back(self, task: int, node: int) -> bool:
        """Whether the node is done with it: another one runs, unless in an inner backward pass; or its storage has no more references than before."""
        if self.task < task:
            return False
        if (self.task, self.node) != (task, node):
            return True
        return self.storage != 0 and torch._C._storage_Use_Count(self.storage) <= self.references


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN_TYPES and not tensor.requires_grad and (not tensor.__dict__ or is_fake(tensor))


def _references(tensor: Tensor) -> tuple[int, int]:
    """A saved tensor's storage with how many refer to it; 0 where it is lent itself."""
    if not _is_plain(tensor):
        return 0, 0
    storage = tensor.untyped_storage()._cdata
    return storage, torch._C._storage_Use_Count(storage)


def _place_in_backward() -> tuple[int, int]:
    """The number of the backward pass that runs, an inner one's being higher, and of its node; -1 where there is none."""
    node = torch._C._current_autograd_node()
    return torch._C._current_graph_task_id(), -1 if node is None else node._sequence_nr()


def _node_name() -> str:
    node = torch._C._current_autograd_node()
    return f"backward:{node.name()}" if node is not None else "backward"


def _settle(raw: list[tuple[int, int]], builder: TraceBuilder) -> list[Event]:
    """Turns what was seen into a trace's events: one FREE a storage at its users' last death, RELEASEs no earlier than the storage's end.

    A storage that nothing saved is freed when it is gone. One that was saved is gone when both its users and its saves are; where it
    outlived both, something in backward kept it, and its last RELEASE moves there; what was lent of it is not known to have come back.
    """
    saves_of: dict[int, list[int]] = {}
    for save in builder.saves:
        saves_of.setdefault(builder.values[save.value].storage, []).append(save.id)
    last_free = {number: place for place, (kind, number) in enumerate(raw) if kind == EventKind.FREE}
    gone = {number: place for place, (kind, number) in enumerate(raw) if kind == GONE}
    last_release = {
        builder.values[builder.saves[number].value].storage: place for place, (kind, number) in enumerate(raw) if kind == EventKind.RELEASE
    }
    moved, kept = {}, set()
    for storage, place in last_release.items():
        end = gone.get(storage, len(raw))
        if end > max(place, last_free.get(storage, -1)) and any(kind == EventKind.RUN for kind, _ in raw[place:end]) and storage in gone:
            moved[place] = end
            kept.add(storage)
    late: dict[int, int] = {end: place for place, end in moved.items()}
    events: list[Event] = []
    released: set[int] = set()
    for place, (kind, number) in enumerate(raw):
        if kind == EventKind.FREE:
            if number in saves_of and last_free[number] == place:
                events.append(Event(EventKind.FREE, number))
        elif kind == GONE:
            if place in late:
                events.append(Event(EventKind.RELEASE, raw[late[place]][1]))
            if number not in saves_of or number not in last_free:
                events.append(Event(EventKind.FREE, number))
        elif kind == EventKind.RETURN:
            if builder.values[builder.saves[number].value].storage not in kept and number not in released:
                events.append(Event(EventKind.RETURN, number))
        elif place not in moved:
            if kind == EventKind.RELEASE:
                released.add(number)
            events.append(Event(EventKind(kind), number))
    return events
