"""Does any program, under any plan, compute what plain autograd computes, and is nothing left alive?"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import punar
from tests.torch.harness import Outcome, RandomRemat, assert_nothing_lives, bits, no_garbage_collection, train
from tests.torch.programs import Program, ProgramModel, programs

EXAMPLES = int(os.environ.get("PUNAR_EXAMPLES", "120"))
"""How many programs are tried; set the variable to try more."""

STEPS = 3

counted: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _count() -> Iterator[None]:
    """The test would say nothing if plans dropped nothing: over all programs much must have been replayed."""
    yield
    if counted["programs"] >= EXAMPLES // 2:
        assert counted["programs that replayed"] > counted["programs"] // 2, dict(counted)
    if path := os.environ.get("PUNAR_COUNTS"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(counted) + "\n")


def maker(program: Program, *, accumulates: bool = False) -> Callable[[], tuple[nn.Module, Callable[[], Tensor]]]:
    def make() -> tuple[nn.Module, Callable[[], Tensor]]:
        model, batch = ProgramModel(program), torch.randn(4, 8)

        def step() -> Tensor:
            if not accumulates:
                model.zero_grad()
            loss = model(batch)
            loss.backward()
            return loss

        return model, step

    return make


def generator_state(model: nn.Module) -> bytes | None:
    return bits(model.generator.get_state())


def plain(program: Program, *, accumulates: bool = False) -> list[Outcome]:
    """The plain run; a program on which eager itself raises is none."""
    try:
        return train(maker(program, accumulates=accumulates), steps=STEPS + accumulates, extra=generator_state)
    except RuntimeError as error:
        event(f"eager raises {str(error)[:40]}")
        assume(False)
        raise


def check(program: Program, remat: punar.Remat, expected: list[Outcome], *, accumulates: bool = False) -> None:
    found = train(maker(program, accumulates=accumulates), steps=STEPS + accumulates, remat=remat, extra=generator_state)
    replayed = sum(stats.replayed_operators for stats in remat.stats)
    counted.update({"programs": 1, "programs that replayed": replayed > 0, "operators replayed": replayed})
    note(f"{replayed} operators replayed in {len(found)} steps")
    for step, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        assert not wanted.differences(got), f"step {step}"
    del found
    assert_nothing_lives(remat)


unhurried = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@unhurried
@given(program=programs(), seed=st.integers(0, 1 << 16), hold=st.sampled_from([0.0, 0.2, 0.5, 0.8]), accumulates=st.booleans())
def test_random_plans_compute_what_the_plain_step_computes(program: Program, seed: int, hold: float, accumulates: bool) -> None:
    expected = plain(program, accumulates=accumulates)
    with no_garbage_collection():
        check(program, RandomRemat(seed, hold), expected, accumulates=accumulates)


@settings(unhurried, max_examples=max(EXAMPLES // 6, 10))
@given(program=programs())
def test_the_least_budget_computes_what_the_plain_step_computes(program: Program) -> None:
    expected = plain(program)
    with no_garbage_collection():
        check(program, punar.Remat(budget="min"), expected)


class Tampered(nn.Module):
    """Overwrites one of its activations between forward and backward, in the last step only."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.place = place
        self.is_tampering = False

    def forward(self, x: Tensor) -> Tensor:
        made = [self.first(x)]
        made += [made[-1].tanh()]
        made += [made[-1] + 1]
        made += [self.second(made[-1])]
        made += [made[-1].exp()]
        if self.is_tampering:
            with torch.no_grad():
                made[self.place].mul_(2)
        return made[-1].sum()


def tampered_gradients(place: int, remat: punar.Remat | None) -> list[bytes | None] | None:
    """The gradients, or None where backward raises as autograd does."""
    torch.manual_seed(0)
    model, batch = Tampered(place), torch.randn(4, 8)
    for step in range(3):
        model.is_tampering = step == 2
        model.zero_grad()
        try:
            with remat or nullcontext():
                model(batch).backward()
        except RuntimeError as error:
            if step < 2 or "has been modified by an inplace operation" not in str(error):
                raise
            return None
    return [bits(p.grad) for p in model.parameters()]


@pytest.mark.parametrize("hold", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("place", range(5))
def test_raises_where_eager_raises_because_a_saved_tensor_was_modified(place: int, hold: float) -> None:
    expected = tampered_gradients(place, None)
    assert (expected is None) == (place in (1, 2, 4))
    for seed in range(3):
        remat = RandomRemat(seed, hold)
        assert tampered_gradients(place, remat) == expected
        assert sum(stats.replayed_operators for stats in remat.stats) > 0 or hold
