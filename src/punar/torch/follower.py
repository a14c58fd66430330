"""Obeys a plan: records what replays will need, drops what the plan says to drop."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch import Tensor

from punar.plan.plan import MoveRow
from punar.torch.attributes import note_unpacked
from punar.torch.codecs import CodedCopy
from punar.torch.meter import Meter, StorageRecord
from punar.torch.movers import Movers
from punar.torch.offload import Coming, bring, land
from punar.torch.operators import PLAIN_TYPES, OperatorInfo, operator_info, outputs_in
from punar.torch.random_state import RandomState, generator_of
from punar.torch.records import (
    Episode,
    RecordedOp,
    TensorRef,
    Value,
    alias,
    checksum,
    foreign_checksum,
    is_rewritten,
    overlaps,
    version_counter,
)
from punar.torch.replay import ReplayCount, clone_storage, modified, replay, take_slots
from punar.torch.script import END, Row, Script

Made = tuple[int, Tensor, StorageRecord]
"""What an operator made: its place among the outputs, negative for what is overwritten; a tensor on it; its storage's record."""

_graph_task = torch._C._current_graph_task_id

_LOOK_AHEAD = 512
"""How far the script is searched for a forward operator that does not stand where it was traced."""

_BACKWARD_LOOK_AHEAD = 16


class Handle:
    """What autograd keeps in place of a saved tensor that is held. ``tensor`` is a detached alias, or the tensor itself where it has no history."""

    __slots__ = ("__weakref__", "episode", "tensor", "version")

    def __init__(self, tensor: Tensor, episode: Episode) -> None:
        self.episode = episode
        self.version = tensor._version
        self.tensor = tensor if tensor.is_leaf else alias(tensor)
        episode.handles += 1
        episode.saves += 1

    def __del__(self) -> None:
        self.episode.let_go()

    def unpack(self) -> Tensor:
        if not self.episode.has_begun_backward:
            self.episode.begin_backward()
        tensor = self.tensor
        if tensor._version != self.version:
            raise modified(tensor, self.version)
        if tensor.requires_grad or tensor.__dict__:
            note_unpacked(tensor)
        return tensor


class DroppedHandle:
    """What autograd keeps in place of a saved tensor that is dropped. ``counter`` has the tensor's version counter, and no storage.

    ``overwritten`` is set where the tensor is written into while it is saved: eager's backward then reads what was written, if it does not raise.
    """

    __slots__ = ("__weakref__", "attributes", "counter", "episode", "follower", "overwritten", "ref", "version")

    def __init__(self, tensor: Tensor, value: Value, follower: Follower) -> None:
        self.follower = follower
        self.episode = follower.episode
        self.ref = TensorRef(tensor, value)
        self.version = tensor._version
        self.counter = version_counter(tensor)
        self.attributes = dict(tensor.__dict__) or None
        self.overwritten: Tensor | None = None
        self.episode.handles += 1
        self.episode.saves += 1

    def __del__(self) -> None:
        self.episode.let_go()

    def unpack(self) -> Tensor:
        episode, value = self.episode, self.ref.value
        if not episode.has_begun_backward:
            episode.begin_backward()
        if self.counter._version != self.version:
            raise modified(self.counter, self.version)
        episode.clock = max(episode.clock, value.rank)
        if episode.coming is not None:
            episode.coming.fetch_due(episode.clock)
        base = value.base if self.overwritten is None else self.overwritten
        if base is None:
            base = self.follower.made_again(value)
        tensor = self.ref.view(base)
        if self.attributes is not None:
            tensor.__dict__.update(self.attributes)
            note_unpacked(tensor)
        return tensor


