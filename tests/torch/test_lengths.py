"""Steps of ever other lengths: is a plan made for one length obeyed on another where it fits, and what comes after?"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import punar
from punar.plan import plain_plan
from punar.plan.nearby import NEARBY
from punar.solvers import solve as solve_trace
from punar.solvers.elsewhere import Request
from punar.torch import script_cache
from punar.torch.drift import Planning
from punar.torch.script import Script
from tests.torch.models import Block, make_blocks
from tests.torch.test_drift import Clock

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


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator takes as long as any other, so that which plan is faster is no matter of luck."""
    monkeypatch.setattr(time, "perf_counter_ns", Clock())


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
        assert run.planning is None
    assert len(solved) == 1


def test_an_own_plan_is_asked_for_once_however_long_it_takes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer, asked = threading.Event(), []

    def answer(request: Request) -> punar.Plan:
        asked.append(request)
        assert may_answer.wait(60)
        return request.answer()

    monkeypatch.setattr("punar.remat.solve_elsewhere", answer)
    run.step(64)
    for _ in range(16):
        run.step(60)
    may_answer.set()
    run.wait()
    run.step(60)
    assert len(asked) == 1
    assert run.remat.plan is not None
    assert run.remat.plan.solver == "auto"


def test_each_length_gets_its_own_plan_though_others_ask_meanwhile(run: Run) -> None:
    run.step(64)
    for length in (60, 56, 52):
        for _ in range(4):
            run.step(length)
    asked = 0
    while run.planning is not None:
        run.wait()
        run.step(64)  # another one begins each time that a plan is there
        asked += 1
    assert asked == 3
    for length in (60, 56, 52):
        run.step(length)
        assert run.remat.plan is not None
        assert run.remat.plan.solver == "auto"


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


class Translator(nn.Module):
    """Reads two texts, of lengths that have nothing to do with each other; the first operator sees one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.encoder, self.decoder = make_blocks(4), make_blocks(4)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen = self.encoder(self.words(source)).mean(1, keepdim=True)
        return self.decoder(self.words(target) + seen)


def test_two_lengths_that_have_nothing_to_do_with_each_other_are_two_steps() -> None:
    torch.manual_seed(0)
    model = Translator()
    budget = peak_of(model, 40, 50) * 7 // 10
    remat = punar.Remat(budget=budget)
    for source, target in [(40, 20), (40, 50), (40, 50), (40, 8), (40, 20), (40, 50), (12, 50), (12, 8), (12, 50)]:
        model.zero_grad()
        with remat:
            model(tokens(source), target=tokens(target)).square().mean().backward()
        stats = remat.stats[-1]
        assert stats.measured_peak_bytes is not None
        if not stats.is_traced:
            assert stats.measured_peak_bytes == stats.predicted_peak_bytes
            assert stats.measured_peak_bytes <= budget
    assert [stats.is_traced for stats in remat.stats] == [True, True, False, True, False, False, True, True, False]


def peak_of(model: nn.Module, *lengths: int) -> int:
    trace = punar.profile(model, tuple(map(tokens, lengths)), lambda model, texts: model(*texts).square().mean()).trace
    return plain_plan(trace).peak_bytes


def test_of_many_lengths_the_longer_ones_stand_in_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_cache, "_MOST_ALONE", 4)
    run = Run(length=90)
    recorded = []
    for length in (90, 60, 30, 20, 70, 50, 89, 10, 25, 95, 70):
        stats = run.step(length)
        assert stats.measured_peak_bytes is not None
        assert stats.is_traced or stats.measured_peak_bytes <= run.budget
        recorded += [length] if stats.is_traced else []
    assert recorded == [90, 60, 30, 20, 95]
    for script in run.remat._session.scripts:
        assert not script.timed_ns or script.passes == len(script.timed_ns)  # a smaller step's times say nothing of it


def test_where_a_shorter_step_has_fewer_operators_each_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_cache, "_MOST_ALONE", 2)
    torch.manual_seed(0)
    words, cell, remat = nn.Embedding(50, WIDTH), nn.GRUCell(WIDTH, WIDTH), punar.Remat(budget="min")
    for length in (40, 30, 20, 20, 10, 10, 8):
        cell.zero_grad()
        with remat:
            state = torch.zeros(8, WIDTH)
            for word in words(tokens(length)).unbind(1):
                state = cell(word, state)
            state.sum().backward()
    assert [stats.is_traced for stats in remat.stats] == [True, True, False, True, True, False, True]


def test_what_the_first_operator_reads_may_be_the_same_for_all_lengths() -> None:
    """Under autocast it is a cast of the first weight."""
    torch.manual_seed(0)
    model = make_blocks(4)
    texts = {length: torch.randn(8, length, WIDTH) for length in (20, 60, 40)}

    def loss(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return model(text).square().mean()  # type: ignore[no-any-return]

    budget = plain_plan(punar.profile(model, texts[60], loss).trace).peak_bytes * 8 // 10
    remat = punar.Remat(budget=budget)
    for length in (20, 60, 40, 20, 60, 40, 60):
        model.zero_grad()
        with remat:
            loss(model, texts[length]).backward()
    assert [stats.is_traced for stats in remat.stats] == [True] * 3 + [False] * 4
    for stats in remat.stats[3:]:
        assert stats.predicted_peak_bytes is not None
        assert stats.measured_peak_bytes in (None, stats.predicted_peak_bytes)
        assert stats.predicted_peak_bytes <= budget


def test_of_sizes_that_nothing_shows_the_largest_is_planned_for() -> None:
    """The parts are called one by one, and the second text is not seen before it is read."""
    torch.manual_seed(0)
    model = Translator()
    budget = peak_of(model, 40, 50) * 7 // 10
    remat = punar.Remat(budget=budget)
    for target in (25, 50, 50, 8, 25, 50, 8, 50):
        model.zero_grad()
        with remat:
            seen = model.encoder(model.words(tokens(40))).mean(1, keepdim=True)
            model.decoder(model.words(tokens(target)) + seen).square().mean().backward()
    over = [place for place, stats in enumerate(remat.stats) if not stats.is_traced and (stats.measured_peak_bytes or 0) > budget]
    assert over == [1]
