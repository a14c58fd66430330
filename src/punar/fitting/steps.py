"""Steps of any size: traced without running, or recorded where they cannot be, planned for, and run where they can be."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from punar.api import profile
from punar.arguments import LossFn, Offloading
from punar.costs import Device, known_devices
from punar.described import Spread, described_by, optimizer_state_bytes, trace_on
from punar.errors import DataDependentStep, InfeasibleBudget, PlanMismatch, UsageError
from punar.fitting.record import Trial
from punar.ir import Trace
from punar.ir.derived import forget_derived
from punar.plan import Plan, simulate
from punar.plan.moves import Channel
from punar.planning import budget_in_bytes, channels_to, codec_channels, device_memory, plan_for
from punar.remat import Remat
from punar.solvers import least_peak
from punar.torch.rescue import is_out_of_memory, let_go
from punar.torch.session import LEARNED_AFTER
from punar.torch.state import restored, run_step

MakeBatch = Callable[[int], Any]

_TIMED = 3
"""How many steps are run to time one; the first warms up."""

_ROOM = 1.5
"""A step that is recorded within a budget may have so many times as much on the CPU, as far as that is free, before it counts as one that does not fit: what
an operator is going to make is known only once it has run."""


@dataclass(slots=True, kw_only=True)
class Steps:
    """Makes a trial of a size.

    Attributes:
        model, make_batch, loss_fn, spread, offload, compress: as ``fit`` takes them.
        device: the description that times are computed by. is_here: whether it stands for the device that the model is on, called ``place``.
        optimizer_ns: of an optimizer's step.
        budget_bytes: what the whole step may have. excess_of_one: how many bytes more than predicted real steps had, in proportion to
            their size.
        factors: how much longer an operator takes than computed, where that was measured.
        unknown: the operator whose result depends on data, so that steps run with data; "" where they are traced without. learns_times: whether such steps
            run a few times more, to time their operators.
    """

    model: torch.nn.Module
    make_batch: MakeBatch
    loss_fn: LossFn
    spread: Spread
    offload: Offloading
    compress: tuple[str, ...]
    device: Device
    is_here: bool
    place: str
    optimizer_ns: int
    budget_bytes: int = 0
    excess_of_one: float = 0.0
    factors: dict[tuple[str, bool], float] | None = None
    unknown: str = ""
    learns_times: bool = False

    @property
    def optimizer_bytes(self) -> int:
        """The optimizer's state, which is counted and, here, not there yet."""
        return optimizer_state_bytes(self.model, self.spread.optimizer)

    def traced(self, size: int, *, is_accumulating: bool = False) -> Trace | None:
        """The trace of the step of a size; None where it had to run for that and ran out of memory.

        Raises:
            DataDependentStep: it cannot be traced without data, and does not run here.
        """
        batch = self.make_batch(size)
        if not self.unknown:
            try:
                trace = trace_on(self.device, self.model, batch, self.loss_fn, self.spread, is_accumulating=is_accumulating)
            except DataDependentStep as error:
                if not self.is_here:
                    raise
                self.unknown = error.operator or "the step"
            else:
                return (
                    self.timed(replace(trace, device=self.place)) if self.is_here else described_by(self.device, trace, self.spread.shards)
                )
        return self.recorded(batch, self.excess_bytes(size), is_accumulating=is_accumulating)

    def excess_bytes(self, size: int) -> int:
        """How much more than predicted a real step of a size is taken to need."""
        return math.ceil(self.excess_of_one * size)

    def recorded(self, batch: Any, excess_bytes: int, *, is_accumulating: bool) -> Trace | None:
        """The trace of a step that runs, within the budget as far as that goes; None where it ran out of memory."""
        budget_bytes = self.budget_bytes - self.optimizer_bytes - excess_bytes if self.budget_bytes else None
        limit_bytes = None
        if budget_bytes is not None and torch.device(self.place).type == "cpu":
            limit_bytes = max(budget_bytes, min(int(_ROOM * budget_bytes), device_memory(self.place)[1]))
        remat = Remat(budget_bytes, limit=limit_bytes)
        with restored(self.model) as before:
            for _ in range(1 + (LEARNED_AFTER if self.learns_times else 0)):
                before.restore(self.model)
                if is_accumulating:
                    fill_gradients(self.model)
                try:
                    with remat:
                        run_step(self.model, batch, self.loss_fn)
                except InfeasibleBudget:
                    break  # no plan fits; of what step, it was seen
                except (RuntimeError, MemoryError) as error:
                    if budget_bytes is None or not is_out_of_memory(error):
                        raise
                    let_go(error)
                    break
        return None if remat.trace is None else beside(remat.trace, self.optimizer_bytes)

    def set_budget(self, trace: Trace, budget: str | int) -> None:
        """Reads a budget as bytes, once: what is free would vary from size to size.

        Raises:
            BudgetError: it is more than the device has.
        """
        absent_bytes = self.optimizer_bytes if self.is_here else 0
        self.budget_bytes = budget_in_bytes(trace, budget, 0, -absent_bytes)

    def learn_times(self, size: int, trace: Trace) -> None:
        """Measures the step of a size, where it runs here and has room to run plain: operators of the same kind are taken to be as far from what is computed.

        Complexity: five plain steps.
        """
        if self.unknown:
            return  # its operators are timed as it is recorded
        plain_bytes = simulate(trace, (0,) * len(trace.values)).peak_bytes
        if not self.is_here or plain_bytes - trace.resident_bytes > device_memory(self.place)[1]:
            return
        measured = profile(self.model, self.make_batch(size), self.loss_fn).trace
        real, computed = _times(measured), _times(trace)
        self.factors = {kind: real[kind] / computed[kind] for kind in computed if computed[kind] and kind in real}

    def timed(self, trace: Trace) -> Trace:
        """The trace with times as far from the computed ones as was measured."""
        if not self.factors:
            return trace
        factors = self.factors
        ops = tuple(replace(op, time_ns=round(op.time_ns * factors.get((op.name, op.is_backward), 1.0))) for op in trace.ops)
        return replace(trace, ops=ops)

    def channels(self, trace: Trace) -> tuple[Channel, ...]:
        """All ways for values of a step to be elsewhere or smaller meanwhile."""
        return (*channels_to(self.offload, trace), *codec_channels(trace, "min", "auto", self.compress))

    def trial(self, size: int, trace: Trace | None, *, micro_batches: int = 1) -> Trial:
        """What is predicted of a size, and the fastest plan that fits."""
        if trace is None:
            return Trial(size=size, micro_batches=micro_batches, plain_peak_bytes=None, least_peak_bytes=None, is_feasible=False)
        channels, excess_bytes = self.channels(trace), self.excess_bytes(size)
        try:
            plan: Plan | None = plan_for(trace, self.budget_bytes, extra_bytes=excess_bytes, channels=channels)
        except InfeasibleBudget:
            plan = None
        found = Trial(
            size=size,
            micro_batches=micro_batches,
            plain_peak_bytes=simulate(trace, (0,) * len(trace.values)).peak_bytes + excess_bytes,
            least_peak_bytes=least_peak(trace, channels) + excess_bytes,
            plan=plan,
            time_ns=0 if plan is None else micro_batches * plan.time_ns + self.optimizer_ns,
            is_feasible=plan is not None,
        )
        forget_derived()
        return found

    def run(self, trial: Trial, *, is_timed: bool) -> Trial:
        """The trial with what a real step under its plan had and took.

        Raises:
            PlanMismatch: the step is not the one that was traced.
        """
        assert trial.plan is not None
        try:
            trial = self.with_scratch(trial, trial.plan)
            if not trial.is_feasible:
                return trial
            assert trial.plan is not None
            peak_bytes, step_ns = self.ran(trial, trial.plan, _TIMED if is_timed else 1)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            let_go(error)
            return trial.failed(None)
        peak_bytes += self.optimizer_bytes
        if peak_bytes > self.budget_bytes:
            return trial.failed(peak_bytes)
        measured_ns = trial.micro_batches * step_ns + self.optimizer_ns if is_timed else None
        return replace(trial, measured_peak_bytes=peak_bytes, measured_ns=measured_ns)

    def with_scratch(self, trial: Trial, plan: Plan) -> Trial:
        """The trial with what kernels take for a moment (convolutions, for example), which only a real step shows: with another plan where there is some."""
        if self.unknown:
            return trial  # which ran to be recorded
        excess_bytes = self.excess_bytes(trial.size)
        real = self.recorded(self.make_batch(trial.size), excess_bytes, is_accumulating=trial.micro_batches > 1)
        if real is None:
            return trial.failed(None)
        if plan.skeleton.names != tuple(op.name for op in real.forward_ops) or len(plan.hold_from) != len(real.values):
            return trial  # another step: the next one tells
        if plan.judged(real).peak_bytes == plan.peak_bytes - excess_bytes:
            return trial
        try:
            found = plan_for(real, self.budget_bytes, channels=self.channels(real))
        except InfeasibleBudget as error:
            return trial.failed(error.least_bytes)
        return replace(trial, plan=found, time_ns=trial.micro_batches * found.time_ns + self.optimizer_ns)

    def ran(self, trial: Trial, plan: Plan, steps: int) -> tuple[int, int]:
        """The highest peak of some real steps, and the least time of those after the first."""
        batch = self.make_batch(trial.size)
        remat = Remat(plan=plan, offload=self.offload)
        with restored(self.model) as before, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the plan given promises", UserWarning)  # that is what is looked for
            for _ in range(steps):
                before.restore(self.model)
                if trial.micro_batches > 1:
                    fill_gradients(self.model)
                with remat:
                    run_step(self.model, batch, self.loss_fn)
                if not (remat._session.is_plan_followed or self.unknown):
                    raise PlanMismatch(
                        f"asked to confirm what fits by a step of size {trial.size}, found it to take another path than without data: "
                        "profile this model where it runs, and solve for the budget"
                    )
        peaks = [stats.measured_peak_bytes for stats in remat.stats if stats.measured_peak_bytes is not None]
        return max(peaks), min(stats.time_ns for stats in remat.stats[min(1, steps - 1) :])


