"""Custom functions, kernels that punar cannot see, ``torch.func``, compiled parts, jagged tensors: right, and never an error?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

import punar
from punar.errors import UsageError
from tests.torch.harness import RandomRemat, train
from tests.torch.models import make_blocks, plain_step, stepping


def assert_like_plain(make, *, steps: int = 3, budget: str | None = "min", must_replay: bool = True) -> punar.Remat:
    plain = train(make, steps=steps)
    remat = punar.Remat(budget=budget)
    assert [a.differences(b) for a, b in zip(plain, train(make, steps=steps, remat=remat), strict=True)] == [[]] * steps
    assert not must_replay or remat.stats[-1].replayed_operators > 0
    for seed in range(4):
        checked = train(make, steps=steps, remat=RandomRemat(seed, 0.3))
        assert [a.differences(b) for a, b in zip(plain, checked, strict=True)] == [[]] * steps
    return remat


class Scale(torch.autograd.Function):
    """Looks for what fused weight gradients look for: the parameter itself, and attributes."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        assert isinstance(weight, nn.Parameter)
        weight.main_grad += (gradient * x).sum(0)
        assert x.note == "kept"
        return gradient * weight, None


@pytest.mark.parametrize("budget", [None, "min"])
def test_saved_tensors_keep_identity_and_attributes(budget: str | None) -> None:
    weight = nn.Parameter(torch.randn(8))
    weight.main_grad = torch.zeros(8)
    layer, x = nn.Linear(8, 8), torch.randn(16, 8)
    remat = punar.Remat(budget=budget)
    for _ in range(3):
        with remat:
            hidden = layer(x).exp().sin()
            hidden.note = "kept"
            Scale.apply(hidden, weight).sin().sum().backward()
    assert weight.main_grad.abs().sum() > 0


class Sneaky(torch.autograd.Function):
    """Writes through numpy into tensors from factories: a kernel that dispatches nothing."""

    @staticmethod
    def forward(ctx, x: Tensor, factory: str) -> Tensor:
        out = getattr(torch, factory)(x.shape)
        out.numpy()[...] = x.detach().numpy() ** 2
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, out = ctx.saved_tensors
        return gradient * 2 * x + out * 0.1, None


@pytest.mark.parametrize("factory", ["empty", "zeros"])
def test_what_unseen_kernels_write_is_held(factory: str) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        for block in model:
            x = Sneaky.apply(block(x), factory).sin()
        loss = x.sum()
        loss.backward()
        return loss

    assert_like_plain(stepping(step))


def test_an_unseen_write_that_only_later_steps_make_is_seen() -> None:
    """As with adapters, whose first contribution is zero: when the step is traced the buffer is what its factory made it."""

    def make():
        model, x, scale = make_blocks(2), torch.randn(64, 32), [0.0]

        def run() -> Tensor:
            model.zero_grad()
            hidden = model(x)
            buffer = torch.zeros(64, 32)
            buffer.numpy()[...] += scale[0]
            scale[0] += 1.0
            loss = (hidden * buffer.cos() * (hidden + buffer)).sum()
            loss.backward()
            return loss

        return model, run

    assert_like_plain(make, steps=4)


def test_replayable_makes_a_function_one_operator() -> None:
    @punar.replayable
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            out.numpy()[...] = x.detach().numpy() ** 2
            ctx.save_for_backward(x)
            return out

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient * 2 * x

    def step(model: nn.Module, x: Tensor) -> Tensor:
        for block in model:
            x = Square.apply(block(x)).sin()
        loss = x.sum()
        loss.backward()
        return loss

    remat = assert_like_plain(stepping(step))
    assert remat.trace is not None
    square = [op for op in remat.trace.ops if op.name.startswith("punar.replayable:")]
    assert len(square) == 4
    assert all(op.is_replayable for op in square)


def test_replayable_refuses_what_it_cannot_wrap() -> None:
    with pytest.raises(UsageError, match=r"give a function, an operator or an autograd\.Function class"):
        punar.replayable(3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, from jvp
def test_torch_func_transforms_inside_the_step() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        inner = grad(lambda p: functional_call(model, p, (x,)).square().mean())(parameters)
        loss = model(x).square().mean() + sum(g.sum() for g in inner.values())
        loss.backward()
        model.eval()
        vmap(grad(lambda p, row: functional_call(model, p, (row,)).square().mean()), (None, 0))(parameters, x[:4])
        jvp(model, (x,), (x,))
        vmap(model)(x).square().mean().backward()
        jacrev(torch.sin)(x[0])
        hessian(lambda row: row.sin().sum())(x[0])
        model.train()
        return loss

    assert_like_plain(stepping(step), must_replay=False)


def test_hooks_are_there_again_after_a_transform() -> None:
    model, x = make_blocks(), torch.randn(64, 32)
    remat = punar.Remat(budget="min")
    for _ in range(2):
        model.zero_grad()
        with remat:
            grad(lambda row: row.sin().sum())(x[0])
            plain_step(model, x)
    assert remat.stats[-1].replayed_operators > 0
    with torch.autograd.graph.disable_saved_tensors_hooks("off"):
        pass


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks() -> None:
    def make_model() -> nn.Module:
        model = make_blocks()
        for block in model[1::2]:
            block.compile(backend="aot_eager")
        return model

    assert_like_plain(stepping(plain_step, make_model))


@pytest.mark.filterwarnings("ignore")
def test_a_model_compiled_whole() -> None:
    def make_model() -> nn.Module:
        model = make_blocks(2)
        model.compile(backend="aot_eager")
        return model

    plain = train(stepping(plain_step, make_model), steps=3)
    checked = train(stepping(plain_step, make_model), steps=3, remat=punar.Remat(budget="min"))
    assert [a.differences(b) for a, b in zip(plain, checked, strict=True)] == [[]] * 3


def test_jagged_tensors() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor([x[:5], x[5:14]], layout=torch.jagged)
        out = model[0].down(nn.functional.gelu(model[0].up(jagged)))
        loss = out.values().square().mean() + model(x).mean()
        loss.backward()
        return loss

    assert_like_plain(stepping(step))
