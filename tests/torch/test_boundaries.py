"""Are the steps of a training loop that knows nothing of it found: all of them, whole, and nothing else?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import punar
from punar.torch.boundaries import Boundaries
from tests.torch.harness import bits


class Diary:
    """A block that writes down what happens in and outside of it."""

    def __init__(self) -> None:
        self.text = ""

    def __enter__(self) -> None:
        self.text += "["

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.text += "]" if kind is None else "!]"


class Noted(nn.Module):
    """A layer that writes down its calls."""

    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self.diary, self.layer = diary, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.diary.text += "f"
        return self.layer(x)  # type: ignore[no-any-return]


class Loop:
    """What training loops are made of."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.diary = Diary()
        self.model, self.other = Noted(self.diary), Noted(self.diary)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x = torch.randn(3, 4)

    def forward(self) -> Tensor:
        return self.model(self.x).square().sum()  # type: ignore[no-any-return]

    def backward(self) -> None:
        self.forward().backward()
        self.diary.text += "b"

    def step(self) -> None:
        self.optimizer.step()
        self.diary.text += "s"


def plain(loop: Loop) -> None:
    for _ in range(3):
        loop.backward()
        loop.step()


def accumulating(loop: Loop) -> None:
    for _ in range(2):
        loop.backward()
        loop.backward()
        loop.step()


def evaluating(loop: Loop) -> None:
    loop.backward()
    loop.step()
    with torch.no_grad():
        loop.forward()
    with torch.inference_mode():
        loop.forward()
    loop.backward()
    loop.step()


def two_optimizers(loop: Loop) -> None:
    other = torch.optim.Adam(loop.other.parameters())
    for _ in range(2):
        loop.backward()
        loop.step()
        loop.other(loop.x).sum().backward()
        other.step()


def with_a_closure(loop: Loop) -> None:
    optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=1)

    def closure() -> Tensor:
        loss = loop.forward()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        loop.diary.text += "s"


def in_backward(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())  # type: ignore[misc]
    for _ in range(3):
        loop.backward()


def skipping_what_overflowed(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for scale in (1.0, float("inf"), 1.0):
        (loop.forward() * scale).backward()
        loop.diary.text += "b"
        scaler.scale(torch.ones(()))
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        loop.diary.text += "s"


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def recomputing(loop: Loop) -> None:
    model = Checkpointed(loop.model)
    for _ in range(2):
        model(loop.x).sum().backward()
        loop.step()


def in_another_thread(loop: Loop) -> None:
    thread = threading.Thread(target=plain, args=(loop,))
    thread.start()
    thread.join()


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def around_the_forward_pass(context: Callable[[], AbstractContextManager[object]]) -> Callable[[Loop], None]:
    """It ends before the optimizer steps: nothing can be entered in it and left outside."""

    def run(loop: Loop) -> None:
        with context():
            loss = loop.forward()
        loss.backward()
        loop.step()
        loop.backward()
        loop.step()

    return run


def around_the_end(loop: Loop) -> None:
    """It begins within the step, and the optimizer steps in it: the block is left when it can be."""
    loop.backward()
    with Seen():
        loop.step()
    loop.backward()
    loop.step()


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (plain, "[fb]s[fb]s[fb]s"),
        (accumulating, "[fbfb]s[fbfb]s"),
        (evaluating, "[fb]sff[fb]s"),
        (two_optimizers, "[fb]s[f][fb]s[f]"),
        (with_a_closure, "[f]s[f]s"),
        (in_backward, "[fb][fb][fb]"),
        (skipping_what_overflowed, "[fb]s[fbsfb]s"),
        (recomputing, "[ff]s[ff]s"),
        (in_another_thread, "fbsfbsfbs"),
        (around_the_forward_pass(Seen), "fs[fb]s"),
        (around_the_forward_pass(save_on_cpu), "fs[fb]s"),
        (around_the_forward_pass(nullcontext), "[f]s[fb]s"),
        (around_the_end, "[fbsfb]s"),
    ],
)
def test_what_is_inside(run: Callable[[Loop], None], expected: str) -> None:
    loop = Loop()
    with Boundaries(loop.diary) as steps:
        run(loop)
    assert loop.diary.text == expected
    assert steps.steps in (expected.count("]"), expected.count("]") - 1)
    loop.backward()
    assert loop.diary.text == expected + "fb"  # nothing is looked at any more


def test_a_script_that_raises() -> None:
    loop = Loop()

    def run() -> None:
        with Boundaries(loop.diary):
            loop.forward()
            raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script"):
        run()
    assert loop.diary.text == "[f!]"


def test_a_transform_is_not_entered() -> None:
    loop = Loop()
    with Boundaries(loop.diary):
        torch.func.grad(lambda x: loop.model(x).sum())(loop.x)
        loop.step()
    assert loop.diary.text == "fs"


@pytest.mark.parametrize("run", [plain, accumulating, two_optimizers, with_a_closure, in_backward, skipping_what_overflowed])
@pytest.mark.parametrize("budget", [None, "min"])
def test_a_loop_computes_the_same(run: Callable[[Loop], None], budget: str | None) -> None:
    expected, loop = Loop(), Loop()
    run(expected)
    with Boundaries(punar.Remat(budget=budget)) as steps:
        run(loop)
    assert steps.steps
    assert [bits(p) for p in loop.model.parameters()] == [bits(p) for p in expected.model.parameters()]


def test_compiled_models_are_compiled_once() -> None:
    loop = Loop()
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(loop.model.layer, backend=count)
    with Boundaries(loop.diary):
        for _ in range(4):
            compiled(loop.x).sum().backward()
            loop.step()
    assert loop.diary.text == "[]s" * 4
    assert graphs == 1
