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
6. Sources' bytes are resident for the whole step and count once in ``resident_bytes``; storages that operators allocate count
   while they live.
"""

from __future__ import annotations

import enum
import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from punar.errors import PlanError

FORMAT = "punar-trace"
VERSION = 1


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
    """One allocation. Units: bytes as the allocator counts them."""

    id: int
    bytes: int
    is_source: bool
    module: str = ""


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
    statistics): the next version there is a source (Rule 2).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One tensor that autograd saved: ``value`` is what it reads."""

    id: int
    value: int


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
            "storages": [[s.bytes, s.is_source, s.module] for s in self.storages],
            "saves": [s.value for s in self.saves],
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
            trace = cls(
                device=str(body["device"]),
                ops=tuple(_op_from_row(row) for row in body["ops"]),
                values=tuple(Value(id=i, storage=s, version=v, producer=p) for i, (s, v, p) in enumerate(body["values"])),
                storages=tuple(Storage(id=i, bytes=b, is_source=bool(c), module=m) for i, (b, c, m) in enumerate(body["storages"])),
                saves=tuple(Save(id=i, value=v) for i, v in enumerate(body["saves"])),
                events=tuple(Event(EventKind(k), i) for k, i in body["events"]),
                resident_bytes=int(body["resident_bytes"]),
                overhead_ns=int(body["overhead_ns"]),
                is_backward_seen=bool(body["is_backward_seen"]),
                meta=dict(body["meta"]),
            )
            check(trace)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise PlanError(f"the trace is damaged: {type(error).__name__}: {error}; profile the step again") from error
        return trace


def read_json(text: str, format: str, version: int) -> dict[str, Any]:
    """Parses one of our files and checks what it says it is."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise PlanError(f"asked to read a {format} file, found no JSON ({error}); make the file again") from error
    if not isinstance(body, dict) or body.get("format") != format:
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise PlanError(f"asked to read a {format} file, found {found!r}; give a file that punar wrote")
    if body.get("version") != version:
        raise PlanError(f"the {format} file is of version {body.get('version')!r}, this punar reads {version}; make the file again")
    return body


def _op_from_row(row: list[Any]) -> Op:
    id, name, kind, is_backward, has_grad_mode, module, signature, inputs, outputs, time_ns, peak_bytes, is_replayable, clobbers = row
    return Op(
        id=int(id),
        name=str(name),
        kind=str(kind),
        is_backward=bool(is_backward),
        has_grad_mode=bool(has_grad_mode),
        module=str(module),
        signature=str(signature),
        inputs=tuple(map(int, inputs)),
        outputs=tuple(map(int, outputs)),
        time_ns=int(time_ns),
        peak_bytes=int(peak_bytes),
        is_replayable=bool(is_replayable),
        clobbers=tuple(map(int, clobbers)),
    )


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
    for kind, id in trace.events:
        if id < 0:
            raise ValueError(f"negative id in {kind.name}")
        match kind:
            case EventKind.RUN:
                op = trace.ops[id]
                if ran[id] or not all(made[v] for v in op.inputs):
                    raise ValueError(f"operator {id} ({op.name}) runs twice, or before its inputs are made")
                ran[id] = True
                for value in op.outputs:
                    if trace.values[value].producer != id:
                        raise ValueError(f"value {value} is not of operator {id}")
                    made[value] = True
            case EventKind.SAVE | EventKind.RELEASE:
                if kind == EventKind.SAVE and not made[trace.saves[id].value]:
                    raise ValueError(f"save {id} of a value that is not made yet")
                if state[id] != (kind == EventKind.RELEASE):
                    raise ValueError(f"{kind.name} {id} out of order")
                state[id] += 1
            case EventKind.DEMAND | EventKind.RETURN:
                if state[id] != 1:
                    raise ValueError(f"{kind.name} {id} out of order")
            case EventKind.FREE:
                trace.storages[id]
    if not all(ran):
        raise ValueError("an operator never runs")
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

    def add_storage(self, *, bytes: int, is_source: bool, module: str = "") -> int:
        self.storages.append(Storage(id=len(self.storages), bytes=bytes, is_source=is_source, module=module))
        return len(self.storages) - 1

    def add_value(self, *, storage: int, version: int, producer: int) -> int:
        self.values.append(Value(id=len(self.values), storage=storage, version=version, producer=producer))
        return len(self.values) - 1

    def add_save(self, value: int) -> int:
        self.saves.append(Save(id=len(self.saves), value=value))
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
