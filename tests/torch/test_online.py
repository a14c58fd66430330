"""Does a step that is recorded under a budget compute what the plain step computes, within the budget, and is the same recorded of it?"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import punar
from punar.ir import Event, EventKind, Trace
from punar.plan import simulate
from tests.torch.harness import assert_nothing_lives, no_garbage_collection, train
from tests.torch.programs import Program, programs
from tests.torch.test_random_programs import generator_state, maker

EXAMPLES = int(os.environ.get("PUNAR_EXAMPLES", "30"))

Maker = Callable[[], tuple[nn.Module, Callable[[], Tensor]]]

counted: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _count() -> Iterator[None]:
    """The tests would say nothing if nothing were evicted."""
    yield
    if counted["programs"] >= EXAMPLES // 2:
        assert counted["programs that replayed"] > counted["programs"] // 3, dict(counted)


class OnlineRemat(punar.Remat):
    """Records each step, under so many bytes; plans nothing that drops anything. ``tracers``: who recorded."""

    def __init__(self, first_bytes: int | None) -> None:
        super().__init__()
        self.first_bytes = first_bytes
        self.traces: list[Trace] = []

    def _first_budget(self, device: torch.device, used_bytes: int) -> int | None:
        return self.first_bytes

    def _make_plan(self, trace: Trace, *rest: int) -> punar.Plan:
        self.traces.append(trace)
        return super()._make_plan(trace, *rest)


def canonical(trace: Trace) -> Trace:
    """A trace without what two plain steps differ in: times. Storages that are freed between two other events are in the order of their numbers."""
    events: list[Event] = []
    for is_free, group in groupby(trace.events, lambda event: event.kind == EventKind.FREE):
        events += sorted(group, key=attrgetter("id")) if is_free else group
    return replace(trace, ops=tuple(replace(op, time_ns=0) for op in trace.ops), events=tuple(events))


def plain_peak(trace: Trace) -> int:
    """The plain step's peak."""
    return simulate(trace, (0,) * len(trace.values)).peak_bytes


def recorded(make: Maker, first_bytes: int | None, **kwargs) -> tuple[OnlineRemat, list]:
    remat = OnlineRemat(first_bytes)
    found = train(make, steps=1, remat=remat, **kwargs)
    return remat, found


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(program=programs(), share=st.sampled_from([0.3, 0.6, 0.9]))
def test_random_programs(program: Program, share: float) -> None:
    """Gradients and trace are the plain step's; what is above the budget is no more than an operator makes, or what nothing lowers."""
    try:
        expected = train(maker(program), steps=1, extra=generator_state)
    except RuntimeError:
        assume(False)
    with no_garbage_collection():
        trace = recorded(maker(program), None)[0].traces[0]
        budget_bytes = trace.resident_bytes + int(share * (plain_peak(trace) - trace.resident_bytes))
        peaks = []
        for first_bytes in (0, budget_bytes):
            remat, found = recorded(maker(program), first_bytes, extra=generator_state)
            stats = remat.stats[0]
            counted.update({"programs": 1, "programs that replayed": stats.replayed_operators > 0})
            note(f"{stats.evicted_bytes} B evicted, peak {stats.measured_peak_bytes} B under {first_bytes} B")
            assert not expected[0].differences(found[0])
            assert canonical(remat.traces[0]) == canonical(trace)
            peaks.append(stats.measured_peak_bytes)
            del found
            assert_nothing_lives(remat)
    assert peaks[1] <= max(budget_bytes, peaks[0]) + max(op.peak_bytes for op in trace.ops)
