"""The verbs before training: profile a step, solve for a plan, explain it, see the frontier."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from punar.arguments import EXACT, Budget, Compress, LossFn, Offloading, check_budget, check_compress, check_solver, describe_type
from punar.costs import Device, find_device, timed_on, with_scratch
from punar.errors import UsageError
from punar.ir import Trace
from punar.markup import html_table
from punar.plan import Plan
from punar.plan.moves import Channel
from punar.planning import channels_to, codec_channels, plan_for
from punar.profiles import Profile, trace_of
from punar.remat import Remat
from punar.reporting.page import Curve, CurvePoint
from punar.reporting.plot import plot_curve
from punar.reporting.table import format_columns
from punar.solvers import frontier_points
from punar.solvers import solve as solve_trace
from punar.torch.fake import trace_fake
from punar.torch.session import LEARNED_AFTER
from punar.torch.sharding import STAGES, sharded, share
from punar.torch.state import StateSnapshot, restored, run_step
from punar.units import format_bytes, format_seconds

_COLUMNS = ("predicted peak", "predicted time", "extra", "no plan below")

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""How many numbers of a parameter's dtype torch's optimizers keep for each of its own."""


def profile(
    model: torch.nn.Module,
    batch: Any,
    loss_fn: LossFn,
    *,
    device: str | Path | None = None,
    optimizer: str | float | None = None,
    shards: int = 1,
    zero_stage: int = 3,
) -> Profile:
    """Runs one step ``loss_fn(model, batch).backward()`` and records it; gradients, buffers and random state are put back.

    The step runs once before it is recorded, so that one-time costs do not count, and three times after it: while a
    step is recorded its operators run beside a memory profiler, and each is timed in those passes instead. Gradients that the model
    has now are taken to be there in the step, as when accumulating.

    With a ``device`` nothing runs: the step is traced on fake tensors, of models of any size, also such as are built under
    ``torch.device("meta")``, and its operators' times are computed; see ``docs/what-fits.md``.

    Args:
        device: a device known by name, such as ``"h100-80gb"``, or the path of a description that ``punar calibrate`` wrote.
        optimizer: whose state is resident: ``"sgd"``, ``"momentum"``, ``"adam"`` or ``"adamw"`` (torch's, in the parameters' dtype),
            or the bytes it has for each number that is trained.
        shards: over how many devices what follows is spread; each has a batch of its own, and ``batch`` is one of them.
        zero_stage: what is spread: 1, the optimizer's state; 2, gradients too; 3, parameters too, as ``torch.distributed.fsdp.fully_shard`` on each
            element of the model's lists of modules does it.

    Raises:
        UsageError: the loss is no scalar tensor, nothing requires a gradient, there is no such device, optimizer or stage, or one of ``optimizer``,
            ``shards`` and ``zero_stage`` was given without a device.
        DataDependentStep: with a device, the step's shapes or its path depend on data.
        PlanError: the device's description is damaged.

    Example:
        >>> import torch, punar
        >>> with torch.device("meta"):
        ...     model, batch = torch.nn.Sequential(torch.nn.Linear(8192, 8192), torch.nn.GELU()), torch.empty(4096, 8192)
        >>> step = punar.profile(model, batch, lambda model, batch: model(batch).sum(), device="h100-80gb", optimizer="adamw")
        >>> step.trace.resident_bytes // 2**20
        896
    """
    check_step(model, loss_fn)
    if device is not None:
        return _profile_for(find_device(device), model, batch, loss_fn, optimizer=optimizer, shards=shards, zero_stage=zero_stage)
    if optimizer is not None or (shards, zero_stage) != (1, 3):
        raise UsageError(
            "asked to profile a step that runs here with `optimizer`, `shards` or `zero_stage`, which are for steps that do not; "
            "give `device` too, or let the optimizer step once before: its state is then counted as it is"
        )
    with restored(model) as before:
        run_step(model, batch, loss_fn)
        before.restore(model)
        trace = _recorded(model, batch, loss_fn, before)
    if trace is None or not trace.saves:
        raise _nothing_saved()
    return Profile(trace=trace)


