"""The verbs before training: profile a step, solve for a plan, explain it, see the frontier."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from punar.arguments import EXACT, Budget, Compress, LossFn, Offloading, check_budget, check_compress, check_solver, describe_type
from punar.costs import find_device
from punar.described import Spread, nothing_saved, profile_for
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
from punar.torch.session import LEARNED_AFTER
from punar.torch.state import StateSnapshot, restored, run_step
from punar.units import format_bytes, format_seconds

_COLUMNS = ("predicted peak", "predicted time", "extra", "no plan below")


def profile(
    model: torch.nn.Module,
    batch: Any,
    loss_fn: LossFn,
    *,
    device: str | Path | None = None,
    optimizer: str | float | None = None,
    shards: int = 1,
    zero_stage: int = 3,
    in_flight: int | None = None,
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
        in_flight: how many micro-batches the model, one stage of a pipeline, has run forward and not yet backward, where one forward and one backward
            pass take turns: of p stages, the first has p, the last 1. The step is then the forward passes of so many batches, and their backward
            passes in the same order, beside gradients of those before.

    Raises:
        UsageError: the loss is no scalar tensor, nothing requires a gradient, there is no such device, optimizer or stage, or one of ``optimizer``,
            ``shards``, ``zero_stage`` and ``in_flight`` was given without a device.
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
        spread = Spread(optimizer=optimizer, shards=shards, zero_stage=zero_stage, in_flight=in_flight)
        return profile_for(find_device(device), model, batch, loss_fn, spread)
    if optimizer is not None or (shards, zero_stage, in_flight) != (1, 3, None):
        raise UsageError(
            "asked to profile a step that runs here with `optimizer`, `shards`, `zero_stage` or `in_flight`, which are for steps that do not; "
            "give `device` too, or let the optimizer step once before: its state is then counted as it is"
        )
    with restored(model) as before:
        run_step(model, batch, loss_fn)
        before.restore(model)
        trace = _recorded(model, batch, loss_fn, before)
    if trace is None or not trace.saves:
        raise nothing_saved()
    return Profile(trace=trace)


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
