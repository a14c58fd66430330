"""Where a plan drops nothing: are steps left alone, and watched again when they change?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import punar
from punar.torch.session import StepStats
from tests.torch.harness import Outcome, outcomes, seed_all
from tests.torch.models import make_blocks, plain_step, second_order

Step = Callable[[nn.Module, Tensor], Tensor]


def run(remat: punar.Remat, model: nn.Module, x: Tensor, steps: int, step: Step = plain_step) -> None:
    for _ in range(steps):
        model.zero_grad()
        with remat:
            step(model, x)


def watched(remat: punar.Remat) -> list[bool]:
    return [stats.measured_peak_bytes is not None for stats in remat.stats]


@pytest.fixture
def calm() -> tuple[punar.Remat, nn.Module, Tensor]:
    remat, model, x = punar.Remat(budget=1.0), make_blocks(), torch.randn(64, 32)
    run(remat, model, x, 7)
    assert watched(remat) == [True] * 6 + [False]
    return remat, model, x


def test_one_in_sixty_five_is_watched(calm: tuple[punar.Remat, nn.Module, Tensor]) -> None:
    remat, model, x = calm
    run(remat, model, x, 70)
    assert [i for i, is_watched in enumerate(watched(remat)) if is_watched] == [*range(6), 70]


def test_measuring_steps_are_always_watched() -> None:
    remat = punar.Remat()
    run(remat, make_blocks(), torch.randn(64, 32), 9)
    assert all(watched(remat))


def test_a_plan_that_is_given_is_always_watched() -> None:
    model, x = make_blocks(), torch.randn(64, 32)
    profile = punar.profile(model, x, lambda model, x: model(x).square().mean())
    remat = punar.Remat(plan=punar.solve(profile, budget=1.0))
    run(remat, model, x, 9)
    assert all(watched(remat))


def test_another_shape_is_noticed_and_then_recorded(calm: tuple[punar.Remat, nn.Module, Tensor]) -> None:
    remat, model, _ = calm
    run(remat, model, torch.randn(128, 32), 2)
    assert watched(remat)[-2:] == [False, True]
    assert remat.stats[-2].plan is None
    assert remat.stats[-1].is_traced


def test_a_budget_in_bytes_holds_from_the_second_larger_step_on() -> None:
    model = make_blocks()
    small, large = torch.randn(64, 32), torch.randn(512, 32)
    plain = punar.Remat()
    run(plain, model, large, 2)
    budget = plain.stats[-1].measured_peak_bytes * 3 // 4
    remat = punar.Remat(budget=budget)
    run(remat, model, small, 8)
    run(remat, model, large, 3)
    assert watched(remat)[-3:] == [False, True, True]
    assert remat.stats[-1].measured_peak_bytes <= budget


def other_hooks(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        hidden = model[0](x)
    loss = model[1:](hidden).square().mean()
    loss.backward()
    return loss


def transform(model: nn.Module, x: Tensor) -> Tensor:
    scale = torch.func.grad(lambda y: y.square().sum())(x).mean()
    loss = model(x).square().mean() * scale
    loss.backward()
    return loss


@pytest.mark.parametrize("step", [plain_step, second_order, other_hooks, transform])
def test_an_unwatched_step_is_the_plain_one(step: Step) -> None:
    def train(remat: punar.Remat | None) -> list[Outcome]:
        seed_all(0)
        return outcomes(step, make_blocks(), torch.randn(64, 32), steps=9, remat=remat)

    remat = punar.Remat(budget=1.0)
    plain, checked = train(None), train(remat)
    assert not all(watched(remat))
    assert [a.differences(b) for a, b in zip(plain, checked, strict=True)] == [[]] * 9


def test_a_write_into_a_saved_tensor_raises_as_in_eager(calm: tuple[punar.Remat, nn.Module, Tensor]) -> None:
    """Also into one of the first, which hooks have looked at."""
    remat, model, x = calm
    y = torch.randn(64, 32, requires_grad=True)

    def fail() -> None:
        with remat:
            hidden = (x * y).exp()
            loss = hidden.square().sum()
            hidden.add_(1)
            loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fail()
    run(remat, model, x, 1)
    assert watched(remat)[-1]


def test_an_error_inside_leaves_no_hooks(calm: tuple[punar.Remat, nn.Module, Tensor]) -> None:
    remat, model, _ = calm

    def fail() -> None:
        with remat:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    run(remat, model, torch.randn(64, 32), 1)


def test_the_report_says_so(calm: tuple[punar.Remat, nn.Module, Tensor]) -> None:
    remat, model, x = calm
    run(remat, model, x, 3)
    assert "4 of them, or their backward passes, ran unwatched; their peaks are not measured" in str(remat.report())


def test_losses_that_are_kept_do_not_end_the_calm() -> None:
    """A few bytes more are resident in each step."""
    remat, model, x, losses = punar.Remat(budget=1.0), make_blocks(), torch.randn(64, 32), []
    for _ in range(12):
        model.zero_grad()
        with remat:
            losses.append(plain_step(model, x).detach())
    assert not all(watched(remat))


def test_a_part_that_is_added_now_and_then_is_noticed_and_planned_for() -> None:
    """The usual step fits the budget as it is; the one with the added part begins the same."""
    model, x = make_blocks(), torch.randn(64, 32)

    def train(remat: punar.Remat) -> list[StepStats]:
        for turn in range(100):
            model.zero_grad()
            with remat:
                hidden = model(x)
                extra = model(hidden).square().mean() if turn % 10 == 9 else 0
                (hidden.square().mean() + extra).backward()
        return remat.stats

    peaks = [stats.measured_peak_bytes for stats in train(punar.Remat())]
    usual, rare = peaks[1], peaks[9]
    assert rare > 1.3 * usual
    budget = (usual + rare) // 2
    stats = train(punar.Remat(budget=budget))
    assert stats[9].measured_peak_bytes is None  # not known of yet
    later = stats[59::10]
    assert all(s.replayed_operators > 0 and (s.measured_peak_bytes is None or s.measured_peak_bytes <= budget) for s in later)
