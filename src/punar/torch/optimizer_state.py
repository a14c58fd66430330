"""What an optimizer is going to keep, before it has stepped."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from punar.torch.operators import tensors_in


def bytes_to_come(optimizer: torch.optim.Optimizer) -> int | None:
    """How much state an optimizer makes in its first step, in bytes: what one like it makes for parameters that have no data.

    0 where it has some already; None where that cannot be told: it is no class of ``torch.optim``, or does not step without data.
    """
    if optimizer.state:
        return 0
    if not type(optimizer).__module__.startswith("torch.optim."):
        return None
    groups = [group | {"params": [_without_data(parameter) for parameter in group["params"]]} for group in optimizer.param_groups]
    twin = copy.copy(optimizer)
    try:
        twin.__setstate__({"defaults": optimizer.defaults, "state": type(optimizer.state)(dict), "param_groups": groups})
        with torch.no_grad():
            type(twin).step.__wrapped__(twin)  # type: ignore[attr-defined]  # without the hooks, the user's and ours
    except Exception:
        return None
    made = {tensor.data_ptr() or id(tensor): tensor for tensor in tensors_in(map(dict.values, twin.state.values()))}
    return sum(tensor.nbytes for tensor in made.values())


def _without_data(parameter: Tensor) -> Tensor:
    """A parameter on the meta device, with a gradient where the other one has one."""
    made = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        made.grad = torch.empty_like(parameter.grad, device="meta")
    return made
