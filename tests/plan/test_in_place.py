"""Operators that write one storage again and again, each version saved: a recurrent cell's gates."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from punar.ir import EventKind, Op, Trace, TraceBuilder
from punar.plan import simulate
from punar.plan.bound import bound
from punar.plan.pieces import flips_of, pieces_of
from punar.solvers import least, solve


def gates(cells: int, versions: int = 3, size: int = 1000) -> Trace:
    """``cells`` times a product into a new storage, and ``versions`` saved writes into it."""
    builder = TraceBuilder("cpu")
    state = builder.add_value(storage=builder.add_storage(bytes=8, is_source=True), version=0, producer=-1)
    saves: list[list[int]] = []
    storages = []
    for _ in range(cells):
        storage = builder.add_storage(bytes=size, is_source=False)
        storages.append(storage)
        state = write(builder, storage, 0, state, 5_000, size)
        if len(storages) > 1:
            builder.add_event(EventKind.FREE, storages[-2])
        row = []
        for version in range(1, versions + 1):
            state = write(builder, storage, version, state, 1_000, 0)
            row.append(builder.add_save(state))
        saves.append(row)
    builder.add_event(EventKind.FREE, storages[-1])
    for row in reversed(saves):
        for save in reversed(row):
            builder.add_event(EventKind.DEMAND, save)
            builder.add_op(operator(len(builder.ops), "backward", (), (), 2_000, 10, is_backward=True))
            builder.add_event(EventKind.RELEASE, save)
    return builder.build(resident_bytes=100, overhead_ns=0)


def write(builder: TraceBuilder, storage: int, version: int, read: int, time_ns: int, peak: int) -> int:
    id = len(builder.ops)
    value = builder.add_value(storage=storage, version=version, producer=id)
    builder.add_op(operator(id, f"write{version}", (read,), (value,), time_ns, peak, is_backward=False))
    return value


def operator(id: int, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], time_ns: int, peak: int, *, is_backward: bool) -> Op:
    return Op(
        id=id,
        name=name,
        kind="other",
        is_backward=is_backward,
        has_grad_mode=not is_backward,
        module="",
        signature=name,
        inputs=inputs,
        outputs=outputs,
        time_ns=time_ns,
        peak_bytes=peak,
        is_replayable=not is_backward,
    )


def test_the_writes_of_a_storage_are_one_unit_that_frees_it_once() -> None:
    trace = gates(3)
    units = [unit for piece in pieces_of(trace) for unit in piece.units]
    assert [len(unit) for unit in units] == [4, 4, 4]
    assert [flip.bytes for flips in flips_of(trace) for flip in flips] == [1000, 1000, 1000]
    assert [flip.cost_ns for flips in flips_of(trace) for flip in flips] == [8_000, 8_000, 8_000]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_the_bound_is_below_every_plan(cells: int, versions: int, data: st.DataObject) -> None:
    trace = gates(cells, versions)
    hold = data.draw(st.lists(st.sampled_from([0, 1, 2, 5]), min_size=len(trace.values), max_size=len(trace.values)))
    seen = simulate(trace, hold)
    assert bound(trace, seen.peak_bytes) <= seen.time_ns


def test_storages_are_dropped_whole() -> None:
    """A cell that was dropped comes back as one private copy a version: with two versions five cells are reversed in the room of four."""
    trace = gates(5, versions=2)
    plain = simulate(trace, [0] * len(trace.values)).peak_bytes
    assert least(trace).peak_bytes < plain
    assert solve(trace, plain - 1).replayed_ops % 3 == 0