def _profile_for(
    device: Device, model: torch.nn.Module, batch: Any, loss_fn: LossFn, *, optimizer: str | float | None, shards: int, zero_stage: int
) -> Profile:
    """The profile of a step on a described device."""
    check_spread(shards, zero_stage)
    spread = Spread(optimizer=optimizer, shards=shards, zero_stage=zero_stage)
    return Profile(trace=described_by(device, trace_on(device, model, batch, loss_fn, spread), shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What is resident beside a step that is traced without running, and over how many devices: as ``profile`` takes it."""

    optimizer: str | float | None = None
    shards: int = 1
    zero_stage: int = 3


def trace_on(
    device: Device, model: torch.nn.Module, batch: Any, loss_fn: LossFn, spread: Spread, *, is_accumulating: bool = False
) -> Trace:
    """The trace of a step as it would run on a device, with computed times.

    ``is_accumulating``: whether gradients of all trained parameters are there before; else those that the model has now.

    Raises:
        UsageError, DataDependentStep: as ``profile``.
    """
    shards = spread.shards
    is_spread = shards > 1 and spread.zero_stage > 1
    step = trace_fake(
        model,
        batch,
        loss_fn,
        device=device.torch_name,
        optimizer_bytes=share(optimizer_state_bytes(model, spread.optimizer), shards),
        has_gradients=not is_spread,
        is_accumulating=is_accumulating and not is_spread,
    )
    if step is None:
        raise _nothing_saved()
    trace = sharded(step, model, shards, spread.zero_stage, is_accumulating=is_accumulating) if is_spread else step.trace
    return timed_on(with_scratch(trace) if device.kind == "cuda" else trace, device)


def described_by(device: Device, trace: Trace, shards: int) -> Trace:
    """The trace with what planning for it must know of a device that is not here."""
    described = {
        "described_device": device.name,
        "memory_bytes": str(device.memory_bytes),
        "host_bytes_per_s": str(device.host_bytes_per_second),
        "disk_bytes_per_s": str(device.disk_bytes_per_second),
        "shards": str(shards),
    }
    return replace(trace, meta=trace.meta | described)


def check_spread(shards: int, zero_stage: int) -> None:
    """Raises ``UsageError`` where a step cannot be spread so."""
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise UsageError(f"asked to spread a step over {shards!r} devices; give a whole number from 1 on")
    if isinstance(zero_stage, bool) or zero_stage not in STAGES:
        raise UsageError(f"asked to spread a step by stage {zero_stage!r} of ZeRO; give one of {', '.join(map(str, STAGES))}")


def optimizer_state_bytes(model: torch.nn.Module, optimizer: str | float | None) -> int:
    """What an optimizer keeps for the parameters that are trained. Units: bytes.

    Raises:
        UsageError: it is neither one of those known nor a number of bytes for each trained number.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None:
        return 0
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer] * sum(parameter.nbytes for parameter in trained)
    if isinstance(optimizer, (str, bool)) or not isinstance(optimizer, (int, float)) or not 0 <= optimizer < math.inf:
        raise UsageError(
            f"asked to count the state of the optimizer {optimizer!r}; give one of {', '.join(map(repr, OPTIMIZERS))}, or the bytes it keeps for "
            "each number that is trained, such as 12 for float32 copies and both moments"
        )
    return math.ceil(optimizer * sum(parameter.numel() for parameter in trained))


def _nothing_saved() -> UsageError:
    return UsageError("asked to profile a step, autograd saved nothing in it: there is nothing that could be recomputed")


def check_step(model: object, loss_fn: object) -> None:
    """Raises ``UsageError`` where these cannot be a step's."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"asked to run a step of a model, found {describe_type(model)}; give a torch.nn.Module")
    if not callable(loss_fn):
        raise UsageError(f"asked to run a step, found {describe_type(loss_fn)} in the place of loss_fn; give a function of (model, batch)")


def _recorded(model: torch.nn.Module, batch: Any, loss_fn: LossFn, before: StateSnapshot) -> Trace | None:
    """The step's trace, with the times of the passes after it: those that obey a plan which keeps all."""
    remat = Remat()
    with remat:
        run_step(model, batch, loss_fn)
    remat._session.complete()
    for _ in range(LEARNED_AFTER):
        before.restore(model)
        with remat:
            run_step(model, batch, loss_fn)
    return remat.trace


def solve(profile: Profile, *, budget: Budget, solver: str = "auto", offload: Offloading = None, compress: Compress = EXACT) -> Plan:
    """Makes a plan for a profiled step.

    ``offload``: as ``Remat`` takes it, and as the ``Remat`` that obeys the plan must be given it too; how fast it is, is measured now.
    ``compress``: as ``Remat`` takes it; the one that obeys the plan needs it no more.

    Raises:
        BudgetError: the budget is no budget, or more than the device has.
        InfeasibleBudget: no known plan fits; names the least budget and what holds it.
        UsageError: there is no such solver, or the profile is none, or ``offload`` is no place, or ``compress`` no way to.
        OffloadError: the folder cannot be used.
    """
    check_solver(solver)
    trace, asked = trace_of(profile), check_budget(budget)
    codecs = codec_channels(trace, asked, solver, check_compress(compress))
    return plan_for(trace, asked, solver, channels=(*channels_to(offload, trace), *codecs))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One plan of a frontier, by what is predicted of it. Units: bytes and ns of the whole step.

    ``bound_ns``: a proved lower bound on the time of any plan of at most this peak; ``overhead``: extra time as a ratio to the plain step.
    """

    peak_bytes: int
    time_ns: int
    bound_ns: int
    overhead: float
    _trace: Trace = field(repr=False)
    _channels: tuple[Channel, ...] = field(default=(), repr=False)

    @property
    def plan(self) -> Plan:
        """The plan itself, made when it is asked for."""
        return solve_trace(self._trace, self.peak_bytes, channels=self._channels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The least time that ``auto`` found for each peak, from the least peak worth its time to the plain step: peaks rise, times fall.

    ``alone``: the same without offloading, where there is a place to offload to.

    Example:
        >>> import torch, punar
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)])
        >>> frontier = punar.frontier(punar.profile(model, torch.ones(512, 64), lambda model, batch: model(batch).sum()))
        >>> frontier.points[-1].overhead
        0.0
        >>> frontier.at(frontier.points[0].peak_bytes) == frontier.points[0].plan
        True
    """

    profile: Profile
    points: tuple[FrontierPoint, ...]
    alone: Frontier | None = None
    _channels: tuple[Channel, ...] = field(default=(), repr=False)

    def at(self, budget: Budget) -> Plan:
        """The plan that ``punar.solve`` gives for a budget.

        Raises:
            BudgetError: the budget is no budget, or more than the device has.
            InfeasibleBudget: no known plan fits; names the least budget and what holds it.
        """
        return plan_for(self.profile.trace, check_budget(budget), channels=self._channels)

    def time_at(self, peak_bytes: int) -> int | None:
        """The least time known within a peak, in ns; None where no point is."""
        return min((point.time_ns for point in self.points if point.peak_bytes <= peak_bytes), default=None)

    def plot(self, target: Any) -> Any:
        """Draws the curve and the bound under it, with matplotlib; returns the axes.

        Args:
            target: the path of a file that ends in ``.png``, ``.svg`` or ``.pdf``, or axes of matplotlib's.

        Raises:
            UsageError: the target is neither.
            MissingDependency: matplotlib is not installed.
            PlanError: the file cannot be written.
        """
        plain_ns = max(self.profile.trace.plain_time_ns, 1)
        points = (CurvePoint(peak_bytes=p.peak_bytes, overhead=p.overhead, bound=p.bound_ns / plain_ns - 1) for p in self.points)
        return plot_curve(Curve(points=tuple(points), chosen=None, peers=()), target)

    def __str__(self) -> str:
        return format_columns(self._columns, self._rows())

    def _repr_html_(self) -> str:
        return html_table(f"Frontier, {self.profile.trace.device}", self._columns, self._rows(), left=0)

    @property
    def _columns(self) -> tuple[str, ...]:
        return _COLUMNS if self.alone is None else (*_COLUMNS, "without offloading")

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            (format_bytes(point.peak_bytes), format_seconds(point.time_ns), f"{point.overhead:.1%}", format_seconds(point.bound_ns))
            for point in self.points
        ]
        if self.alone is None:
            return rows
        times = [self.alone.time_at(point.peak_bytes) for point in self.points]
        beside = ["-" if ns is None else format_seconds(ns) for ns in times]
        return [(*row, text) for row, text in zip(rows, beside, strict=True)]