def beside(trace: Trace, optimizer_bytes: int) -> Trace:
    """The trace with so much of an optimizer's state resident beside it."""
    known_bytes = int(trace.meta.get("optimizer_bytes", 0))
    meta = trace.meta | {"optimizer_bytes": str(known_bytes + optimizer_bytes)}
    return replace(trace, resident_bytes=trace.resident_bytes + optimizer_bytes, meta=meta)


def fill_gradients(model: torch.nn.Module) -> None:
    """Gives each trained parameter a gradient of zeros where it has none, as if a batch had gone before."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _times(trace: Trace) -> dict[tuple[str, bool], int]:
    """What operators of each kind take together."""
    found: dict[tuple[str, bool], int] = defaultdict(int)
    for op in trace.ops:
        found[op.name, op.is_backward] += op.time_ns
    return found


def description_of(device: torch.device) -> Device:
    """The description that is nearest to a device that is here: that of a CPU, or of the GPU whose name has the longest part in common.

    Raises:
        UsageError: it is neither a CPU nor a CUDA device.
    """
    known = known_devices()
    if device.type == "cpu":
        return known["cpu"]
    if device.type != "cuda":
        raise UsageError(
            f"asked what fits where the model is, found it on {device}; give `device`, such as 'h100-80gb', or put the model on the device it is to train on"
        )
    name = torch.cuda.get_device_name(device).lower().replace(" ", "")
    alike = [part for each in known if (part := each.partition("-")[0]) in name]
    best = max(alike, key=len, default="a100")
    return next(description for each, description in known.items() if each.partition("-")[0] == best)
