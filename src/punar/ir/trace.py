"""The frozen record of one training step that planners read.

NOTE. What a trace says, as numbered rules.

1. A *storage* is one allocation. A *value* is one version of a storage's contents: the operator that allocates it makes
   version 0, each operator that writes into it in place makes the next one. Views are no values: they read their storage's.
2. A value without producer is a *source*: it was there before the step (parameter, buffer, batch) or came from where
   operators cannot be seen. A source can be held, never replayed.
3. ``events`` is the whole order of the step. ``RUN op``: the operator executes. ``SAVE save``: autograd saves a value for
   backward. ``DEMAND save``: backward asks for it. ``RETURN save``: the node that asked is done with what it was given
   (where that is not told, it is at the RELEASE). ``RELEASE save``: autograd lets it go. ``FREE storage``: the last
   reference that is neither autograd's saved tensors nor punar's is gone. A storage with no FREE outlives the step.
4. Memory at an event: bytes of the storages allocated and not yet free, a storage being kept alive by its references
   (until FREE) or by its saves (until the last RELEASE). During ``RUN op`` the peak is ``op.peak_bytes`` above what was live
   at its start; it counts the operator's own outputs and its scratch.
5. ``op.is_replayable`` says that running the operator again on the same inputs gives the same outputs and no side effect.
6. A save is of the latest version of its storage that has what was saved: operators that write beside it, as into another view, carry it on. Its SAVE
   stands after the last of them, which changes no memory, since what they write into is there.
7. Sources' bytes are resident for the whole step and count once in ``resident_bytes``; storages that operators allocate count
   while they live.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
import sys
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from punar.errors import PlanError
from punar.ir.fields import Field, FieldError

FORMAT = "punar-trace"
VERSION = 4


class EventKind(enum.IntEnum):
    """What happens at one point of the step (Rule 3)."""

    RUN = 0
    SAVE = 1
    DEMAND = 2
    RELEASE = 3
    FREE = 4
    RETURN = 5


class Event(NamedTuple):
    """One point of the step: ``id`` is an operator's, a save's or a storage's, as ``kind`` says."""

    kind: EventKind
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One allocation. Units: bytes as the allocator counts them. ``dtype``: of the tensor it was made for, such as ``float32``; "" where that is not known."""

    id: int
    bytes: int
    is_source: bool
    module: str = ""
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One version of a storage's contents (Rule 1). ``producer`` is an operator's id, or -1 for a source (Rule 2)."""

    id: int
    storage: int
    version: int
    producer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One dispatched operator call. ``inputs`` and ``outputs`` are value ids; an in-place write reads the old value.

    ``kind`` is one of ``matmul``, ``attention``, ``convolution``, ``norm``, ``random``, ``copy``, ``factory``, ``view``,
    ``collective``, ``prelude`` (stands for whatever made what is there when the forward pass begins), ``other``.
    ``signature`` names the function with the shapes and dtypes it was called on: operators
    with equal signatures cost the same. ``clobbers``: values whose storage it overwrites besides, with what no replay can make (running
    statistics): the next version there is a source (Rule 2). ``source``: the line of Python that called it in forward, such as
    ``model.py:12``; "" where that is not known. ``forward``: of a backward operator, the forward one whose autograd node ran it; -1 where that
    is not known.
    """

    id: int
    name: str
    kind: str
    is_backward: bool
    has_grad_mode: bool
    module: str
    signature: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    time_ns: int
    peak_bytes: int
    is_replayable: bool
    clobbers: tuple[int, ...] = ()
    source: str = ""
    forward: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One tensor that autograd saved: ``value`` is what it reads, ``first`` the version of its storage when it was saved (Rule 6)."""

    id: int
    value: int
    first: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One whole step, forward and backward (see the NOTE above).

    ``resident_bytes`` counts what was on the device before the step and stays (parameters, buffers, batch, existing gradients, optimizer
    state that was seen). ``overhead_ns`` is what calling one operator costs besides its kernel, for replays.
    """

    device: str
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    saves: tuple[Save, ...]
    events: tuple[Event, ...]
    resident_bytes: int
    overhead_ns: int = 6000
    is_backward_seen: bool = True
    meta: dict[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        """Cheap, for what is cached by trace: equal traces have equal sizes."""
        return hash((self.device, len(self.ops), len(self.events), self.resident_bytes))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the forward operators with their shapes: equal for steps that take the same path."""
        digest = hashlib.sha256()
        for op in self.ops:
            if not op.is_backward and op.has_grad_mode:
                digest.update(op.signature.encode())
                digest.update(b"\n")
        return digest.hexdigest()[:32]

    @cached_property
    def demand_rank(self) -> tuple[int, ...]:
        """For each value the rank (from 1) of backward's first demand for it among all values; 0 where there is none."""
        rank = [0] * len(self.values)
        clock = 0
        for kind, id in self.events:
            if kind == EventKind.DEMAND and not rank[self.saves[id].value]:
                clock += 1
                rank[self.saves[id].value] = clock
        return tuple(rank)

    @cached_property
    def plain_time_ns(self) -> int:
        """Nanoseconds of the plain step: every operator once, as it was timed when called from Python."""
        return sum(op.time_ns for op in self.ops)

    @property
    def forward_ops(self) -> tuple[Op, ...]:
        """The forward pass's operators; without what stands for all that was made before it began."""
        return tuple(op for op in self.ops if not op.is_backward and op.kind != "prelude")

    def is_resized(self, other: Trace) -> bool:
        """Whether another trace is of the same step on other sizes: the same operators on the same values, saved, asked for and freed in the same order."""
        return (
            (self.device, self.events, self.saves, self.values) == (other.device, other.events, other.saves, other.values)
            and [storage.is_source for storage in self.storages] == [storage.is_source for storage in other.storages]
            and all(map(_is_same_call, self.ops, other.ops))
        )

    def saved_values(self) -> tuple[int, ...]:
        """The values that autograd saved, each once, in the order of the first save."""
        return tuple(dict.fromkeys(save.value for save in self.saves))

    def to_json(self) -> str:
        """Writes the trace as JSON; ``from_json`` reads it back equal."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "device": self.device,
            "ops": [list(asdict(op).values()) for op in self.ops],
            "values": [[v.storage, v.version, v.producer] for v in self.values],
            "storages": [[s.bytes, s.is_source, s.module, s.dtype] for s in self.storages],
            "saves": [[s.value, s.first] for s in self.saves],
            "events": [[int(e.kind), e.id] for e in self.events],
            "resident_bytes": self.resident_bytes,
            "overhead_ns": self.overhead_ns,
            "is_backward_seen": self.is_backward_seen,
            "meta": self.meta,
        }
        return json.dumps(body)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Reads what ``to_json`` wrote.

        Raises:
            PlanError: the text is not a trace of ours, is damaged, or is of another version.
        """
        body = read_json(text, FORMAT, VERSION)
        try:
            trace = _trace_from_body(body)
            check_references(trace)
            check(trace)
        except ValueError as error:
            raise PlanError(f"the trace is damaged: {error}; profile the step again") from error
        return trace


