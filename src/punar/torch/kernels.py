"""CUDA's choice of operators, for steps that are traced on the CPU's fake tensors.

Some functions of torch are computed by other operators on CUDA than on the CPU, with other saved tensors. While a step is traced
for CUDA, they are registered for fake tensors as what CUDA would run.

Source:
    The choices are those of torch's own composite functions: ``aten/src/ATen/native/transformers/attention.cpp`` and
    ``transformers/cuda/sdp_utils.cpp`` (attention) and ``Dropout.cpp`` (``is_fused_kernel_acceptable``), https://github.com/pytorch/pytorch.
    Deviations: ``torch.nn.RMSNorm`` and recurrent layers, which are kernels of their own on CUDA, are traced as the CPU runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from punar.torch.records import is_fake

_aten = torch.ops.aten

_HEAD_ALIGNMENT = 8
"""Flash attention's kernels take head sizes that are multiples of it; others are padded."""

_MOST_HEAD = 256
"""The largest head that flash attention's kernels take."""


@contextmanager
def cuda_kernels(*, is_asked: bool) -> Iterator[None]:
    """Within, where asked, fake tensors go through the operators that CUDA would run; other tensors as before."""
    if not is_asked:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in _KERNELS.items():
            library.impl(name, _for_fakes(getattr(_aten, name).default, kernel), "AutogradCPU")
        yield
    finally:
        library._destroy()


def _for_fakes(operator: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs) if is_fake(args[0]) else operator.decompose(*args, **kwargs)

    return call


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """A mask of bools, where the CPU has one of the input's dtype."""
    if train and 0 < p < 1 and input.numel():
        made: Tensor = torch.native_dropout(input, p, True)[0]
        return made
    return _aten.dropout.default.decompose(input, p, train)  # type: ignore[no-any-return]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention without a mask in half precision, the memory-efficient one otherwise, the formula where neither takes the input."""
    tensors = (query, key, value)
    if any(t.dim() != 4 or t.dtype not in (torch.float16, torch.bfloat16, torch.float32) for t in tensors):
        return _formula(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    own = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if attn_mask is None and query.dtype is not torch.float32 and max(query.shape[-1], value.shape[-1]) <= _MOST_HEAD:
        padded = [_padded(t) for t in tensors]
        made: Tensor = _aten._scaled_dot_product_flash_attention.default(*padded, dropout_p, is_causal, False, scale=own)[0]
        return made[..., : value.shape[-1]]
    if enable_gqa:
        return _formula(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    needs_logsumexp = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    bias = _bias(attn_mask, query, key)
    efficient = _aten._scaled_dot_product_efficient_attention.default
    return efficient(*tensors, bias, needs_logsumexp, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, **options: Any) -> Tensor:
    made: Tensor = _aten._scaled_dot_product_attention_math.default(query, key, value, mask, dropout_p, is_causal, None, **options)[0]
    return made


def _padded(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[-1] % _HEAD_ALIGNMENT
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """What a mask adds to the scores, expanded to their shape."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


_KERNELS: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
}