def frontier(profile: Profile, *, offload: Offloading = None, compress: Compress = EXACT) -> Frontier:
    """All that memory costs in time for a profiled step: the whole curve at once, as quick as one ``punar.solve``.

    Its plans take about one extra forward pass at most; a budget below its first point may still be met when ``at`` is asked.
    ``offload``, ``compress``: as ``Remat`` takes them; without the first, and with ``()`` for the second, the curve is that of recomputing alone.
    With the first, ``alone`` of what is returned is the curve without it.

    Raises:
        UsageError: this is no profile, or ``offload`` is no place, or ``compress`` no way to.
        OffloadError: the folder cannot be used.
    """
    trace = trace_of(profile)
    channels = (*channels_to(offload, trace), *codec_channels(trace, "min", "auto", check_compress(compress)))
    points = frontier_points(trace, channels)
    plain_ns = max(trace.plain_time_ns, 1)
    return Frontier(
        profile=profile,
        points=tuple(
            FrontierPoint(
                peak_bytes=p.peak_bytes,
                time_ns=p.time_ns,
                bound_ns=bound,
                overhead=p.time_ns / plain_ns - 1,
                _trace=trace,
                _channels=channels,
            )
            for p, bound in points
        ),
        alone=None if offload is None else frontier(profile, compress=compress),
        _channels=channels,
    )
