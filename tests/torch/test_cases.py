"""Do small models made after public bug reports train the same under the least budget and under random plans?"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor, nn

import punar
from tests.torch import cases
from tests.torch.harness import Outcome, RandomRemat, train

NAMES = sorted(module.name for module in pkgutil.iter_modules(cases.__path__))

LONG = "b48_recursion_depth_with_thousands_of"
"""Takes a minute and a half: its step has 42 000 operators."""

NOTHING_TO_REPLAY: frozenset[str] = frozenset()
"""Cases in which dropping anything would save nothing, or nothing can be dropped."""

REMATS: list[tuple[str, Callable[[], punar.Remat]]] = [
    ("min", lambda: punar.Remat(budget="min")),
    *((f"random {seed}, {hold} held", lambda seed=seed, hold=hold: RandomRemat(seed, hold)) for seed, hold in enumerate([0.0, 0.4])),  # type: ignore[misc]
]


def default_step(model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor]) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss = loss_fn(model, batch)
    loss.backward()
    return loss


def run(case: ModuleType, remat: punar.Remat | None) -> list[Outcome]:
    step = getattr(case, "step", default_step)
    held: list[Any] = []

    def make() -> tuple[nn.Module, Callable[[], Tensor]]:
        model, batch, loss_fn = case.make()
        held[:] = [batch]
        return model, lambda: step(model, batch, loss_fn)

    def extra(model: nn.Module) -> Any:
        return case.extra_state(model, held[0]) if hasattr(case, "extra_state") else None

    return train(make, steps=max(3, getattr(case, "STEPS", 1)), remat=remat, extra=extra)


@contextmanager
def quiet() -> Iterator[None]:
    """The models themselves use what PyTorch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name == LONG else name for name in NAMES])
def test_trains_the_same(name: str) -> None:
    case = importlib.import_module(f"{cases.__name__}.{name}")
    replayed = 0
    with quiet():
        expected = run(case, None)
        for label, make in REMATS:
            remat = make()
            found = run(case, remat)
            for step, (wanted, got) in enumerate(zip(expected, found, strict=True)):
                assert not wanted.differences(got), f"{label}, step {step}"
            replayed += sum(stats.replayed_operators for stats in remat.stats)
    assert (replayed > 0) == (name not in NOTHING_TO_REPLAY)
