"""Events drawn together: a simulation that skips them sees what one that goes through each of them sees."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from punar.ir import Trace
from punar.ir.lineage import NEVER
from punar.plan import simulate
from punar.plan.pressure import pressure_of
from punar.plan.simulate import TooManyReplays, highest
from punar.plan.stretches import STRETCH, score_of
from tests.solvers.problems import BUILDERS, named, small_traces

few = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def seen_one_by_one(trace: Trace, hold: list[int]) -> list[int]:
    """The highest bytes in each cell, from every operator's own peak."""
    cell = pressure_of(trace).cell
    high = [0] * (cell[-1] + 1)

    def note(place: int, bytes: int, is_replay: bool) -> None:
        high[cell[place]] = max(high[cell[place]], bytes)

    simulate(trace, hold, on_run=note)
    return high


@few
@given(small_traces(has_writes=True), st.data())
def test_what_is_skipped_changes_nothing(trace: Trace, data: st.DataObject) -> None:
    hold = data.draw(st.lists(st.sampled_from([0, 1, 2, 4, NEVER]), min_size=len(trace.values), max_size=len(trace.values)))
    one_by_one = simulate(trace, hold, on_run=lambda place, bytes, is_replay: None)
    assert simulate(trace, hold) == one_by_one
    assert highest(trace, hold, pressure_of(trace).cell) == (one_by_one, seen_one_by_one(trace, hold))


@pytest.mark.parametrize("problem", BUILDERS)
def test_nothing_is_lost_on_longer_steps(problem: str) -> None:
    trace = named(problem)
    for hold in (0, 1, 7):
        assert highest(trace, [hold] * len(trace.values), pressure_of(trace).cell)[1] == seen_one_by_one(trace, [hold] * len(trace.values))
    score = score_of(trace)
    assert any(kind == STRETCH for _, kind, _ in score.steps)
    assert len(score.steps) < len(trace.events)


def test_replays_are_followed_as_far_as_was_asked() -> None:
    trace = named("chain")
    hold = [NEVER] * len(trace.values)
    replays = simulate(trace, hold).replayed_ops
    assert simulate(trace, hold, most_replays=replays).replayed_ops == replays
    with pytest.raises(TooManyReplays, match=r"^$"):
        simulate(trace, hold, most_replays=replays - 1)
