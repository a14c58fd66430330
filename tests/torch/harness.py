"""Runs a step several times, plain and under a ``Remat``, and compares all that it leaves behind bit for bit."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import punar
from punar.ir import Trace
from punar.ir.lineage import NEVER
from punar.plan import Plan, make_plan


class RandomRemat(punar.Remat):
    """Obeys a random plan: each value is held with probability ``hold``, else dropped until a random demand or for ever."""

    def __init__(self, seed: int, hold: float) -> None:
        super().__init__()
        self.seed, self.hold = seed, hold

    def _make_plan(self, trace: Trace, *_: int) -> Plan:
        draw = random.Random(self.seed)
        last = max((*trace.demand_rank, 1))
        choices = [0 if draw.random() < self.hold else draw.choice([1, draw.randint(1, last), NEVER]) for _ in trace.values]
        return make_plan(trace, choices, solver="random", budget_bytes=0)


def bits(t: Tensor | None) -> bytes | None:
    """A tensor's contents; None for None."""
    if t is None:
        return None
    t = t.detach()
    if t.layout is not torch.strided:
        t = t.to_dense()
    return t.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step leaves: loss, gradients and buffers by name, random states, and what else the caller wants compared."""

    loss: bytes | None
    gradients: dict[str, bytes | None]
    buffers: dict[str, bytes | None]
    random: tuple[Any, ...]
    extra: Any

    def differences(self, other: Outcome) -> list[str]:
        found = ["loss"] if self.loss != other.loss else []
        for kind in ("gradients", "buffers"):
            mine, theirs = getattr(self, kind), getattr(other, kind)
            found += [f"{kind}: {name}" for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]
        return found + [name for name in ("random", "extra") if getattr(self, name) != getattr(other, name)]


def outcome(model: nn.Module, loss: Tensor, extra: Any = None) -> Outcome:
    return Outcome(
        loss=bits(loss),
        gradients={name: bits(p.grad) for name, p in model.named_parameters()},
        buffers={name: bits(b) for name, b in model.named_buffers()},
        random=(bits(torch.get_rng_state()), random.getstate(), repr(np.random.get_state())),
        extra=extra,
    )


def seed_all(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def train(
    make: Callable[[], tuple[nn.Module, Callable[[], Tensor]]],
    *,
    steps: int,
    remat: punar.Remat | None = None,
    extra: Callable[[nn.Module], Any] = lambda model: None,
) -> list[Outcome]:
    """Makes model and step, runs ``steps`` of them, and says what each left behind.

    The loss of a step lives until the next one's replaces it, as in a user's loop. When this returns nothing of the model is alive.
    """
    seed_all(0)
    model, step = make()
    seed_all(1)
    found = []
    for _ in range(steps):
        with nullcontext() if remat is None else remat:
            loss = step()
        found.append(outcome(model, loss, extra(model)))
    return found


def last_peaks(
    make: Callable[[], tuple[nn.Module, Callable[[], Tensor]]], remat: punar.Remat, *, keeps_graphs: bool = False
) -> tuple[int, int]:
    """(predicted, measured) peak of the third of three steps, which obeyed its plan.

    ``keeps_graphs``: a step may keep a tensor with its graph, and so what its dropped saves are made from: the step after one that obeyed a plan may begin
    beside more than the one after the recorded step. That much is taken off what was measured.
    """
    live_bytes = [left.extra for left in train(make, steps=3, remat=remat, extra=lambda _: remat._session.meter.live)]
    more_bytes = max(0, live_bytes[1] - live_bytes[0]) if keeps_graphs else 0
    stats = remat.stats[-1]
    assert stats.plan is not None
    assert not stats.is_traced
    assert stats.measured_peak_bytes is not None
    return stats.plan.peak_bytes, stats.measured_peak_bytes - more_bytes


def outcomes(
    step: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, x: Tensor, *, steps: int, remat: punar.Remat | None = None
) -> list[Outcome]:
    """Runs so many steps of a model that is there, gradients cleared before each, and says what each left behind."""
    found = []
    for _ in range(steps):
        model.zero_grad()
        with nullcontext() if remat is None else remat:
            loss = step(model, x)
        found.append(outcome(model, loss))
    return found


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """What dies inside dies by its reference count."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def assert_nothing_lives(remat: punar.Remat) -> None:
    meter = remat._session.meter
    assert (meter.live, meter.resident) == (0, 0), f"{meter.live} B made in the steps and {meter.resident} B found there are still alive"
