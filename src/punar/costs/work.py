"""How much work an operator does: bytes moved and floating-point operations, from its signature and what it makes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from punar.ir import Op, Trace

_TENSOR = re.compile(r"\b(bool|u?int\d+|b?float\d+\w*|complex\d+)\[([\d, ]*)\]")

_SECOND = frozenset({"addmm", "baddbmm", "addbmm", "addmv"})
"""Products whose first argument is what they add to."""

_GATHERS = frozenset({"embedding", "index", "index_select", "gather"})
"""Operators that read of their first argument only what they write."""

_WANTED = re.compile(r"\[(True|False),(True|False),(True|False)\]\)")
"""Which gradients a convolution's backward is asked for: of the image, the weight, the bias."""

_CAUSAL = re.compile(r"\d\.\d+(e-\d+)?,True\b")
"""Attention's arguments: a probability of dropout, and that no query looks at later keys, for which kernels skip half of the pairs."""

_ATTENTION_BACKWARD = 2.5
"""The work of attention's backward relative to its forward: four products of the size of its two, and the scores again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one operator does. Units: bytes read and written, floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    itemsize: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


def work_of(trace: Trace, op: Op) -> Work:
    """Counts what an operator of a trace reads, writes and computes."""
    tensors = _tensors(op.signature)
    written = sum(trace.storages[trace.values[value].storage].bytes for value in op.outputs)
    read = sum(t.numel * t.itemsize for t in tensors)
    if tensors and _base_of(op) in _GATHERS:
        read = sum(t.numel * t.itemsize for t in tensors[1:]) + written
    return Work(bytes=read + written, flops=_flops(op, tensors, written))


def _base_of(op: Op) -> str:
    """An operator's name without namespace and overload."""
    return op.name.split(".")[1] if "." in op.name else op.name


@lru_cache(maxsize=1 << 14)
def _tensors(signature: str) -> tuple[_Tensor, ...]:
    return tuple(_Tensor(_sizes(sizes), _itemsize(dtype)) for dtype, sizes in _TENSOR.findall(signature))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size.strip())


def _itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(int(bits.group()) // 8, 1) if bits else 1


def _flops(op: Op, tensors: Sequence[_Tensor], written_bytes: int) -> int:
    """Multiplications and additions of a product; 0 for operators that are bound by memory, and for forms not known here."""
    base = _base_of(op)
    is_backward = "backward" in base
    match op.kind, tensors[1 if base in _SECOND or (is_backward and op.kind == "attention") else 0 :]:
        case "matmul", (left, right, *_) if right.shape:
            return 2 * left.numel * (right.shape[-1] if len(right.shape) > 1 else 1)
        case "convolution", (image, other, *more):
            weight, made = (more[0], image.numel) if is_backward and more else (other, written_bytes // max(image.itemsize, 1))
            return 2 * made * prod(weight.shape[1:]) * (_gradients(op.signature) if is_backward else 1)
        case "attention", (query, key, *_) if len(key.shape) > 1:
            products = _ATTENTION_BACKWARD if is_backward else 1
            return int(4 * query.numel * key.shape[-2] * products * (0.5 if _CAUSAL.search(op.signature) else 1))
    return 0


def _gradients(signature: str) -> int:
    """How many of its two products a convolution's backward makes."""
    wanted = _WANTED.search(signature)
    return wanted.groups()[:2].count("True") if wanted else 2
