"""The verbs on good and on bad input."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import punar
from punar.errors import PlanMismatch, UsageError, VerificationError
from punar.ir import Trace
from punar.plan import make_plan
from tests.torch.harness import outcome
from tests.torch.models import make_blocks


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(64, 32)


def test_profile_leaves_everything_as_it_was(x: torch.Tensor) -> None:
    model = nn.Sequential(make_blocks(2), nn.BatchNorm1d(32))
    loss_fn(model, x).backward()
    before = outcome(model, torch.zeros(()))
    profile = punar.profile(model, x, loss_fn)
    assert before.differences(outcome(model, torch.zeros(()))) == []
    assert profile.trace.saves
    assert profile.trace.is_backward_seen


class Warming(torch.autograd.Function):
    """An operator whose first two calls take 50 ms."""

    calls = 0

    @staticmethod
    def forward(ctx, t: torch.Tensor) -> torch.Tensor:
        return torch.ops.punar_api_test.warming(t)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def warming(t: torch.Tensor) -> torch.Tensor:
    Warming.calls += 1
    if Warming.calls <= 2:
        time.sleep(0.05)
    return t + 1


def test_an_operators_first_calls_do_not_count_as_its_time(x: torch.Tensor) -> None:
    with torch.library._scoped_library("punar_api_test", "FRAGMENT") as library:
        library.define("warming(Tensor x) -> Tensor")
        library.impl("warming", warming, "CompositeExplicitAutograd")
        trace = punar.profile(make_blocks(1), x, lambda m, b: Warming.apply(m(b)).square().mean()).trace
    assert [op.time_ns < 25e6 for op in trace.ops if "warming" in op.name] == [True]
    assert all(op.time_ns > 0 for op in trace.forward_ops)


def test_profile_and_plan_round_trip_through_files(x: torch.Tensor, tmp_path: Path) -> None:
    model = make_blocks()
    profile = punar.profile(model, x, loss_fn)
    profile.save(tmp_path / "profile.json")
    loaded = punar.Profile.load(tmp_path / "profile.json")
    assert loaded == profile
    plan = punar.solve(loaded, budget="min")
    plan.save(tmp_path / "plan.json")
    assert punar.Plan.load(tmp_path / "plan.json") == plan
    remat = punar.Remat(plan=punar.Plan.load(tmp_path / "plan.json"))
    with remat:
        loss_fn(model, x).backward()
    assert remat.stats[0].replayed_operators == plan.replayed_ops > 0
    assert not remat.stats[0].is_traced


def test_a_plan_for_another_shape_is_ignored_with_a_warning(x: torch.Tensor) -> None:
    model = make_blocks()
    plan = punar.solve(punar.profile(model, x, loss_fn), budget="min")
    remat, other = punar.Remat(plan=plan), torch.randn(16, 32)
    loss_fn(model.eval(), other).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with pytest.warns(UserWarning, match="the plan is ignored and nothing is recomputed"), remat:
        loss_fn(model, other).backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    assert remat.stats[0].replayed_operators == 0
    with pytest.warns(UserWarning, match="the plan is ignored"), pytest.raises(PlanMismatch, match="took another path"):
        punar.verify(model, other, loss_fn, plan=plan)


def test_a_plan_made_before_the_optimizer_had_state_warns_once_that_it_exceeds_its_budget(x: torch.Tensor) -> None:
    model = make_blocks()
    plan = punar.solve(punar.profile(model, x, loss_fn), budget="min")
    remat, optimizer = punar.Remat(plan=plan), torch.optim.Adam(model.parameters())

    def train() -> None:
        for _ in range(4):
            with remat:
                loss_fn(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match=r"the plan given promises .* more is resident .* optimizer state \(\d+") as told:
        train()
    assert len(told) == 1
    assert remat.stats[0].measured_peak_bytes <= plan.budget_bytes < remat.stats[-1].measured_peak_bytes


def test_a_plan_made_for_another_path_warns_once_that_it_exceeds_its_budget(x: torch.Tensor) -> None:
    model = make_blocks()
    remat = punar.Remat(plan=punar.solve(punar.profile(model, x, loss_fn), budget="min"))

    def train() -> None:
        for _ in range(2):
            with remat:
                (loss_fn(model, x) + model[0](x).exp().tanh().exp().tanh().square().mean()).backward()

    with pytest.warns(UserWarning, match="its operators or their sizes are others than those of the profiled step") as told:
        train()
    assert len(told) == 1


def test_verify_proves_a_plan(x: torch.Tensor) -> None:
    model = make_blocks()
    verification = punar.verify(model, x, loss_fn, budget=0.7)
    assert verification.is_identical
    assert verification.is_deterministic
    assert verification.plan.replayed_ops > 0
    assert "identical: loss, gradients, buffers and random state" in str(verification)
    verification.raise_if_different()
    assert all(p.grad is None for p in model.parameters())


def test_verify_finds_an_operator_whose_replay_differs(x: torch.Tensor) -> None:
    state = {"calls": 0}

    @punar.replayable
    def drifting(t: torch.Tensor) -> torch.Tensor:
        state["calls"] += 1
        return t * state["calls"]

    class Drift(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t: torch.Tensor) -> torch.Tensor:
            state["calls"] = 0
            out = drifting(t)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0]

    model = nn.Sequential(make_blocks(1), nn.Linear(32, 32))
    before = outcome(model, torch.zeros(()))

    def drifting_loss(m: nn.Module, b: torch.Tensor) -> torch.Tensor:
        return Drift.apply(m(b).exp()).sin().sum()

    trace = punar.profile(model, x, drifting_loss).trace
    drop_all = make_plan(trace, [1] * len(trace.values), solver="none held", budget_bytes=0)
    verification = punar.verify(model, x, drifting_loss, plan=drop_all)
    assert not verification.is_identical
    assert verification.is_deterministic
    assert "NOT identical: the plan's step differs from the plain one: gradient of" in str(verification)
    with pytest.raises(VerificationError, match="asked to verify a plan"):
        verification.raise_if_different()
    assert before.differences(outcome(model, torch.zeros(()))) == []


def test_a_profile_of_another_machine_can_be_solved_for(x: torch.Tensor) -> None:
    trace = replace(punar.profile(make_blocks(), x, loss_fn).trace, device="cuda:77")
    profile = punar.Profile(trace=trace)
    assert punar.solve(profile, budget=0.8).replayed_ops > 0
    assert punar.solve(profile, budget="900 TiB").replayed_ops == 0
    with pytest.raises(punar.BudgetError, match="recorded on cuda:77, which this machine has not"):
        punar.solve(profile, budget="auto")


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("6 gb/s", "cannot be read as bytes"),
        ("lots", "cannot be read as bytes"),
        ("-3 GiB", "cannot be read as bytes"),
        ("0 GiB", "must be at least 1 B"),
        ("9" * 400 + " GiB", "a number that a computer can hold"),
        ("0.4", "without a unit of bytes; for that share of the activation peak give the float 0.4"),
        ("40%", "give the float 0.4"),
        ("1048576", 'give the int 1048576 or the text "1048576 B"'),
        ("1.5", "without a unit of bytes; give bytes such as"),
        ("-1", "without a unit of bytes; give bytes such as"),
        ("nan", "without a unit of bytes; give bytes such as"),
        ("inf", "without a unit of bytes; give bytes such as"),
        (0, "is not positive"),
        (-5, "is not positive"),
        (0.0, "is a float outside"),
        (1.5, "is a float outside"),
        (float("nan"), "is a float outside"),
        (True, "is a bool"),
        ([1], "is a list"),
    ],
)
def test_nonsense_budgets(budget, message: str) -> None:
    with pytest.raises(punar.BudgetError, match=message):
        punar.Remat(budget=budget)


def test_a_budget_above_the_device(x: torch.Tensor) -> None:
    with pytest.raises(punar.BudgetError, match="is above what cpu has"):
        punar.solve(punar.profile(make_blocks(), x, loss_fn), budget="900 TiB")


def test_an_infeasible_budget_names_the_least_and_what_holds_it(x: torch.Tensor) -> None:
    model, remat = make_blocks(), punar.Remat(budget="150 KiB")
    with pytest.raises(punar.InfeasibleBudget, match="least") as caught, remat:
        loss_fn(model, x).backward()
    assert caught.value.budget_bytes == 150 * 1024
    assert caught.value.holders
    assert "are resident: optimizer state" in str(caught.value)
    least = punar.Remat(budget=caught.value.least_bytes)
    model.zero_grad()
    for _ in range(2):
        model.zero_grad()
        with least:
            loss_fn(model, x).backward()
    assert least.stats[-1].measured_peak_bytes <= caught.value.least_bytes


def test_optimizer_state_counts_once_it_is_seen(x: torch.Tensor) -> None:
    model = make_blocks()
    optimizer = torch.optim.Adam(model.parameters())
    weights = sum(p.nbytes for p in model.parameters())
    remat = punar.Remat(budget="min")
    plans = []
    for _ in range(3):
        with remat:
            loss_fn(model, x).backward()
        plans.append(remat.plan)
        optimizer.step()
        optimizer.zero_grad()
    assert plans[-1].resident_bytes >= plans[0].resident_bytes + 2 * weights
    last = remat.stats[-1]
    assert last.measured_peak_bytes == pytest.approx(last.predicted_peak_bytes, rel=0.01)
    with pytest.raises(punar.InfeasibleBudget, match="optimizer state") as caught:
        run_with_optimizer(punar.Remat(budget=3 * weights), model, optimizer, x)
    assert caught.value.least_bytes > 4 * weights


def run_with_optimizer(remat: punar.Remat, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    for _ in range(3):
        with remat:
            loss_fn(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("verb", [punar.profile, punar.verify])
def test_losses_that_backward_cannot_start_from(verb, x: torch.Tensor) -> None:
    model = make_blocks(1)
    with pytest.raises(UsageError, match=r"the loss has shape \[64, 32\]"):
        verb(model, x, lambda m, b: m(b))
    with pytest.raises(UsageError, match="returned a float"):
        verb(model, x, lambda m, b: 1.0)
    with pytest.raises(UsageError, match="requires no gradient"):
        verb(model.requires_grad_(False), x, loss_fn)


def test_a_budget_and_a_plan_at_once(x: torch.Tensor) -> None:
    plan = punar.solve(punar.profile(make_blocks(1), x, loss_fn), budget=1.0)
    with pytest.raises(UsageError, match="both a budget and a plan"):
        punar.Remat(budget=0.5, plan=plan)
    with pytest.raises(UsageError, match="found a str"):
        punar.Remat(plan="plan.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "found no JSON"),
        ("[]", "found 'list'"),
        ('{"format": "punar-trace", "version": 1}', "found 'punar-trace'"),
        ('{"format": "punar-plan", "version": 99}', "is of version 99"),
        ('{"format": "punar-plan", "version": 2}', "is of version 2"),
        ('{"format": "punar-plan", "version": 4}', "the plan is damaged"),
    ],
)
def test_corrupt_and_foreign_plan_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(punar.PlanError, match=message):
        punar.Plan.load(path)


def test_missing_and_damaged_profiles(x: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(punar.PlanError, match="which failed"):
        punar.Profile.load(tmp_path / "absent.json")
    body = json.loads(punar.profile(make_blocks(1), x, loss_fn).trace.to_json())
    body["events"] = body["events"][::-1]
    with pytest.raises(punar.PlanError, match="the trace is damaged"):
        Trace.from_json(json.dumps(body))


def test_the_report_is_a_text(x: torch.Tensor) -> None:
    model, remat = make_blocks(), punar.Remat(budget="min")
    assert str(remat.report())
    for _ in range(2):
        model.zero_grad()
        with remat:
            loss_fn(model, x).backward()
    assert "min" in str(remat.report())


def test_a_forward_pass_in_another_thread_is_left_alone(x: torch.Tensor) -> None:
    model, remat = make_blocks(1), punar.Remat(budget="min")
    for _ in range(2):
        with remat:
            thread = threading.Thread(target=lambda: loss_fn(model, x).backward())
            thread.start()
            thread.join()
    assert [(step.measured_peak_bytes, step.replayed_operators, step.is_traced) for step in remat.stats] == [(0, 0, False)] * 2
    assert all(p.grad is not None for p in model.parameters())


def test_a_share_holds_for_smaller_steps_too() -> None:
    model = make_blocks()
    remat = punar.Remat(budget=0.8)
    for rows in (256, 256, 256, 16, 16):
        model.zero_grad()
        with remat:
            loss_fn(model, torch.randn(rows, 32)).backward()
    assert remat.plan.budget_bytes == remat.stats[2].plan.budget_bytes
    assert remat.stats[-1].measured_peak_bytes <= remat.plan.peak_bytes


def test_what_a_failed_step_leaves_is_no_part_of_the_next_plan() -> None:
    def peaks(is_failing: bool) -> tuple[int, int]:
        torch.manual_seed(0)
        model, remat, batch = make_blocks(), punar.Remat(budget=0.7), torch.randn(256, 32)
        for step in range(4):
            model.zero_grad()
            with contextlib.suppress(KeyError), remat:
                loss = loss_fn(model, batch)
                if is_failing and step == 0:
                    raise KeyError
                loss.backward()
        return remat.plan.plain_peak_bytes, remat.stats[-1].measured_peak_bytes

    assert peaks(is_failing=True)[0] == peaks(is_failing=False)[0]


@pytest.mark.parametrize("budget", ["min", 1.0])
def test_an_optimizer_inside_the_block_is_not_held_against_a_relative_budget(budget, x: torch.Tensor) -> None:
    model = make_blocks()
    remat = punar.Remat(budget=budget)
    run_with_optimizer(remat, model, torch.optim.Adam(model.parameters()), x)
    assert remat.stats[-1].measured_peak_bytes <= remat.plan.budget_bytes * 1.01


def test_wrong_things_in_the_place_of_right_ones(x: torch.Tensor, tmp_path: Path) -> None:
    profile = punar.profile(make_blocks(1), x, loss_fn)
    with pytest.raises(UsageError, match=r"give what punar\.profile"):
        punar.solve("trace.json", budget=0.5)
    for verb in (punar.profile, punar.verify):
        with pytest.raises(UsageError, match=r"give a torch\.nn\.Module"):
            verb(len, x, loss_fn)
        with pytest.raises(UsageError, match=r"give a function of \(model, batch\)"):
            verb(make_blocks(1), x, None)
    with pytest.raises(UsageError, match="both a budget and a plan"):
        punar.verify(make_blocks(1), x, loss_fn, budget=0.5, plan=punar.solve(profile, budget="min"))
    with pytest.raises(UsageError, match=r"give what punar\.profile"):
        punar.solve(punar.Profile(trace=None), budget=0.5)
    with pytest.raises(UsageError, match="give its name, such as 'auto'"):
        punar.solve(profile, budget="min", solver=None)
    with pytest.raises(punar.PlanError, match="found no JSON"):
        punar.Plan.from_json(None)
    with pytest.raises(punar.PunarError, match="foo"):
        punar.solve(profile, budget="min", solver="foo")
    with pytest.raises(punar.PlanError, match="asked to write"):
        profile.save(tmp_path / "absent" / "profile.json")
    with pytest.raises(punar.PlanError, match="asked to write"):
        punar.solve(profile, budget="min").save(tmp_path / "absent" / "plan.json")
    with pytest.raises(UsageError, match="that was not entered"):
        punar.Remat().__exit__(None, None, None)


@pytest.mark.parametrize("solver", ["foo", None, "every:0"])
def test_a_solver_that_is_none_is_an_error_at_once(solver: object) -> None:
    with pytest.raises(UsageError, match="asked for"):
        punar.Remat(budget=0.5, solver=solver)


@pytest.mark.parametrize(("budget", "same"), [(np.int64(1 << 20), 1 << 20), (np.float32(0.5), 0.5), (np.float64(0.25), 0.25)])
def test_numbers_of_numpy_are_budgets(budget: object, same: float) -> None:
    assert punar.Remat(budget=budget).budget == same
    assert isinstance(punar.Remat(budget=budget).budget, (int, float))


def complex_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean() * 1j


def loss_with_its_own_backward(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(("wrong", "message"), [(complex_loss, "the loss is complex"), (loss_with_its_own_backward, "ran backward itself")])
def test_a_loss_that_backward_cannot_start_from(x: torch.Tensor, wrong: Any, message: str) -> None:
    model = make_blocks(1)
    with pytest.raises(UsageError, match=message):
        punar.profile(model, x, wrong)
    assert all(p.grad is None for p in model.parameters())
