"""The integer programme against the search of everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from random import Random
from time import monotonic

import pytest
import torch
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st
from torch import nn

import punar
from punar.errors import InfeasibleBudget, UsageError
from punar.ir import Trace
from punar.ir.lineage import lineage_of
from punar.plan import simulate
from punar.plan.bound import bound
from punar.solvers import solve
from punar.solvers.auto import frontier_of
from punar.solvers.milp import Milp
from punar.solvers.stages import candidates
from tests.plan.test_in_place import gates
from tests.solvers.problems import named, small_traces
from tests.synthetic import Step, chain, trace_of, transformer
from tests.torch.programs import Program, ProgramModel, programs

pytest.importorskip("highspy")

MOST = 8


def every_plan(trace: Trace) -> list[tuple[int, int]]:
    """(peak, time) of every way to hold or drop each value."""
    free = candidates(trace, lineage_of(trace))
    found = []
    for choice in itertools.product((0, 1), repeat=len(free)):
        hold = [0] * len(trace.values)
        for value, is_dropped in zip(free, choice, strict=True):
            hold[value] = is_dropped
        seen = simulate(trace, hold)
        found.append((seen.peak_bytes, seen.time_ns))
    return found


def check(trace: Trace, budget: int, fastest: int | None) -> None:
    """The programme proves the fastest of the family, or finds ``auto``'s plan, which may make values again more often, to be as fast."""
    others = [point.time_ns for point in frontier_of(trace).points if point.peak_bytes <= budget]
    expected = min([*others, *([] if fastest is None else [fastest])])
    plan = solve(trace, budget, "milp")
    assert plan.time_ns == plan.bound_ns == expected
    assert plan.peak_bytes <= budget
    found = Milp().search(trace, budget, best=None)
    found.run(monotonic() + 60)
    assert found.is_proved
    assert (found.best and found.best[0]) == fastest


def check_all(trace: Trace) -> None:
    plans = every_plan(trace)
    peaks = sorted({peak for peak, _ in plans})
    for budget in {peaks[0], peaks[len(peaks) // 4], peaks[len(peaks) // 2], peaks[-1]}:
        check(trace, budget, min(time for peak, time in plans if peak <= budget))
        assert bound(trace, budget) <= solve(trace, budget, "milp").time_ns
    least = frontier_of(trace).points[0].peak_bytes
    if least < peaks[0]:
        check(trace, least, None)
    with pytest.raises(InfeasibleBudget, match="solver 'milp' found none"):
        solve(trace, min(peaks[0], least) - 1, "milp")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(small_traces(most=9))
def test_the_programme_finds_what_the_search_of_everything_finds(trace: Trace) -> None:
    assume(len(candidates(trace, lineage_of(trace))) <= MOST)
    check_all(trace)


@pytest.mark.parametrize("trace", [gates(cells, versions) for cells, versions in [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)]])
def test_it_does_so_where_operators_write_in_place(trace: Trace) -> None:
    check_all(trace)


def test_it_does_so_where_the_only_value_that_can_be_dropped_is_made_again_at_the_peak() -> None:
    """Dropping it relieves nothing there: the row of that moment has no columns left."""
    program = [Step(name="a", reads=(-1,), bytes=64, saves_output=True), Step(name="b", reads=(0,), bytes=64, scratch=128)]
    check_all(trace_of(program, overhead_ns=0))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(most=10), st.integers(0, 1 << 20))
def test_no_plan_drawn_at_random_is_faster_on_steps_of_random_programs(program: Program, seed: int) -> None:
    model, random = ProgramModel(program), Random(seed)
    trace = traced(model, torch.randn(4, 8), lambda model, batch: model(batch))
    free = candidates(trace, lineage_of(trace))
    seen = [simulate(trace, drawn(trace, free, random)) for _ in range(100)]
    budget = random.choice(seen).peak_bytes
    found = Milp().search(trace, budget, best=None)
    found.run(monotonic() + 60)
    assert found.is_proved
    assert found.best is not None
    assert found.best[0] <= min(one.time_ns for one in seen if one.peak_bytes <= budget)


