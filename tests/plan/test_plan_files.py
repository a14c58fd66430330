"""Plans and traces as JSON, and what is said of damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from punar.errors import PlanError
from punar.ir import Trace
from punar.plan import Plan, make_plan
from tests.solvers.problems import named, small_traces


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(small_traces())
def test_traces_and_plans_come_back_equal(trace: Trace) -> None:
    assert Trace.from_json(trace.to_json()) == trace
    assert hash(Trace.from_json(trace.to_json())) == hash(trace)
    plan = make_plan(trace, [1] * len(trace.values), solver="test", budget_bytes=7)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_comes_back_from_a_file(tmp_path: Path) -> None:
    plan = make_plan(named("chain"), [1] * len(named("chain").values), solver="test", budget_bytes=7)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json"):
        Plan.load(tmp_path / "none.json")


@pytest.mark.parametrize(("text", "says"), [("", "no JSON"), ("[]", "found 'list'"), ('{"format": "other"}', "found 'other'")])
def test_foreign_files_are_refused(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan.from_json(text)
    with pytest.raises(PlanError, match=says):
        Trace.from_json(text)


def test_damaged_and_older_files_are_refused() -> None:
    trace = named("chain")
    body = json.loads(make_plan(trace, [1] * len(trace.values), solver="test", budget_bytes=7).to_json())
    with pytest.raises(PlanError, match="version 0"):
        Plan.from_json(json.dumps({**body, "version": 0}))
    with pytest.raises(PlanError, match="damaged"):
        Plan.from_json(json.dumps({**body, "hold_from": ["x"]}))
    steps = json.loads(trace.to_json())
    with pytest.raises(PlanError, match="damaged"):
        Trace.from_json(json.dumps({**steps, "events": steps["events"][1:]}))
