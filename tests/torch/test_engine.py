"""Where a plan is settled: do backward passes run unwatched, with the same results, and are they watched where that is not safe?"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import punar
from punar.torch.engine import runs_python
from tests.torch.harness import Outcome, outcomes, seed_all
from tests.torch.models import make_blocks, plain_step, second_order

Step = Callable[[nn.Module, Tensor], Tensor]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def through_grad(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        parameter.grad = gradient
    return loss


def twice(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def accumulating(model: nn.Module, x: Tensor) -> Tensor:
    plain_step(model, x)
    return plain_step(model, x)


def train(remat: punar.Remat | None, model: nn.Module, x: Tensor, steps: int, step: Step = plain_step) -> list[Outcome]:
    return outcomes(step, model, x, steps=steps, remat=remat)


def make() -> tuple[nn.Module, Tensor]:
    seed_all(0)
    return make_blocks(), torch.randn(64, 32)


def rested(remat: punar.Remat) -> list[bool]:
    return [stats.measured_peak_bytes is None for stats in remat.stats]


def test_most_backward_passes_of_a_settled_plan_are_unwatched() -> None:
    model, x = make()
    remat = punar.Remat(plan=punar.solve(punar.profile(model, x, loss_of), budget="min"))
    train(remat, model, x, 37)
    assert [i for i, is_rested in enumerate(rested(remat)) if not is_rested] == [0, 1, 2, 16, 32]


def test_a_budget_is_settled_too() -> None:
    remat = punar.Remat(budget="min")
    train(remat, *make(), 40)
    assert sum(rested(remat)) > 20


@pytest.mark.parametrize("step", [plain_step, through_grad, twice, second_order, accumulating])
def test_an_unwatched_backward_pass_gives_the_plain_gradients(step: Step) -> None:
    remat = punar.Remat(budget="min")
    checked = train(remat, *make(), 14, step)
    plain = train(None, *make(), 14, step)
    assert any(rested(remat))
    assert [a.differences(b) for a, b in zip(plain, checked, strict=True)] == [[]] * 14


def test_the_peak_is_predicted_beside_gradients_of_unwatched_passes() -> None:
    """Gradients that nobody saw being made are still there in the next micro-batch."""
    model, x = make()
    remat = punar.Remat(budget="min")
    for _ in range(8):
        model.zero_grad()
        for _ in range(3):
            with remat:
                plain_step(model, x)
    assert any(rested(remat))
    for stats in remat.stats[2:]:
        assert stats.measured_peak_bytes in (None, stats.predicted_peak_bytes)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient * 2


def hook_a_parameter(model: nn.Module) -> None:
    next(model.parameters()).register_hook(lambda gradient: None)


def shrink(parameter: Tensor) -> None:
    parameter.data.mul_(0.9)


def step_in_backward(model: nn.Module) -> None:
    next(model.parameters()).register_post_accumulate_grad_hook(shrink)


def hook_a_module(model: nn.Module) -> None:
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: None)


def use_a_function(model: nn.Module) -> None:
    next(model.children()).register_forward_hook(lambda module, args, out: Doubled.apply(out))


@pytest.mark.parametrize("change", [hook_a_parameter, step_in_backward, hook_a_module, use_a_function])
def test_backward_is_watched_where_it_runs_python(change: Callable[[nn.Module], None]) -> None:
    """Also where that begins once the plan is settled: the plain step's results are those of every step."""

    def run(remat: punar.Remat | None) -> list:
        model, x = make()
        found = train(remat, model, x, 12)
        change(model)
        return found + train(remat, model, x, 4)

    remat = punar.Remat(budget="min")
    plain, checked = run(None), run(remat)
    assert [a.differences(b) for a, b in zip(plain, checked, strict=True)] == [[]] * 16
    assert any(rested(remat)[:12])
    assert not any(rested(remat)[12:])


def test_python_code_is_found_in_the_graph() -> None:
    model, x = make()
    assert not runs_python([loss_of(model, x)])
    assert not runs_python([torch.autograd.graph.get_gradient_edge(loss_of(model, x))])
    assert not runs_python([x.clone()])
    assert runs_python([Doubled.apply(loss_of(model, x)) + 1])
    step_in_backward(model)
    assert runs_python([torch.autograd.graph.get_gradient_edge(loss_of(model, x))])


def writer(write: Callable[[Tensor], object]) -> Step:
    """A step in which the hook of an activation writes into the first block's bias, which only a replay reads again."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        def hook(gradient: Tensor) -> None:
            write(model[0].up.bias)

        hidden = model[:-1](x)
        hidden.register_hook(hook)
        loss = model[-1:](hidden).square().mean()
        loss.backward()
        return loss

    return step


def test_a_counted_write_that_begins_late_is_an_error_and_never_a_wrong_gradient() -> None:
    def write(weight: Tensor) -> None:
        with torch.no_grad():
            weight.mul_(0.5)

    model, x = make()
    remat = punar.Remat(plan=punar.solve(punar.profile(model, x, loss_of), budget="min"))
    train(remat, model, x, 4)
    assert rested(remat)[-1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(remat, model, x, 1, writer(write))


def test_an_uncounted_write_that_begins_late_is_told_when_it_is_seen() -> None:
    model, x = make()
    remat = punar.Remat(plan=punar.solve(punar.profile(model, x, loss_of), budget="min"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(remat, model, x, 5)
    assert rested(remat)[3:] == [True, True]
    with pytest.warns(UserWarning, match="backward has begun|the plan given promises") as told:
        train(remat, model, x, 12, writer(lambda weight: weight.data.mul_(1.0)))
    texts = sorted(str(warning.message)[:60] for warning in told)
    assert texts[0].startswith("backward has begun to write into tensors")
    assert texts[1].startswith("the plan given promises")  # what is overwritten is copied first
    assert rested(remat)[-1] is False
