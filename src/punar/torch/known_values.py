"""Keeps the numbers of small tensors of integers while a step runs on fake tensors.

Models look at positions, masks and lengths to decide on their path: "is any of these padded?". Such tensors are made from shapes and from the
batch's integers, with no weight involved, and are small. They are computed for real beside the fake ones, so that the path is the real step's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from punar.torch.operators import operator_info, outputs_in, tensors_in
from punar.torch.records import is_fake

MOST_ELEMENTS = 1 << 20
"""Tensors with more elements are not computed."""


class KnownValues(TorchDispatchMode):
    """Lies between whoever watches the step and the mode that runs it on fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper it asks for costs microseconds an operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = tensors_in((*args, *kwargs.values()))
        info = operator_info(func)
        if func is torch.ops.aten._local_scalar_dense.default and (number := value_of(args[0])) is not None:
            with torch._C._DisableTorchDispatch():
                return number.item()
        out = func(*args, **kwargs)
        if info.can_write:
            for tensor in info.written(args, kwargs):
                tensor.untyped_storage()._punar_is_changed = True  # type: ignore[attr-defined]
            return out
        made = outputs_in(out)
        if made and info.is_replayable and not info.is_random and not info.is_uninitialized and all(map(_is_small, made)):
            _compute(func, args, kwargs, read, made)
        return out


def know(fake: Tensor, value: Tensor) -> None:
    """Remembers what a fake tensor's elements are, where that is worth it."""
    if _is_small(fake) and not is_fake(value) and value.device.type != "meta":
        fake._punar_value = value.detach()  # type: ignore[attr-defined]


def value_of(tensor: Tensor) -> Tensor | None:
    """The elements of a fake tensor, None where they are not known."""
    if not is_fake(tensor):
        return tensor
    if tensor.layout is not torch.strided or getattr(tensor.untyped_storage(), "_punar_is_changed", False):
        return None
    known: Tensor | None = getattr(tensor, "_punar_value", None)
    return known


def _is_small(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.numel() <= MOST_ELEMENTS


def _compute(func: Any, args: Any, kwargs: dict[str, Any], read: list[Tensor], made: list[Tensor]) -> None:
    """Runs the operator on the elements, where those of all it reads are known."""
    values = {id(tensor): value_of(tensor) for tensor in read}
    if any(value is None for value in values.values()):
        return
    args, kwargs = tree_map_only(Tensor, lambda tensor: values[id(tensor)], (args, kwargs))
    with torch._C._DisableTorchDispatch():
        out = func(*args, **kwargs)
    for fake, value in zip(made, outputs_in(out), strict=True):
        fake._punar_value = value  # type: ignore[attr-defined]