def _is_same_call(one: Op, other: Op) -> bool:
    """Whether two operators do the same to the same values, whatever their sizes."""
    return (one.name, one.inputs, one.outputs, one.clobbers, one.is_backward, one.has_grad_mode, one.is_replayable) == (
        *(other.name, other.inputs, other.outputs, other.clobbers, other.is_backward, other.has_grad_mode, other.is_replayable),
    )


def read_json(text: str, format: str, version: int) -> dict[str, Any]:
    """Parses one of our files and checks what it says it is."""
    try:
        body = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise PlanError(f"asked to read a {format} file, found no JSON ({error}); make the file again") from error
    if not isinstance(body, dict) or body.get("format") != format:
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise PlanError(f"asked to read a {format} file, found {found!r}; give a file that punar wrote")
    if body.get("version") != version:
        raise PlanError(f"the {format} file is of version {body.get('version')!r}, this punar reads {version}; make the file again")
    return body


KINDS = (
    *("matmul", "attention", "convolution", "norm", "random", "copy"),
    *("factory", "view", "collective", "prelude", "other"),
)
"""What an operator may be (see ``Op``)."""

_OP_FIELDS = tuple(f.name for f in fields(Op))
_DEVICE = re.compile(r"[a-z_]+(:[0-9]{1,4})?")
_TABLES = ("device", "ops", "values", "storages", "saves", "events")
_SCALARS = ("resident_bytes", "overhead_ns", "is_backward_seen", "meta")


def _trace_from_body(body: dict[str, Any]) -> Trace:
    """Reads each field for itself; ``check_references`` and ``check`` see whether they go together.

    Raises:
        FieldError: a field is not what it must be.
    """
    part = Field("", body).members(("format", "version", *_TABLES, *_SCALARS))
    return Trace(
        device=_device_from(part["device"]),
        ops=tuple(_op_from_row(row) for row in part["ops"].items()),
        values=tuple(_value_from_row(id, row) for id, row in enumerate(part["values"].items())),
        storages=tuple(_storage_from_row(id, row) for id, row in enumerate(part["storages"].items())),
        saves=tuple(_save_from_row(id, row) for id, row in enumerate(part["saves"].items())),
        events=tuple(_event_from_row(row) for row in part["events"].items()),
        resident_bytes=part["resident_bytes"].number(),
        overhead_ns=part["overhead_ns"].number(),
        is_backward_seen=part["is_backward_seen"].flag(),
        meta=_meta_from(part["meta"]),
    )


