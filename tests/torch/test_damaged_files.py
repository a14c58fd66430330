"""Is a damaged file refused with an error of ours, or else harmless?"""

from __future__ import annotations

import copy
import json
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import punar
from punar.ir import Trace
from tests.damage import damaged
from tests.torch.harness import RandomRemat, bits, train
from tests.torch.models import make_blocks, plain_step
from tests.torch.programs import Program, programs
from tests.torch.test_random_programs import maker

EXAMPLES = int(os.environ.get("PUNAR_EXAMPLES", "60"))


@cache
def recorded() -> tuple[Trace, punar.Plan]:
    """A step's trace and a plan for it in which values are held, dropped once and dropped for ever."""
    torch.manual_seed(0)
    trace = punar.profile(make_blocks(1), torch.randn(16, 32), lambda m, b: m(b).square().mean()).trace
    return trace, RandomRemat(3, 0.3)._make_plan(trace)


@cache
def gradients_under(plan: punar.Plan | None) -> list[bytes | None]:
    torch.manual_seed(0)
    model, x = make_blocks(1), torch.randn(16, 32)
    with warnings.catch_warnings(), punar.Remat(plan=plan):
        warnings.simplefilter("ignore", UserWarning)  # a plan for another step is said to be ignored
        plain_step(model, x)
    return [bits(p.grad) for p in model.parameters()]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_plan(data: st.DataObject) -> None:
    body = data.draw(damaged(json.loads(recorded()[1].to_json())))
    try:
        plan = punar.Plan.from_json(json.dumps(body))
    except punar.PlanError:
        return
    assert punar.Plan.from_json(plan.to_json()) == plan
    assert gradients_under(plan) == gradients_under(None)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_profile(data: st.DataObject) -> None:
    body = data.draw(damaged(json.loads(recorded()[0].to_json())))
    try:
        trace = Trace.from_json(json.dumps(body))
    except punar.PlanError:
        return
    assert Trace.from_json(trace.to_json()) == trace
    profile = punar.Profile(trace=trace)
    for budget, solver in (("min", "auto"), (0.6, "auto"), (0.6, "full"), ("auto", "none")):
        try:
            plan = punar.solve(profile, budget=budget, solver=solver)
        except punar.PunarError:
            continue
        assert punar.Plan.from_json(plan.to_json()) == plan


@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs(), seed=st.integers(0, 1 << 16))
def test_what_is_not_damaged_is_never_refused(program: Program, seed: int) -> None:
    try:
        train(maker(program), steps=1)
    except RuntimeError:
        assume(False)
    remat = RandomRemat(seed, 0.4)
    train(maker(program), steps=2, remat=remat)
    assume(remat.trace is not None)
    assert Trace.from_json(remat.trace.to_json()) == remat.trace
    assert punar.Plan.from_json(remat.plan.to_json()) == remat.plan


def put(body: Any, place: str, content: Any) -> Any:
    """A copy of ``body`` with other content at a place written as ``skeleton.names.0``."""
    body = copy.deepcopy(body)
    *steps, last = [int(step) if step.isdecimal() else step for step in place.split(".")]
    inside = body
    for step in steps:
        inside = inside[step]
    inside[last] = content
    return body


@pytest.mark.parametrize(
    ("place", "content", "says"),
    [
        ("hold_from", [], "hold_from has 0 times"),
        ("hold_from", "0", "hold_from is '0', it must be a list"),
        ("hold_from.2", -1, r"hold_from\[2\] is -1"),
        ("hold_from.2", "1", r"hold_from\[2\] is '1', it must be a whole number"),
        ("peak_bytes", -1, "peak_bytes is -1"),
        ("peak_bytes", 1.5, "peak_bytes is 1.5"),
        ("peak_bytes", 0, "less than the .* of resident_bytes"),
        ("time_ns", 0, "less than the .* of plain_time_ns"),
        ("fingerprint", None, "fingerprint is None, it must be a text"),
        ("fingerprint", "", "it must be 32 hexadecimal digits"),
        ("solver", "", "solver is empty"),
        ("skeleton.has_grad_mode.0", "false", r"skeleton.has_grad_mode\[0\] is 'false', it must be true or false"),
        ("skeleton.is_recorded.0", 1, r"skeleton.is_recorded\[0\] is 1"),
        ("skeleton.names", [], "skeleton's rows are not equally many: names 0, has_grad_mode"),
        ("skeleton.peak_bytes.0", -5, r"skeleton.peak_bytes\[0\] is -5"),
        ("skeleton", None, "skeleton is None, it must be an object"),
        ("extra", 1, "extra is no field"),
    ],
)
def test_what_is_said_of_a_damaged_plan(place: str, content: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "broken-plan.json"
    path.write_text(json.dumps(put(json.loads(recorded()[1].to_json()), place, content)))
    with pytest.raises(punar.PlanError, match=f"broken-plan.json: the plan is damaged: .*{says}.*solve for it again"):
        punar.Plan.load(path)


@pytest.mark.parametrize(
    ("place", "content", "says"),
    [
        ("events", [], r"ops\[0\] never runs"),
        ("events.0", [0, 100000], r"events\[0\].id names number 100000 of ops"),
        ("events.0", [9, 0], r"events\[0\].kind is 9"),
        ("events.0", [0, 3], r"events\[0\], RUN 3, .*before its inputs are made"),
        ("events.0", [2, 0], r"events\[0\], DEMAND 0, is out of order"),
        ("saves.0.0", 100000, r"saves\[0\].value names number 100000 of values"),
        ("values.0.0", 100000, r"values\[0\].storage names number 100000 of storages"),
        ("values.0.1", 7, r"values\[0\].version is 7"),
        ("values.0.2", 100000, r"values\[0\].producer names number 100000 of ops"),
        ("storages.0.0", -1, r"storages\[0\].bytes is -1"),
        ("storages.0.1", "true", r"storages\[0\].is_source is 'true'"),
        ("ops.1.2", "magic", r"ops\[1\].kind is 'magic', it must be one of matmul"),
        ("ops.1.3", "false", r"ops\[1\].is_backward is 'false'"),
        ("ops.1.7", [100000], r"ops\[1\].inputs names number 100000"),
        ("ops.1.9", -3, r"ops\[1\].time_ns is -3"),
        ("resident_bytes", -1, "resident_bytes is -1"),
        ("device", "toaster!", "device is 'toaster!'"),
        ("meta", {"source_bytes": "much"}, "meta.source_bytes is 'much'"),
    ],
)
def test_what_is_said_of_a_damaged_profile(place: str, content: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "broken-trace.json"
    path.write_text(json.dumps(put(json.loads(recorded()[0].to_json()), place, content)))
    with pytest.raises(punar.PlanError, match=f"broken-trace.json: the trace is damaged: .*{says}.*profile the step again"):
        punar.Profile.load(path)


def test_a_lost_field_is_named() -> None:
    body = json.loads(recorded()[1].to_json())
    del body["skeleton"]["names"]
    with pytest.raises(punar.PlanError, match=r"skeleton\.names is missing"):
        punar.Plan.from_json(json.dumps(body))


@pytest.mark.parametrize("load", [punar.Plan.load, punar.Profile.load])
@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"format": 1}', "9" * 5000, "\ufeff{}"], ids=lambda text: text[:5])
def test_what_is_no_file_of_ours_is_named(load, text: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(punar.PlanError, match=r"foreign\.json: asked to read a punar-\w+ file"):
        load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(punar.PlanError, match=r"foreign\.json, which failed"):
        load(path)
    with pytest.raises(punar.PlanError, match="asked to read None"):
        load(None)
