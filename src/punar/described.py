"""Profiles of steps on devices that are not here: their state, how it is spread, and times by their descriptions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from punar.arguments import LossFn
from punar.costs import Device, timed_on, with_scratch
from punar.errors import UsageError
from punar.ir import Trace
from punar.profiles import Profile
from punar.torch.fake import trace_fake
from punar.torch.sharding import STAGES, sharded, share

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""How many numbers of a parameter's dtype torch's optimizers keep for each of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What is resident beside a step that is traced without running, and over how many devices: as ``profile`` takes it."""

    optimizer: str | float | None = None
    shards: int = 1
    zero_stage: int = 3
    in_flight: int | None = None

    @property
    def is_gathered(self) -> bool:
        """Whether gradients are spread, and with them maybe parameters."""
        return self.shards > 1 and self.zero_stage > 1

    def check(self) -> None:
        """Raises ``UsageError`` where a step cannot be spread so."""
        if isinstance(self.shards, bool) or not isinstance(self.shards, int) or self.shards < 1:
            raise UsageError(f"asked to spread a step over {self.shards!r} devices; give a whole number from 1 on")
        if isinstance(self.zero_stage, bool) or self.zero_stage not in STAGES:
            raise UsageError(f"asked to spread a step by stage {self.zero_stage!r} of ZeRO; give one of {', '.join(map(str, STAGES))}")
        if self.in_flight is None:
            return
        if isinstance(self.in_flight, bool) or not isinstance(self.in_flight, int) or self.in_flight < 1:
            raise UsageError(f"asked for a stage with {self.in_flight!r} micro-batches in flight; give a whole number from 1 on")
        if self.is_gathered:
            raise UsageError(
                f"asked for a pipeline's stage by stage {self.zero_stage} of ZeRO, found gradients that are summed over "
                "devices after each of them; give zero_stage=1, as pipelines are trained"
            )


def profile_for(device: Device, model: torch.nn.Module, batch: Any, loss_fn: LossFn, spread: Spread) -> Profile:
    """The profile of a step on a described device; see ``punar.profile``.

    Raises:
        UsageError: the step cannot be spread so, or is none.
        DataDependentStep: its shapes or its path depend on data.
    """
    spread.check()
    return Profile(trace=described_by(device, trace_on(device, model, batch, loss_fn, spread), spread.shards))


def trace_on(
    device: Device, model: torch.nn.Module, batch: Any, loss_fn: LossFn, spread: Spread, *, is_accumulating: bool = False
) -> Trace:
    """The trace of a step as it would run on a device, with computed times.

    ``is_accumulating``: whether gradients of all trained parameters are there before, as they are in a pipeline's stage; else those that the model
    has now.

    Raises:
        UsageError, DataDependentStep: as ``punar.profile``.
    """
    is_accumulating |= spread.in_flight is not None
    step = trace_fake(
        model,
        batch,
        loss_fn,
        device=device.torch_name,
        optimizer_bytes=share(optimizer_state_bytes(model, spread.optimizer), spread.shards),
        has_gradients=not spread.is_gathered,
        is_accumulating=is_accumulating and not spread.is_gathered,
        in_flight=spread.in_flight or 1,
    )
    if step is None:
        raise nothing_saved()
    trace = step.trace
    if spread.is_gathered:
        trace = sharded(step, model, spread.shards, spread.zero_stage, is_accumulating=is_accumulating)
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


def nothing_saved() -> UsageError:
    """The error for a step that leaves nothing to plan."""
    return UsageError("asked to profile a step, autograd saved nothing in it: there is nothing that could be recomputed")