def _device_from(found: Field) -> str:
    if not _DEVICE.fullmatch(found.text()):
        raise found.is_wrong('a device such as "cpu" or "cuda:0"')
    return found.text()


def _op_from_row(row: Field) -> Op:
    part = dict(zip(_OP_FIELDS, row.columns(*_OP_FIELDS), strict=True))
    if part["kind"].text() not in KINDS:
        raise part["kind"].is_wrong(f"one of {', '.join(KINDS)}")
    return Op(
        id=part["id"].number(),
        name=sys.intern(part["name"].text()),
        kind=part["kind"].text(),
        is_backward=part["is_backward"].flag(),
        has_grad_mode=part["has_grad_mode"].flag(),
        module=sys.intern(part["module"].text()),
        signature=sys.intern(part["signature"].text()),
        inputs=part["inputs"].numbers(),
        outputs=part["outputs"].numbers(),
        time_ns=part["time_ns"].number(),
        peak_bytes=part["peak_bytes"].number(),
        is_replayable=part["is_replayable"].flag(),
        clobbers=part["clobbers"].numbers(),
        source=sys.intern(part["source"].text()),
        forward=part["forward"].number(least=-1),
    )


def _save_from_row(id: int, row: Field) -> Save:
    value, first = row.columns("value", "first")
    return Save(id=id, value=value.number(), first=first.number())


def _value_from_row(id: int, row: Field) -> Value:
    storage, version, producer = row.columns("storage", "version", "producer")
    return Value(id=id, storage=storage.number(), version=version.number(), producer=producer.number(least=-1))


def _storage_from_row(id: int, row: Field) -> Storage:
    size, is_source, module, dtype = row.columns("bytes", "is_source", "module", "dtype")
    return Storage(id=id, bytes=size.number(), is_source=is_source.flag(), module=sys.intern(module.text()), dtype=sys.intern(dtype.text()))


def _event_from_row(row: Field) -> Event:
    kind, id = row.columns("kind", "id")
    return Event(EventKind(kind.number(most=max(EventKind))), id.number())


def _meta_from(found: Field) -> dict[str, str]:
    """Notes on the step. Those whose names end with ``_bytes`` or ``_ns`` are numbers."""
    if type(found.content) is not dict:
        raise found.is_wrong("an object")
    meta = {}
    for name, content in found.content.items():
        note = Field(f"meta.{name}", content)
        meta[name] = note.text()
        if name.endswith(("_bytes", "_ns")) and not re.fullmatch("[0-9]{1,16}", note.text()):
            raise note.is_wrong("a text of a whole number")
    return meta


def check_references(trace: Trace) -> None:
    """Raises ``FieldError`` where a row names another that is not there, or two rows that name each other disagree."""
    values = len(trace.values)
    for op in trace.ops:
        for name in ("inputs", "outputs", "clobbers"):
            for id in getattr(op, name):
                _check_id(f"ops[{op.id}].{name}", id, values, "values")
        if op.forward >= 0 and (not op.is_backward or op.forward >= op.id):
            raise FieldError(f"ops[{op.id}].forward is {op.forward}, which is no forward operator before it")
        if op.kind == "prelude" and (op.is_replayable or op.is_backward):
            raise FieldError(f"ops[{op.id}].is_replayable or .is_backward is true, which what came before the step cannot be")
    for save in trace.saves:
        for name in ("value", "first"):
            _check_id(f"saves[{save.id}].{name}", getattr(save, name), values, "values")
        saved, first = trace.values[save.value], trace.values[save.first]
        if saved.storage != first.storage or saved.version < first.version:
            raise FieldError(f"saves[{save.id}].first is {save.first}, which is no version of value {save.value} or before it")
    for value in trace.values:
        _check_id(f"values[{value.id}].storage", value.storage, len(trace.storages), "storages")
        _check_id(f"values[{value.id}].producer", value.producer, len(trace.ops), "ops")
    tables = {EventKind.RUN: ("ops", len(trace.ops)), EventKind.FREE: ("storages", len(trace.storages))}
    for place, (kind, id) in enumerate(trace.events):
        name, count = tables.get(kind, ("saves", len(trace.saves)))
        _check_id(f"events[{place}].id", id, count, name)
    _check_makers(trace)
    _check_versions(trace)


def _check_id(place: str, id: int, count: int, table: str) -> None:
    if id >= count:
        raise FieldError(f"{place} names number {id} of {table}, there are {count}")


