"""Are operators' times on a described device the roofline's, in closed form?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import punar
from punar.costs import find_device, timed_on
from punar.ir import Op

H100 = find_device("h100-80gb")
FLOPS = 989_400_000_000_000 * 0.65
BANDWIDTH = 3_350_000_000_000 * 0.8
LAUNCH = 5000
ROWS, WIDE, DEEP = 4096, 8192, 2048


class Net(nn.Module):
    def __init__(self, run: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDE, DEEP, dtype=dtype))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.weight)


def time_of(name: str, run: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.bfloat16) -> int:
    """Nanoseconds of the first operator of this name in a step on an H100."""
    with torch.device("meta"):
        model, x = Net(run, dtype), torch.empty(ROWS, DEEP, dtype=dtype)
    trace = punar.profile(model, x, lambda model, x: model(x).sum(), device="h100-80gb").trace
    return next(op.time_ns for op in trace.ops if op.name == f"aten.{name}.default")


def test_a_product_is_bound_by_arithmetic() -> None:
    assert time_of("mm", F.linear) == LAUNCH + round(2 * ROWS * DEEP * WIDE / FLOPS * 1e9)


def test_a_product_in_float32_takes_that_rate() -> None:
    rate = 66_900_000_000_000 * 0.65
    assert time_of("mm", F.linear, torch.float32) == LAUNCH + round(2 * ROWS * DEEP * WIDE / rate * 1e9)


def test_a_product_with_one_row_is_bound_by_memory() -> None:
    moved = 2 * (DEEP + WIDE * DEEP + WIDE)
    assert time_of("mm", lambda x, w: F.linear(x[:1], w)) == LAUNCH + round(moved / BANDWIDTH * 1e9)


def test_an_elementwise_operator_reads_and_writes() -> None:
    assert time_of("exp", lambda x, w: w.exp() + x.sum()) == LAUNCH + round(2 * 2 * WIDE * DEEP / BANDWIDTH * 1e9)


def test_a_lookup_reads_only_what_it_writes() -> None:
    rows = torch.zeros(16, dtype=torch.int64)
    moved = 16 * 8 + 2 * 2 * 16 * DEEP
    assert time_of("embedding", lambda x, w: F.embedding(rows, w)) == LAUNCH + round(moved / BANDWIDTH * 1e9)


def test_views_take_no_time() -> None:
    assert time_of("t", lambda x, w: w.t().exp().sum() + x.sum()) == 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_in_flash(is_causal: bool) -> None:
    """Four operations for each pair of a query and a key and each number of a head; half of the pairs where the others are masked."""

    def attend(x: Tensor, w: Tensor) -> Tensor:
        heads = (x @ w.t()[:, :DEEP]).view(1, ROWS, 16, DEEP // 16).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=is_causal)

    pairs = ROWS * ROWS // (1 + is_causal)
    assert time_of("_scaled_dot_product_flash_attention", attend) == LAUNCH + round(4 * pairs * DEEP / FLOPS * 1e9)


@pytest.mark.parametrize("factor", [2, 10])
def test_a_device_so_much_faster_takes_so_much_less(factor: int) -> None:
    with torch.device("meta"):
        model, x = Net(F.linear, torch.bfloat16), torch.empty(ROWS, DEEP, dtype=torch.bfloat16)
    trace = punar.profile(model, x, lambda model, x: model(x).sum(), device="h100-80gb").trace
    faster = replace(
        H100,
        flops_per_second={dtype: factor * rate for dtype, rate in H100.flops_per_second.items()},
        memory_bytes_per_second=factor * H100.memory_bytes_per_second,
        launch_ns=0,
    )

    def is_timed(op: Op) -> bool:
        return op.kind not in ("view", "prelude")

    slow, fast = timed_on(trace, replace(H100, launch_ns=0)), timed_on(trace, faster)
    assert all(abs(a.time_ns - factor * b.time_ns) <= factor for a, b in zip(slow.ops, fast.ops, strict=True))
    assert all(op.time_ns >= LAUNCH for op in trace.ops if is_timed(op))
