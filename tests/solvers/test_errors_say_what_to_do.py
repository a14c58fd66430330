"""What solvers say when they cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest

from punar.errors import InfeasibleBudget, UsageError
from punar.solvers import UnknownSolver, find, least, names, solve
from tests.solvers.problems import named


def test_an_infeasible_budget_names_the_least_and_what_holds_it() -> None:
    trace = named("transformer")
    with pytest.raises(InfeasibleBudget, match=r"Give at least \d+ B") as caught:
        solve(trace, trace.resident_bytes + 1)
    error = caught.value
    assert solve(trace, error.least_bytes).peak_bytes == error.least_bytes <= least(trace).peak_bytes
    sizes = [size for _, _, size in error.holders]
    assert sizes == sorted(sizes, reverse=True)
    assert trace.resident_bytes + sum(sizes) == error.least_bytes
    module, name, _ = error.holders[0]
    assert module in str(error)
    assert name in str(error)


@pytest.mark.parametrize("solver", ["none", "full", "every:2", "sqrt", "selective"])
def test_a_solver_with_one_plan_says_so(solver: str) -> None:
    with pytest.raises(InfeasibleBudget, match="has this one plan only; ask 'auto'"):
        solve(named("transformer"), 1, solver)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(UnknownSolver, match="the solvers are auto, checkmate, chen-greedy, dtr, every, full") as caught:
        find("best")
    assert caught.value.known == names()


@pytest.mark.parametrize("spelling", ["every:x", "every{groups=2}", "rotor{units=many}", "none:3", "auto{}{}", ""])
def test_options_that_no_solver_has_are_refused(spelling: str) -> None:
    with pytest.raises(UnknownSolver):
        find(spelling)


def test_groups_of_no_blocks_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1 block"):
        find("every:0")


def test_options_are_read_by_name_and_by_place() -> None:
    assert find("every:3") == find("every{blocks=3}") == find(" every{ blocks = 3 } ")
    assert find("rotor{units=20,blocks=8}") != find("rotor")


def test_importing_the_solvers_loads_no_solver_library_and_no_framework() -> None:
    code = "import sys, punar.solvers; print([m for m in ('highspy', 'torch', 'numpy', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