class Follower:
    """Runs one episode's forward pass along a script; the plan is advice, so that whatever does not match is simply held.

    Where the pass leaves its script for one of the ``others``, which begin alike, it goes on along that one.
    """

    def __init__(self, episode: Episode, script: Script, meter: Meter, count: ReplayCount, others: list[Script], movers: Movers) -> None:
        self.script = self.begun = script
        self.others = others
        self.rows = script.rows
        self.meter = meter
        self.count = count
        self.episode = episode
        self.movers = movers
        self.away: dict[int, weakref.ref[Value]] = {}
        self.cursor = self.backward_cursor = 0
        self.backward_rows = script.backward_rows
        self.is_timed, self.may_rest = script.is_timed, script.may_rest
        count.moved = movers.count
        count.now_ns = meter.now_ns if self.is_timed else time.perf_counter_ns
        self.mismatches = self.resized = 0
        self.has_rested = self.is_overwriting = self.runs_python = False

    @property
    def has_switched(self) -> bool:
        """Whether the pass has left the script it began along for another."""
        return self.script is not self.begun

    @property
    def is_complete(self) -> bool:
        """Whether the whole of the script was followed, its backward pass too where that was watched now and when it was traced."""
        is_backward_complete = self.has_rested or self.backward_cursor == len(self.backward_rows)
        return not self.mismatches and not self.has_switched and self.cursor == len(self.rows) - 1 and is_backward_complete

    # -- operators -----------------------------------------------------------------------------------------------------

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_backward = _graph_task() != -1
        cursor, mismatches = self.cursor, self.mismatches
        if is_backward:
            row = self.backward_row(func)
        else:
            row = self.rows[self.cursor]
            if row.func is func and row.has_grad_mode == torch.is_grad_enabled():
                self.cursor += 1
            else:
                row = self.resync(func)
        try:
            if not row.is_simple:
                return self.run_row(row, func, args, kwargs, is_backward=is_backward)
            out = row.timed(self.meter.now_ns, func, args, kwargs) if self.is_timed else func(*args, **kwargs)
        except BaseException:
            self.cursor, self.mismatches = cursor, mismatches  # it may be caught, and the step go on: what failed is no part of it
            raise
        if row.makes:
            self.meter.count(out, row.peak_bytes)
        return out

    def run_row(self, row: Row, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_backward: bool) -> Any:
        """Runs an operator of which more is to be known than what it makes."""
        info = row.info or operator_info(func)
        for number in row.lands:
            self.land(number)
        if row.is_recorded and not self.episode.is_sealed:
            return self.record(row, info, args, kwargs)
        if row.moves and not self.episode.is_sealed:
            return self.move(row, info, args, kwargs)
        if info.can_write and overwrite(info, info.written(args, kwargs), self.meter, self.episode) and is_backward:
            self.is_overwriting = True
        run = (lambda *a, **k: row.timed(self.meter.now_ns, func, a, k)) if self.is_timed else func
        return run_counted(info, args, kwargs, self.meter, row.peak_bytes, run)

    def backward_row(self, func: Any) -> Row:
        """The row of a backward operator: known only for its scratch, so that an unexpected one does no harm."""
        if self.away:
            self.land_all()
        rows, cursor = self.backward_rows, self.backward_cursor
        if cursor < len(rows) and rows[cursor].func is func:
            self.backward_cursor = cursor + 1
            return rows[cursor]
        for place in range(cursor, min(cursor + _BACKWARD_LOOK_AHEAD, len(rows))):
            if rows[place].func is func:
                self.backward_cursor = place + 1
                return rows[place]
        return END

    def resync(self, func: Any) -> Row:
        """Finds where in the script an unexpected operator stands; ``END`` where it does not."""
        has_grad = torch.is_grad_enabled()
        is_next = self.rows[self.cursor].is_of(func, has_grad=has_grad)
        if has_grad and not is_next and not self.mismatches and self.switch(func):
            return self.rows[self.cursor - 1]
        for place in range(self.cursor, min(self.cursor + _LOOK_AHEAD, len(self.rows) - 1)):
            row = self.rows[place]
            if row.is_of(func, has_grad=has_grad):
                passed = self.rows[self.cursor : place]
                self.mismatches += sum(r.has_grad_mode for r in passed)
                for number in (number for r in passed for number in r.lands):
                    self.land(number)  # else what was to be gone by now would stay
                self.cursor = place + 1
                return row
            if row.has_grad_mode and not has_grad:
                return END  # evaluation inside the step: no part of the plan
        self.mismatches += has_grad
        return END

    def switch(self, func: Any) -> bool:
        """The pass leaves its script here: goes on along another one that has done the same so far, where there is one."""
        script = next((other for other in self.others if other.goes_on(self.script, self.cursor, func)), None)
        if script is None:
            return False
        self.script = script
        self.rows, self.backward_rows = script.rows, script.backward_rows
        self.cursor += 1
        self.is_timed = self.may_rest = False
        self.land_all()
        return True

    def record(self, row: Row, info: OperatorInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[Tensor] = []
        op = RecordedOp(self.cursor, info.func, row.peak_bytes)
        op.args = take_slots(info.replay_args(args), tensors)
        op.kwargs = {key: take_slots(value, tensors) for key, value in kwargs.items()}
        generator = generator_of(args, kwargs) if info.is_random else None
        if not is_recordable(info, tensors) or (info.is_random and generator is None):
            self.mismatches += 1
            return run_metered(info, args, kwargs, self.meter, row.peak_bytes)
        op.random = RandomState(generator) if generator is not None else None
        op.reads = [self.read(tensor) for tensor in tensors]
        op.values = tuple({ref.value: None for ref in op.reads})
        written = info.written(args, kwargs) if info.writes else []
        op.overwrites = self.overwritten_values(written)
        out, made = self.run(row, info, args, kwargs, written)
        self.remember(op, row, made)
        return out

    def run(
        self, row: Row, info: OperatorInfo, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> tuple[Any, list[Made]]:
        """Runs an operator that declares to overwrite ``written``; returns its result, and what it made."""
        overwrite(info, info.written(args, kwargs), self.meter)
        self.meter.charge(row.peak_bytes)
        out = row.timed(self.meter.now_ns, info.func, args, kwargs) if self.is_timed else info.func(*args, **kwargs)
        return out, self.made(written, outputs_in(out) if info.makes else [])

    def overwritten_values(self, written: list[Tensor]) -> list[Value]:
        return list(dict.fromkeys(self.read(tensor).value for tensor in written))

    def made(self, written: list[Tensor], outputs: list[Tensor]) -> list[Made]:
        """What an operator made: first what it allocated, then what it overwrote."""
        fresh = [(place, tensor, self.meter.record_created(tensor)) for place, tensor in enumerate(outputs)]
        made: list[Made] = [(p, t, r) for p, t, r in fresh if r is not None]
        seen: set[StorageRecord] = set()
        for tensor in written:
            record = self.meter.record_of(tensor)
            if record is not None and record not in seen:
                made.append((-1 - len(seen), tensor, record))
                seen.add(record)
        return made

    def remember(self, op: RecordedOp, row: Row, made: list[Made]) -> None:
        """Makes the values of a recorded operator."""
        is_matched = len(made) == len(row.holds)
        for index, (place, tensor, record) in enumerate(made):
            hold_from, rank, nbytes = row.holds[index] if is_matched else (0, 0, 0)
            self.mismatches += not is_matched
            self.resized += is_matched and nbytes != record.nbytes
            value = Value(op=op, writes=record.writes, hold_from=hold_from, rank=rank, nbytes=record.nbytes)
            if hold_from <= 0:
                value.hold(alias(tensor), is_just_written=place < 0)
            else:
                op.makes.append((weakref.ref(value), place))
                value.checksum = checksum(tensor) if row.info is not None and row.info.is_factory else None
            self.enter(value, record)
            if place < 0:
                carry_saves(record, value, self.episode)
            for number, move in row.moves:
                if move.place == index and is_matched:
                    self.send(value, number, move)

    def move(self, row: Row, info: OperatorInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator of which nothing is recorded but that some of its values are moved."""
        written = info.written(args, kwargs) if info.writes else []
        out, made = self.run(row, info, args, kwargs, written)
        for number, move in row.moves:
            if move.place >= len(made):
                self.resized += 1
                continue
            place, tensor, record = made[move.place]
            self.resized += record.nbytes != move.bytes  # as many rows as a batch chose, say: they leave all the same
            value = Value(op=None, writes=record.writes, rank=move.rank, nbytes=record.nbytes)
            value.hold(alias(tensor), is_just_written=place < 0)
            self.enter(value, record)
            if place < 0:
                carry_saves(record, value, self.episode)
            self.send(value, number, move)
        return out

    def send(self, value: Value, number: int, move: MoveRow) -> None:
        """A value begins to leave the device, where there is somewhere to go."""
        if value.base is None:
            return
        value.copy = self.movers.send(self.script.plan.channels[move.tier], value.base, self.meter)
        if value.copy is not None:
            self.away[number] = weakref.ref(value)
            self.episode.coming = self.episode.coming or Coming(self.meter)
            self.episode.coming.add(value, move.fetch)

    def land(self, number: int) -> None:
        """The copy of a moved value must be done now."""
        reference = self.away.pop(number, None)
        value = reference() if reference is not None else None
        if value is not None and not self.episode.is_sealed:
            land(value)

    def land_all(self) -> None:
        """The copies are done, be it that the operators that were to wait for them never run."""
        for number in tuple(self.away):
            self.land(number)

    def made_again(self, value: Value) -> Tensor:
        """A tensor on the storage of a value that is not at hand."""
        if value.copy is not None:
            return bring(value, value.copy, self.meter)
        return replay(value, self.episode.clock, self.meter, self.count)

    def enter(self, value: Value, record: StorageRecord) -> None:
        """The tape knows from now on what is on a storage."""
        record.state = weakref.ref(value)
        self.episode.values.append(value)

    def read(self, tensor: Tensor) -> TensorRef:
        """What an operator reads: the value last made on this storage, or a source that is held from now on."""
        record = self.meter.record_of(tensor)
        assert record is not None
        value = _current(record)
        if value is None or is_rewritten(value, tensor):
            value = Value(op=None, writes=record.writes, nbytes=record.nbytes)
            value.hold(alias(tensor))
            value.checksum = foreign_checksum(tensor)
            self.enter(value, record)
        hold_if_changed(value, tensor)
        return TensorRef(tensor, value)

    # -- saved tensors -------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Handle | DroppedHandle:
        value = None if self.episode.is_sealed or self.script.is_plain else _saved(tensor)
        if value is not None:
            hold_if_changed(value, tensor)
        if value is None or (value.op is None and value.copy is None) or is_beyond_codec(value):
            return Handle(tensor, self.episode)
        handle = DroppedHandle(tensor, value, self)
        record = self.meter.record_of(tensor)
        assert record is not None
        record.dropped.append(weakref.ref(handle))
        return handle


def is_beyond_codec(value: Value) -> bool:
    """Whether this save of a value needs more of it than its codec keeps: it is good for the first one only, by the operator that made it."""
    copy = value.copy
    if not isinstance(copy, CodedCopy) or not copy.takes_one_save:
        return False
    is_beyond, copy.is_saved = copy.is_saved, True
    return is_beyond


def run_metered(info: OperatorInfo, args: tuple[Any, ...], kwargs: dict[str, Any], meter: Meter, peak_bytes: int = 0) -> Any:
    """Runs an operator that no replay needs: minds what it overwrites, counts what it makes."""
    if info.can_write:
        overwrite(info, info.written(args, kwargs), meter)
    return run_counted(info, args, kwargs, meter, peak_bytes, info.func)


def run_counted(info: OperatorInfo, args: tuple[Any, ...], kwargs: dict[str, Any], meter: Meter, peak_bytes: int, run: Any) -> Any:
    """Runs an operator, by way of ``run``, and counts what it makes."""
    if not info.makes:
        meter.charge(peak_bytes)
        return run(*args, **kwargs)
    out = run(*args, **kwargs)
    meter.count(out, peak_bytes)
    return out


def overwrite(info: OperatorInfo, tensors: list[Tensor], meter: Meter, episode: Episode | None = None) -> bool:
    """Storages are about to be overwritten: saves the held values that others read, and counts the writes. Says whether any could be read again.

    ``episode``: the pass whose tape does not record the write.
    """
    seen: set[StorageRecord] = set()
    is_read = False
    for tensor in tensors:
        record = meter.record_of(tensor) if type(tensor) in PLAIN_TYPES else None
        if record is not None and record not in seen:
            seen.add(record)
            is_read = is_read or bool(record.dropped) or (record.state is not None and record.state() is not None)
            keep_overwritten(record, tensor)
            if episode is not None and info.writes and not episode.is_sealed:
                keep_beside(record, tensor, episode)
            protect(record, meter, is_refill=info.is_refill)
    return is_read


def keep_overwritten(record: StorageRecord, written: Tensor) -> None:
    """Dropped saves that are about to be written into keep the storage after all, as they do in eager.

    Where the write counts, backward raises as eager does. Where it does not, as through ``.data``, backward reads what was written.
    """
    for reference in record.dropped:
        handle = reference()
        if handle is not None and handle.overwritten is None and overlaps(handle.ref, written):
            handle.overwritten = alias(written)
    record.dropped = [reference for reference in record.dropped if reference() is not None]


def keep_beside(record: StorageRecord, written: Tensor, episode: Episode) -> None:
    """Dropped saves beside what is written keep the storage: of what it holds from now on, the tape knows no value (see ``carry_saves``)."""
    for reference in record.dropped:
        handle = reference()
        if handle is not None and handle.overwritten is None and handle.episode is episode:
            handle.overwritten = alias(written)


def carry_saves(record: StorageRecord, value: Value, episode: Episode) -> None:
    """An operator made ``value`` on a storage: dropped saves beside what it wrote are from now on saves of that (Rule 6 of traces)."""
    for reference in record.dropped:
        handle = reference()
        if handle is not None and handle.overwritten is None and handle.episode is episode:
            handle.ref.value = value


def protect(record: StorageRecord, meter: Meter, *, is_refill: bool) -> None:
    """Copies what a lineage still reads on a storage that is about to be overwritten; where its contents were freed, gives it up."""
    value = record.state() if record.state is not None else None
    if value is not None and value.base is not None:
        value.copy = None  # it was still leaving: what arrives is of no use
    if value is not None and value.base is not None and value.writes == record.writes and is_refill:
        value.base = None
    elif value is not None and value.base is not None and value.writes == record.writes and value.base._version in value.versions:
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            value.base = clone_storage(value.base)
        value.versions = (value.base._version,)
        meter.record_created(value.base)
    record.state = None
    record.writes += 1


def _saved(tensor: Tensor) -> Value | None:
    """The tape's value that a saved tensor reads, where it is known."""
    if type(tensor) not in PLAIN_TYPES:
        return None
    try:
        record = getattr(tensor.untyped_storage(), "_punar", None)
    except NotImplementedError:
        return None
    return _current(record) if type(record) is StorageRecord else None


def _current(record: StorageRecord) -> Value | None:
    """The value that a storage holds now, where it is known and nothing has written since: an optimizer, outside of the block, is not seen."""
    value = record.state() if record.state is not None else None
    if (
        value is None
        or not value.is_shared
        or value.writes != record.writes
        or (value.base is not None and value.base._version not in value.versions)
    ):
        return None
    return value


def hold_if_changed(value: Value, tensor: Tensor) -> None:
    """Holds what a factory made where something unseen wrote into it."""
    if value.checksum is not None and value.op is not None and checksum(tensor) != value.checksum:
        value.hold(alias(tensor))


def is_recordable(info: OperatorInfo, tensors: list[Tensor]) -> bool:
    """Whether a call's tensors can be rebuilt from their storages."""
    return info.is_replayable and all(type(t) in PLAIN_TYPES and t.layout is torch.strided for t in tensors)
