"""What CUDA's attention allocates and frees inside one operator, where no allocator is there to tell.

Source:
    ``csrc/flash_attn/flash_api.cpp`` (``mha_bwd``) of Dao, 2023, FlashAttention-2, arXiv:2307.08691, as in torch: the gradient of the queries is
    accumulated in float32, with a number a row; where key heads are shared, gradients of keys and values are made for every query head first.
"""

from __future__ import annotations

import re
from dataclasses import replace

from punar.ir import Op, Trace

_FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward"
_TENSOR = re.compile(r"\b(b?float)(\d+)\[(\d+), (\d+), (\d+), (\d+)\]")
_ROWS = 128
"""Sequences are padded to a multiple of it."""


def with_scratch(trace: Trace) -> Trace:
    """The trace of a CUDA step with the scratch of its attention's backward on top of what operators make."""
    return replace(trace, ops=tuple(replace(op, peak_bytes=op.peak_bytes + scratch_bytes(op)) for op in trace.ops))


def scratch_bytes(op: Op) -> int:
    """What an operator needs for a moment besides its outputs; 0 where that is not known. Units: bytes.

    Shapes: queries [batch, heads, rows, size], keys [batch, key heads, key rows, size].
    """
    if _FLASH_BACKWARD not in op.name:
        return 0
    _, query, key, *_ = _TENSOR.findall(op.signature)
    batch, heads, rows, size = map(int, query[2:])
    key_heads, key_rows = int(key[3]), int(key[4])
    padded = -(-rows // _ROWS) * _ROWS
    grain = 32 if size <= 128 else 64
    accumulated = batch * heads * padded * (-(-size // grain) * grain + 1) * 4
    expanded = 2 * batch * key_rows * heads * size * int(key[1]) // 8 if key_heads != heads else 0
    return accumulated + expanded
