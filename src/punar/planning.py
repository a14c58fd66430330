"""From a recorded step and what a user asks for to a plan: budgets in bytes, the devices that they are for, and what errors say of them."""

from __future__ import annotations

import os

import torch

from punar.arguments import Budget, Offloading, check_offload
from punar.errors import BudgetError, InfeasibleBudget
from punar.ir import Trace
from punar.plan import Plan, plain_plan, simulate
from punar.plan.codecs import codec_of
from punar.plan.moves import Channel
from punar.plan.plan import moved
from punar.solvers import codable, holder_lines, holders_at_peak, least
from punar.solvers import solve as solve_trace
from punar.torch.codecs import measured
from punar.torch.places import described_channels, opened, physical_bytes
from punar.units import format_apart, format_bytes

_AUTO_MARGIN = 0.9
"""The share of the device's free memory that ``"auto"`` uses: the rest is for what the allocator loses and others take."""


def plan_for(trace: Trace, budget: Budget, solver: str = "auto", extra_bytes: int = 0, channels: tuple[Channel, ...] = ()) -> Plan:
    """Turns a budget into bytes and has a solver make the plan; ``"min"`` and None need no solver.

    ``extra_bytes`` are resident now beyond those of the trace: they come off the budget. ``channels``: where values may be offloaded to.
    """
    if budget == "min":
        return moved(least(trace, channels), extra_bytes)
    if budget is None:
        return moved(plain_plan(trace), extra_bytes)
    plain = simulate(trace, (0,) * len(trace.values))
    budget_bytes = budget_in_bytes(trace, budget, plain.peak_bytes, extra_bytes)
    try:
        return moved(solve_trace(trace, budget_bytes - extra_bytes, solver, channels), extra_bytes)
    except InfeasibleBudget as error:
        beside = error if error.moved is None else error.moved(extra_bytes)
        raise InfeasibleBudget(
            f"{beside} {resident_text(trace, extra_bytes)} What would lower it, `explain()` of the Remat or of the profile says.",
            budget_bytes=budget_bytes,
            least_bytes=error.least_bytes + extra_bytes,
            holders=error.holders,
        ) from error


def resident_text(trace: Trace, extra_bytes: int) -> str:
    """Says what no plan can change."""
    gradients = int(trace.meta.get("gradient_bytes", 0))
    optimizer = int(trace.meta.get("optimizer_bytes", 0)) + extra_bytes
    resident = trace.resident_bytes + extra_bytes
    return (
        f"Whatever the plan, {format_bytes(resident)} are resident: optimizer state and room for what varies {format_bytes(optimizer)}, "
        f"gradients from before {format_bytes(gradients)}, parameters, buffers, batch and the rest {format_bytes(resident - optimizer - gradients)}."
    )


def held_text(trace: Trace, plan: Plan, why: str) -> str:
    """Says why a step is not repeated, and what holds its memory under the tightest plan."""
    return "\n".join(
        [
            f"{why}, of {format_bytes(plan.peak_bytes)} predicted. At its peak are alive:",
            *holder_lines(holders_at_peak(trace, plan)),
            f"{resident_text(trace, max(0, plan.resident_bytes - trace.resident_bytes))} Make the batch smaller.",
        ]
    )


def budget_in_bytes(trace: Trace, budget: str | int | float, plain_peak_bytes: int, extra_bytes: int = 0) -> int:
    """A budget as bytes of the whole step.

    Raises:
        BudgetError: it is more than the device has, or ``"auto"`` for a step that was recorded on another machine.
    """
    if isinstance(budget, float):
        return trace.resident_bytes + extra_bytes + int(budget * (plain_peak_bytes - trace.resident_bytes))
    memory_bytes, name = _memory_of(trace)
    if budget == "auto":
        if memory_bytes is not None:
            return int(memory_bytes * _AUTO_MARGIN)
        if not has_device(trace.device):
            raise BudgetError(
                f'budget "auto" is what the device has free; the step was recorded on {trace.device}, which this machine has not: '
                'give bytes such as "6 GiB" or a fraction such as 0.4'
            )
        return free_budget(trace.device, trace.resident_bytes + extra_bytes)
    assert isinstance(budget, int)
    if memory_bytes is None and has_device(trace.device):
        memory_bytes = device_memory(trace.device)[0]
    if memory_bytes is not None and budget > memory_bytes:
        asked, there = format_apart(budget, memory_bytes)
        raise BudgetError(f"budget {asked} is above what {name} has, {there}; give at most that")
    return budget


def free_budget(device: str, used_bytes: int) -> int:
    """What ``"auto"`` stands for on a device that is here, where so many bytes of the step are in use already."""
    return int((device_memory(device)[1] + used_bytes) * _AUTO_MARGIN)


def _memory_of(trace: Trace) -> tuple[int | None, str]:
    """The memory of the device that a step was traced for without being there, None for other steps; with the device's name."""
    described = trace.meta.get("described_device")
    return (None, trace.device) if described is None else (int(trace.meta["memory_bytes"]), described)


def is_here(trace: Trace) -> bool:
    """Whether a step was recorded on a device that this machine has."""
    return "described_device" not in trace.meta and has_device(trace.device)


def has_device(name: str) -> bool:
    """Whether this machine has a device of this name: a profile may come from another one."""
    try:
        kind = torch.device(name)
    except RuntimeError:
        return False
    return kind.type != "cuda" or (torch.cuda.is_available() and (kind.index or 0) < torch.cuda.device_count())


def device_memory(device: str) -> tuple[int, int]:
    """Bytes that a device has in all, and free now."""
    kind = torch.device(device)
    if kind.type == "cuda":
        free, total = torch.cuda.mem_get_info(kind)
        cached = torch.cuda.memory_reserved(kind) - torch.cuda.memory_allocated(kind)
        return total, free + cached
    return physical_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def codec_channels(trace: Trace, budget: Budget, solver: str, compress: tuple[str, ...]) -> tuple[Channel, ...]:
    """The codecs that a plan for a step could use, as fast as they are on its device; none for a device that is not here, and none that no value can go through."""
    if solver != "auto" or budget is None or not is_here(trace):
        return ()
    device = torch.device(trace.device)
    return tuple(measured(*known, device) for name in codable(trace, compress) if (known := codec_of(name)) is not None)


def channels_to(offload: Offloading, trace: Trace) -> tuple[Channel, ...]:
    """How fast a place to offload to is: measured now, or as the step's device is described."""
    places, device = check_offload(offload), trace.device
    if places and "described_device" in trace.meta:
        return described_channels(places, device, trace.meta)
    place = opened(places, device)
    if place is None:
        return ()
    place.close()
    return place.channels