def drawn(trace: Trace, free: list[int], random: Random) -> list[int]:
    """A plan that drops about some share of the values."""
    share, hold = random.random(), [0] * len(trace.values)
    for value in free:
        hold[value] = int(random.random() < share)
    return hold


def traced(model: nn.Module, batch: torch.Tensor, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Trace:
    """The trace of a step; a program that eager refuses, or in which nothing is saved, is no example."""
    try:
        return punar.profile(model, batch, loss).trace
    except RuntimeError:
        reject()


LARGE = {
    "transformer of nine blocks": (lambda: transformer(9), (1, 3, 5)),
    "chain of ninety-nine": (lambda: chain([1000] * 99, overhead_ns=100), (1, 3, 5)),
    "irregular chain of sixty": (lambda: named("irregular"), (1, 3, 5)),
    "recurrent": (lambda: named("recurrent"), (5,)),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if "nine blocks" in name else pytest.mark.slow) for name in LARGE])
def test_it_proves_the_fastest_plan_of_steps_of_about_a_hundred_values(name: str) -> None:
    make, eighths = LARGE[name]
    prove(make(), eighths)


def prove(trace: Trace, eighths: Sequence[int]) -> None:
    """At so many eighths of the way from the least peak of ``auto`` to the plain one, in minutes each."""
    points = frontier_of(trace).points
    low, high = points[0].peak_bytes, points[-1].peak_bytes
    for eighth in eighths:
        plan = solve(trace, low + (high - low) * eighth // 8, "milp{seconds=150}")
        assert plan.bound_ns == plan.time_ns <= solve(trace, plan.budget_bytes).time_ns
        assert bound(trace, plan.budget_bytes) <= plan.time_ns


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "dropout", "values"), [(4, 0.0, 71), (3, 0.1, 113)])
def test_it_proves_the_fastest_plan_of_a_traced_transformer(blocks: int, dropout: float, values: int) -> None:
    """Values are counted as torch 2.13 makes them."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 256, dropout, activation="gelu", batch_first=True) for _ in range(blocks)]
    trace = traced(nn.Sequential(*layers), torch.randn(4, 128, 64), lambda model, batch: model(batch).square().mean())
    assert len(candidates(trace, lineage_of(trace))) > 0.9 * values
    prove(trace, (3, 5))


def test_at_its_time_limit_it_returns_the_plan_of_auto_and_a_bound_below() -> None:
    trace = named("transformer")
    points = frontier_of(trace).points
    budget = (points[0].peak_bytes + points[-1].peak_bytes) // 2
    plan = solve(trace, budget, "milp{seconds=0.001}")
    assert plan.time_ns == solve(trace, budget).time_ns
    assert trace.plain_time_ns <= plan.bound_ns < plan.time_ns
    with pytest.raises(InfeasibleBudget, match=r"more time than 0\.001 s"):
        solve(trace, points[0].peak_bytes - 1, "milp{seconds=0.001}")


def test_no_time_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match=r"asked to take 0\.0 seconds"):
        solve(named("chain"), 1 << 40, "milp{seconds=0}")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(small_traces(most=6))
def test_the_bound_is_below_every_plan(trace: Trace) -> None:
    assume(len(candidates(trace, lineage_of(trace))) <= MOST)
    for peak, time in every_plan(trace):
        assert bound(trace, peak) <= time


def test_it_works_after_highs_was_used_with_other_threads() -> None:
    highspy = pytest.importorskip("highspy")
    highspy.Highs.resetGlobalScheduler(True)
    other = highspy.Highs()
    other.silent()
    other.setOptionValue("threads", 2)
    other.addCol(1.0, 0.0, 1.0, 0, [], [])
    other.run()
    trace = chain((64, 64, 64))
    assert solve(trace, simulate(trace, (0,) * len(trace.values)).peak_bytes, "milp").time_ns == trace.plain_time_ns


def test_steps_too_large_for_it_are_refused() -> None:
    with pytest.raises(UsageError, match="meant for at most 5"):
        solve(named("chain"), 1 << 40, "milp{values=5}")
