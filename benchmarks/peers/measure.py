"""Runs: what is measured of each, and how.

NOTE. The rules of measuring.

1. Gradients are there, and zero, before each step. With gradients made anew a step's peak would count them.
2. A peak is the most live bytes during the step above those just before, plus what the run has kept since before its *first* step: a planner
   that keeps its memory between steps would look small otherwise.
3. Times are CPU seconds of the process, the steadiest figure on a shared machine. Runs take turns in shuffled order, a step each; a time is the
   median over the rounds of the ratio to the plain step of the same round, given with its middle half.
4. Everything that a run does in its step counts, entering and leaving ``with remat`` included. Putting a patch on and zeroing gradients do not.
5. A run of punar's has taken the few steps before in which it watches what it later leaves unwatched: training is thousands of steps.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import punar
from peers.memory import Witness
from peers.models import Subject
from peers.patches import HEAVY, PRODUCTS, Patch, checkpointed, selective

UNNOTICED = 0.002
"""Of a run's peak: what its first step may leave behind without a second one being measured."""

SETTLING_STEPS = 3
"""How many steps punar watches before it leaves most backward passes unwatched (Rule 5)."""

FEWEST_ROUNDS = 3
"""How many rounds are measured however long they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A median over rounds with its middle half."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, over: Sequence[float], under: Sequence[float]) -> Ratio:
        """The ratios of two runs' times, round by round; the shorter counts where one joined later."""
        ratios = sorted(a / b for a, b in zip(reversed(over), reversed(under), strict=False))
        return cls(median=median(ratios), low=ratios[len(ratios) // 4], high=ratios[-1 - len(ratios) // 4])


@dataclass(slots=True, kw_only=True)
class Run:
    """One way to do the step. ``remat`` only where it is punar's; ``plan`` is what it obeys.

    Attributes:
        peak_bytes: of a step, above what was there before it, ``held_bytes`` included (Rule 2).
        is_identical: gradients and buffers are the plain step's bit for bit.
        gradient_error: the largest difference of a gradient, in parts of the largest gradient.
        differing_buffers: what the step left otherwise than the plain one, of the first names.
        error: why it could not run, empty where it could.
        cpu_s: seconds of each round.
    """

    name: str
    patch: Patch = nullcontext
    plan: punar.Plan | None = None
    remat: punar.Remat | None = None
    peak_bytes: int = 0
    held_bytes: int = 0
    is_identical: bool = False
    gradient_error: float = 0.0
    differing_buffers: tuple[str, ...] = ()
    error: str = ""
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    def as_data(self, plain: Run) -> dict[str, Any]:
        """What goes into the JSON file."""
        data = {key: getattr(self, key) for key in self.__slots__ if key not in ("patch", "plan", "remat")}
        if self.cpu_s:
            data["memory_ratio"] = self.peak_bytes / plain.peak_bytes
            data["time_ratio"] = asdict(Ratio.of(self.cpu_s, plain.cpu_s))
            data["wall_ratio"] = asdict(Ratio.of(self.wall_s, plain.wall_s))
        if self.plan is not None:
            data["predicted_peak_bytes"] = self.plan.peak_bytes - self.plan.resident_bytes
            data["predicted_time_ratio"] = self.plan.step_time_ns / self.plan.plain_time_ns
            data["replayed_operators"] = self.plan.replayed_ops
            data["solver"] = self.plan.solver
        return data


@dataclass(frozen=True, slots=True)
class Outcome:
    """Gradients and buffers that a step left."""

    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, model: torch.nn.Module) -> Outcome:
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return cls(gradients, {name: b.clone() for name, b in model.named_buffers()})

    def gradient_error(self, other: Outcome) -> float:
        worst = max(float((g - other.gradients[name]).abs().max()) for name, g in self.gradients.items())
        return worst / max(float(g.abs().max()) for g in other.gradients.values())

    def is_identical(self, other: Outcome) -> bool:
        return all(torch.equal(g, other.gradients[name]) for name, g in self.gradients.items()) and not self.differing_buffers(other)

    def differing_buffers(self, other: Outcome) -> tuple[str, ...]:
        return tuple(name for name, b in self.buffers.items() if not torch.equal(b, other.buffers[name]))


class Bench:
    """One model, and the runs measured on it so far. The first is the plain step, with which the others are compared."""

    def __init__(self, subject: Subject, witness: Witness) -> None:
        self.subject, self.witness = subject, witness
        self.model = subject.model
        self.runs: list[Run] = []
        self.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.random = random.Random(0)
        warm_up()
        subject.step()
        gc.collect()
        gc.freeze()  # else each collection goes through the objects of all imported packages, in somebody's step
        self.reference: Outcome | None = None
        self.plain = self.add(Run(name="plain"))

    def add(self, run: Run) -> Run:
        """Checks what the run computes and takes its peak; a peer that cannot run is noted with its error."""
        self.runs.append(run)
        before = self.witness.live_bytes()
        try:
            if run.plan is not None:
                run.remat = punar.Remat(plan=run.plan)
            with run.patch():
                self.examine(run, before)
                for _ in range(SETTLING_STEPS - 1 if run.plan is not None else 0):
                    self.zero_gradients()
                    self.run_once(run)
        except Exception as error:  # peers fail in ways of their own, and the comparison goes on
            if run.plan is not None:
                raise
            run.error = f"{type(error).__name__}: {error}"[:500]
        return run

    def examine(self, run: Run, before: int) -> None:
        """Takes the peak in the first step, in a second one where the first left something behind."""
        self.restore_buffers()
        run.peak_bytes = run.held_bytes + self.peak_of(run)
        outcome = Outcome.of(self.model)
        if self.reference is None:
            self.reference, run.is_identical = outcome, True
            return
        run.gradient_error = outcome.gradient_error(self.reference)
        run.is_identical = outcome.is_identical(self.reference)
        run.differing_buffers = outcome.differing_buffers(self.reference)[:3]
        del outcome
        held = max(self.witness.live_bytes() - before, 0)
        if held > UNNOTICED * run.peak_bytes:
            run.peak_bytes = run.held_bytes + held + self.peak_of(run)
        run.held_bytes += held

    def peak_of(self, run: Run) -> int:
        """The most live bytes of a step above those just before."""
        self.zero_gradients()
        return self.witness.peak_bytes(lambda: self.run_once(run), run.remat)

    def run_once(self, run: Run) -> None:
        if run.remat is None:
            self.subject.step()
            return
        with run.remat:
            self.subject.step()

    def zero_gradients(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def restore_buffers(self) -> None:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[name])

    def take_turns(self, rounds: int, until: float = math.inf) -> None:
        """Times a step of each run in each round, in shuffled order (Rule 3); begins none after ``until`` but the first few."""
        runs = [run for run in self.runs if not run.error]
        for place in range(rounds):
            if place >= FEWEST_ROUNDS and time.perf_counter() > until:
                return
            self.random.shuffle(runs)
            for run in runs:
                self.zero_gradients()
                with run.patch(), timed(run):
                    self.run_once(run)


def warm_up() -> None:
    """What is imported on the first use, and what threads and kernels cost once, is nobody's."""
    remat, layer = punar.Remat(budget="min"), torch.nn.Linear(64, 64)
    for _ in range(2):
        with remat:
            torch.tanh(layer(layer(torch.ones(64, 64)))).sum().backward()
    for wrap in (checkpointed, partial(selective, HEAVY, PRODUCTS)):
        wrap(layer)(torch.ones(64, 64, requires_grad=True)).sum().backward()


@contextmanager
def timed(run: Run) -> Iterator[None]:
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    run.cpu_s.append(time.process_time() - cpu)
    run.wall_s.append(time.perf_counter() - wall)
