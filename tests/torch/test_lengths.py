"""Steps of ever other lengths: is a plan made for one length obeyed on another where it fits, and what comes after?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import punar
from punar.plan import plain_plan
from punar.plan.nearby import NEARBY
from punar.solvers import solve as solve_trace
from punar.torch.drift import Planning
from punar.torch.script import Script
from tests.torch.models import Block

WIDTH = 32


def make_model(dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, WIDTH), *(nn.Sequential(Block(), nn.Dropout(dropout)) for _ in range(6)))


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, 50, (8, length), generator=torch.Generator().manual_seed(length))


def step(model: nn.Module, length: int) -> list[torch.Tensor | None]:
    torch.manual_seed(length)
    model.zero_grad()
    model(tokens(length)).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The budgets that plans were solved for between steps, one after another."""
    budgets: list[int] = []

    def count(trace: punar.ir.Trace, budget_bytes: int, *rest: object) -> punar.Plan:
        budgets.append(budget_bytes)
        return solve_trace(trace, budget_bytes, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("punar.planning.solve_trace", count)
    return budgets


class Run:
    def __init__(self, share: float = 0.6, length: int = 64, **options: object) -> None:
        self.model, self.plain = make_model(), make_model()
        trace = punar.profile(self.model, tokens(length), lambda model, batch: model(batch).square().mean()).trace
        self.budget = trace.resident_bytes + int(share * (plain_plan(trace).peak_bytes - trace.resident_bytes))
        self.remat = punar.Remat(budget=self.budget, **options)  # type: ignore[arg-type]

    def step(self, length: int) -> punar.StepStats:
        """One step, whose gradients are the plain twin's."""
        with self.remat:
            grads = step(self.model, length)
        assert all(torch.equal(a, b) for a, b in zip(grads, step(self.plain, length), strict=True))
        return self.remat.stats[-1]

    def script(self) -> Script:
        (script,) = (script for script in self.remat._session.scripts if script.plan is self.remat.plan)
        return script

    @property
    def planning(self) -> Planning | None:
        return self.remat._session.drifts.planning

    def wait(self) -> None:
        assert self.planning is not None
        self.planning._thread.join(60)
        assert self.planning.is_done


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_shorter_step_obeys_the_plan_of_a_longer_one(run: Run, solved: list[int]) -> None:
    run.step(64)
    assert len(solved) == 1
    longer = run.remat.plan
    recorded = run.step(60)
    plan = run.remat.plan
    assert recorded.is_traced
    assert len(solved) == 1  # nothing was solved for it
    assert longer is not None
    assert plan is not None
    assert (plan.solver, plan.hold_from, plan.moves) == (NEARBY, longer.hold_from, longer.moves)
    assert plan.budget_bytes == run.budget
    assert plan.peak_bytes < longer.peak_bytes
    followed = run.step(60)
    assert not followed.is_traced
    assert followed.measured_peak_bytes == followed.predicted_peak_bytes == plan.peak_bytes <= run.budget


def test_its_own_plan_is_made_beside_training_once_it_comes_again(run: Run, solved: list[int]) -> None:
    run.step(64)
    run.step(60)
    run.step(60)
    run.step(60)
    assert run.planning is None  # it may not come again, and its operators have not been timed yet
    run.step(60)
    run.wait()
    nearby = run.remat.plan
    assert nearby is not None
    run.step(60)
    own = run.remat.plan
    assert own is not None
    assert own.solver == "auto"
    assert own.overhead <= nearby.overhead
    assert own.peak_bytes <= run.budget
    assert len(solved) == 1
    assert not run.script().is_own_due
    assert run.remat.drifts == ()
    for _ in range(9):
        run.step(60)
    assert len(solved) == 1


def test_where_no_own_plan_can_be_made_the_other_ones_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> punar.Plan:
        raise punar.errors.PlanError("asked for a plan, found no process to make it in")

    monkeypatch.setattr("punar.remat.solve_elsewhere", refuse)
    run.step(64)
    for _ in range(4):
        run.step(60)
    run.wait()
    run.step(60)
    assert run.remat.plan is not None
    assert run.remat.plan.solver == NEARBY
    assert not run.script().is_own_due
    for _ in range(9):
        run.step(60)
    assert run.planning is None


def test_a_longer_step_is_solved_for_where_the_plan_of_the_shorter_one_does_not_fit(run: Run, solved: list[int]) -> None:
    run.step(64)
    run.step(90)
    assert len(solved) == 2
    assert run.remat.plan is not None
    assert run.remat.plan.solver == "auto"
    assert run.remat.plan.peak_bytes <= run.budget


def test_a_step_that_needs_no_plan_gets_the_plain_one(run: Run) -> None:
    run.step(64)
    run.step(16)
    assert run.remat.plan is not None
    assert run.remat.plan.drops_nothing
    assert run.remat.plan.solver != NEARBY


def test_another_model_is_not_taken_for_another_length(run: Run, solved: list[int]) -> None:
    run.step(64)
    other = nn.Sequential(*run.model, nn.Linear(WIDTH, WIDTH))
    with run.remat:
        step(other, 63)
    assert len(solved) == 2


def test_a_share_is_no_less_for_a_shorter_step_and_min_is_its_own(solved: list[int]) -> None:
    model = make_model()
    remat = punar.Remat(budget=0.5)
    for length in (64, 60, 60):
        with remat:
            step(model, length)
    assert remat.plan is not None
    assert remat.plan.solver == NEARBY
    assert len(solved) == 1
    remat = punar.Remat(budget="min")
    for length in (64, 60):
        with remat:
            step(model, length)
    assert remat.plan is not None
    assert remat.plan.solver != NEARBY


def test_a_ceiling_set_by_a_rescue_holds_for_what_is_taken(run: Run) -> None:
    run.step(64)
    assert run.remat.plan is not None
    ceiling = run.remat.plan.peak_bytes * 9 // 10
    run.remat._ladder.tighten(ceiling)
    run.step(63)
    assert run.remat.plan.peak_bytes <= ceiling
    run.step(63)
    assert run.remat.stats[-1].measured_peak_bytes is not None
    assert run.remat.stats[-1].measured_peak_bytes <= ceiling
