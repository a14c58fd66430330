"""How good ``auto`` is, by its own bound and by how its least peak grows."""

from __future__ import annotations

import statistics
import time

import pytest

from punar.errors import InfeasibleBudget
from punar.ir import Trace
from punar.plan import simulate
from punar.plan.bound import bound
from punar.solvers import frontier, least, solve
from tests.solvers.problems import named
from tests.synthetic import transformer


def gaps(trace: Trace) -> list[float]:
    """Predicted time above the bound, in parts of the plain step, at nine budgets from the least peak to the plain one."""
    low, high = least(trace).peak_bytes, simulate(trace, [0] * len(trace.values)).peak_bytes
    budgets = [low + (high - low) * k // 8 for k in range(9)]
    return [(solve(trace, b).time_ns - bound(trace, b)) / trace.plain_time_ns for b in budgets]


@pytest.mark.parametrize("problem", ["transformer", "large head", "alternating"])
def test_auto_is_near_the_bound(problem: str) -> None:
    found = gaps(named(problem))
    assert statistics.median(found) <= 0.02
    assert max(found) <= 0.05


@pytest.mark.parametrize("problem", ["chain", "skips", "recurrent", "irregular"])
def test_auto_is_near_the_bound_at_the_median_of_steps_whose_chains_are_long_for_their_length(problem: str) -> None:
    assert statistics.median(gaps(named(problem))) <= 0.05


def test_the_least_peak_is_below_recomputing_every_block() -> None:
    for problem in ("transformer", "alternating", "large head"):
        with pytest.raises(InfeasibleBudget, match="least peak") as caught:
            solve(named(problem), 1, "full")
        assert least(named(problem)).peak_bytes < caught.value.least_bytes


@pytest.mark.parametrize(
    "depths", [(9, 36), pytest.param((36, 81), marks=pytest.mark.slow), pytest.param((81, 324), marks=pytest.mark.slow)]
)
def test_the_least_peak_grows_with_the_root_of_the_depth_at_one_extra_forward_pass(depths: tuple[int, int]) -> None:
    shallow, deep = (least(transformer(depth, vocabulary=1)) for depth in depths)
    root = (depths[1] / depths[0]) ** 0.5
    assert deep.peak_bytes - deep.resident_bytes <= 1.2 * root * (shallow.peak_bytes - shallow.resident_bytes)
    forward = 1 / 3
    assert max(shallow.overhead, deep.overhead) < 1.2 * forward


@pytest.mark.slow
def test_a_plan_for_ninety_six_blocks_takes_seconds() -> None:
    trace = transformer(96, vocabulary=1)
    start = time.process_time()
    assert len(frontier(trace)) > 8
    assert time.process_time() - start < 20
