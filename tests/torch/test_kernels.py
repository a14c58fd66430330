"""Does a step traced for CUDA keep what CUDA's operators keep? The oracle is the closed form of the literature, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import punar
from punar.ir import Trace
from punar.plan import simulate

BATCH, ROWS, WIDTH, HEADS = 2, 256, 128, 4


class Block(nn.Module):
    """A layer of the paper's: dropout after both halves, biases everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](x)).view(BATCH, ROWS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(heads))
        return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh")))


def traced(model: nn.Module, batch: Tensor) -> Trace:
    return punar.profile(model, batch, lambda model, batch: model(batch).float().sum(), device="a100-80gb").trace


def kept_bytes(layers: int) -> int:
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(layers))).to(torch.bfloat16)
        trace = traced(model, torch.empty(BATCH, ROWS, WIDTH, dtype=torch.bfloat16))
    return simulate(trace, (0,) * len(trace.values)).kept_bytes


def test_a_layer_keeps_what_the_paper_counts() -> None:
    """Korthikanti et al., 2022, Reducing activation recomputation in large transformer models, arXiv:2205.05198, equation 1: 34 bytes for each number of the
    layer's input, without the 5 of each pair of rows that flash attention does not keep; besides them a number a row and head of attention and two a row of each
    norm, which the paper leaves out. (Norms' are in bfloat16, as on a CPU; CUDA's are in float32.)"""
    paper = 34 * BATCH * ROWS * WIDTH
    left_out = BATCH * ROWS * (4 * HEADS + 2 * 2 * 2)
    random_state = 512 * 2  # a seed and an offset of attention's dropout, each an allocation
    assert kept_bytes(3) - kept_bytes(2) == paper + left_out + random_state


def test_dropout_keeps_a_byte_for_each_number() -> None:
    trace = traced(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), torch.empty(32, 64))
    made = next(op for op in trace.ops if op.name == "aten.native_dropout.default")
    assert [trace.storages[trace.values[v].storage].bytes for v in made.outputs] == [32 * 64 * 4, 32 * 64]


@pytest.mark.parametrize(
    ("dtype", "has_mask", "operator"),
    [
        (torch.bfloat16, False, "_scaled_dot_product_flash_attention"),
        (torch.float16, False, "_scaled_dot_product_flash_attention"),
        (torch.float32, False, "_scaled_dot_product_efficient_attention"),
        (torch.bfloat16, True, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_attention_is_the_kernel_that_takes_the_input(dtype: torch.dtype, has_mask: bool, operator: str) -> None:
    class Attention(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            heads = super().forward(x).view(2, 16, 4, 16).transpose(1, 2)
            mask = torch.ones(16, 16, dtype=torch.bool).tril() if has_mask else None
            return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)

    trace = traced(Attention(64, 64, dtype=dtype), torch.empty(2, 16, 64, dtype=dtype))
    names = {op.name for op in trace.ops}
    assert {f"aten.{operator}.default", f"aten.{operator}_backward.default"} <= names


def test_flash_attention_s_backward_needs_room() -> None:
    """The gradient of the queries in float32, padded to 128 rows and 32 numbers, and a number a row; with shared keys their gradients for every head."""
    heads, shared, rows, size = 8, 2, 200, 48

    class Attention(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x).view(1, rows, heads, size).transpose(1, 2)
            return F.scaled_dot_product_attention(made, made[:, :shared], made[:, :shared], enable_gqa=True)

    width = heads * size
    trace = traced(Attention(width, width, dtype=torch.bfloat16), torch.empty(1, rows, width, dtype=torch.bfloat16))
    backward = next(op for op in trace.ops if "flash_attention_backward" in op.name)
    made = sum(trace.storages[trace.values[v].storage].bytes for v in backward.outputs)
    assert backward.peak_bytes - made == 4 * heads * 256 * (64 + 1) + 2 * 2 * heads * rows * size


def test_other_tensors_go_their_own_way_meanwhile() -> None:
    """What is no fake tensor, such as a constant that the model computes from, is computed as ever."""

    class Constant(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            constant = F.dropout(torch.ones(4), 0.0)
            return super().forward(x) * constant.sum()

    assert traced(Constant(8, 8), torch.empty(4, 8)).saves
