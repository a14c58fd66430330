"""Gives ``ctx.saved_tensors`` of custom functions back what saved-tensor hooks lose: the object's identity and attributes.

Autograd makes a new tensor of what an unpack hook returns wherever a gradient is required. A function that looks for
``weight.main_grad`` in its backward, as fused weight gradients do, would not find it. The getter of ``saved_tensors`` is therefore
wrapped; outside of steps under a budget it does what it did.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_local = threading.local()
_get: Any = torch._C._FunctionBase.saved_tensors.__get__  # type: ignore[attr-defined]


def note_unpacked(tensor: Tensor) -> None:
    """An unpack hook is about to return a tensor that has an identity or attributes of its own."""
    unpacked = getattr(_local, "unpacked", None)
    if unpacked is not None:
        unpacked.append(tensor)


def _saved_tensors(self: Any) -> tuple[Tensor | None, ...]:
    outer = getattr(_local, "unpacked", None)
    unpacked: list[Tensor] = []
    _local.unpacked = unpacked
    try:
        tensors: tuple[Tensor | None, ...] = _get(self)
    finally:
        _local.unpacked = outer
    if not unpacked:
        return tensors
    return tuple(t if t is None else _restore(t, unpacked) for t in tensors)


def _restore(tensor: Tensor, unpacked: list[Tensor]) -> Tensor:
    for original in unpacked:
        if tensor is original or not _reads_the_same(tensor, original):
            continue
        if original.requires_grad:
            return original
        tensor.__dict__.update(original.__dict__)
    return tensor


def _reads_the_same(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided or b.layout is not torch.strided or a.dtype != b.dtype:
        return False
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    return a.storage_offset() == b.storage_offset() and a.shape == b.shape and a.stride() == b.stride()


def install() -> None:
    """Wraps the getter; a second call changes nothing."""
    if "saved_tensors" not in BackwardCFunction.__dict__:
        BackwardCFunction.saved_tensors = property(_saved_tensors)  # type: ignore[assignment]
