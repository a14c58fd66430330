"""Does another process find the plan that this one would?"""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from punar.errors import PlanError
from punar.solvers import elsewhere
from punar.solvers.elsewhere import Request, can_ask, serve, solve_elsewhere
from tests.synthetic import transformer


@pytest.fixture(scope="module")
def request_() -> Request:
    return Request(trace=transformer(2), budget_bytes=None)


def test_another_process_finds_the_same_plan(request_: Request) -> None:
    assert solve_elsewhere(request_) == request_.answer()


def test_a_budget_that_none_fits_says_so(request_: Request) -> None:
    with pytest.raises(PlanError, match="which found none: asked for a step within"):
        solve_elsewhere(Request(trace=request_.trace, budget_bytes=1))


def test_the_other_side_answers_with_a_plan_or_a_text(request_: Request) -> None:
    for asked, kind in ((request_, "Plan"), (Request(trace=request_.trace, budget_bytes=1), "str")):
        answers = io.BytesIO()
        serve(io.BytesIO(pickle.dumps(asked)), answers)
        assert type(pickle.loads(answers.getvalue())).__name__ == kind


@pytest.mark.parametrize(
    ("executable", "message"),
    [("/no/such/python", "could not be had"), ("/bin/false", "ended with 1"), ("/bin/echo", "found no plan in what it wrote")],
)
def test_a_process_that_fails_says_why(executable: str, message: str, request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(PlanError, match=message):
        solve_elsewhere(request_)


def test_a_search_without_end_is_given_up(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "MOST_SECONDS", 0.01)
    with pytest.raises(PlanError, match="timed out"):
        solve_elsewhere(request_)


def test_a_frozen_program_does_not_start_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_ask()
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not can_ask()


def test_files_where_it_is_started_are_not_run(request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dataclasses.py").write_text("raise SystemExit(7)")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    assert solve_elsewhere(request_) == request_.answer()


def test_the_other_process_loads_no_torch() -> None:
    code = "import sys, punar.solvers.elsewhere; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode == 0