def _check_makers(trace: Trace) -> None:
    """An operator's outputs and their producers are one relation, written down twice."""
    made = [v for op in trace.ops for v in op.outputs]
    if len(made) != len(set(made)):
        raise FieldError("ops[...].outputs name a value twice")
    for value in trace.values:
        if value.producer >= 0 and value.id not in trace.ops[value.producer].outputs:
            raise FieldError(f"values[{value.id}].producer is {value.producer}, whose outputs do not have it")


def _check_versions(trace: Trace) -> None:
    """A storage's values count up from 0, and the first one says whether it was there before the step (Rules 1 and 2)."""
    following = [0] * len(trace.storages)
    for value in trace.values:
        if value.version != following[value.storage]:
            raise FieldError(f"values[{value.id}].version is {value.version}, it must be {following[value.storage]}")
        following[value.storage] += 1
        if not value.version and trace.storages[value.storage].is_source != (value.producer < 0):
            raise FieldError(f"storages[{value.storage}].is_source does not agree with values[{value.id}].producer")


def check(trace: Trace) -> None:
    """Raises ``ValueError`` where a trace breaks one of its rules."""
    tables: tuple[tuple[Op | Value | Storage | Save, ...], ...] = (trace.ops, trace.values, trace.storages, trace.saves)
    for table in tables:
        for index, row in enumerate(table):
            if row.id != index:
                raise ValueError(f"{type(row).__name__} {row.id} stands at place {index}")
    made = [value.producer < 0 for value in trace.values]
    ran = [False] * len(trace.ops)
    state = [0] * len(trace.saves)
    for place, (kind, id) in enumerate(trace.events):
        where = f"events[{place}], {kind.name} {id},"
        if id < 0:
            raise ValueError(f"{where} has a negative id")
        match kind:
            case EventKind.RUN:
                op = trace.ops[id]
                if ran[id] or not all(made[v] for v in op.inputs):
                    raise ValueError(f"{where} runs {op.name} twice, or before its inputs are made")
                ran[id] = True
                for value in op.outputs:
                    if trace.values[value].producer != id:
                        raise ValueError(f"ops[{id}].outputs has value {value}, whose producer is {trace.values[value].producer}")
                    made[value] = True
            case EventKind.SAVE | EventKind.RELEASE:
                if kind == EventKind.SAVE and not made[trace.saves[id].value]:
                    raise ValueError(f"{where} is of a value that is not made yet")
                if state[id] != (kind == EventKind.RELEASE):
                    raise ValueError(f"{where} is out of order")
                state[id] += 1
            case EventKind.DEMAND | EventKind.RETURN:
                if state[id] != 1:
                    raise ValueError(f"{where} is out of order")
            case EventKind.FREE:
                trace.storages[id]
    if not all(ran):
        raise ValueError(f"ops[{ran.index(False)}] never runs")
    if trace.resident_bytes < 0 or any(s.bytes < 0 for s in trace.storages) or any(o.time_ns < 0 or o.peak_bytes < 0 for o in trace.ops):
        raise ValueError("a negative size or time")


class TraceBuilder:
    """Collects a trace while the step runs; ``build`` checks the rules."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self.saves: list[Save] = []
        self.events: list[Event] = []

    def add_storage(self, *, bytes: int, is_source: bool, module: str = "", dtype: str = "") -> int:
        self.storages.append(Storage(id=len(self.storages), bytes=bytes, is_source=is_source, module=module, dtype=dtype))
        return len(self.storages) - 1

    def add_value(self, *, storage: int, version: int, producer: int) -> int:
        self.values.append(Value(id=len(self.values), storage=storage, version=version, producer=producer))
        return len(self.values) - 1

    def add_save(self, value: int) -> int:
        self.saves.append(Save(id=len(self.saves), value=value, first=value))
        self.events.append(Event(EventKind.SAVE, len(self.saves) - 1))
        return len(self.saves) - 1

    def add_op(self, op: Op) -> None:
        self.ops.append(op)
        self.events.append(Event(EventKind.RUN, op.id))

    def add_event(self, kind: EventKind, id: int) -> None:
        self.events.append(Event(kind, id))

    def build(
        self, *, resident_bytes: int, is_backward_seen: bool = True, meta: dict[str, str] | None = None, overhead_ns: int = 6000
    ) -> Trace:
        trace = Trace(
            device=self.device,
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=tuple(self.storages),
            saves=tuple(self.saves),
            events=tuple(self.events),
            resident_bytes=resident_bytes,
            overhead_ns=overhead_ns,
            is_backward_seen=is_backward_seen,
            meta=meta or {},
        )
        check(trace)
        return trace
