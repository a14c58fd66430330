"""Are an operator's bytes and floating-point operations counted right? The oracle is torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import punar
from punar.costs import work_of
from punar.ir import Op, Trace

MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 4)), (6, 8)),
    "batched": (lambda: nn.Sequential(nn.Linear(8, 8, bias=False)), (3, 5, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, stride=2)), (2, 4, 9, 9)),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x * self.scale, x, x)


def traced(name: str) -> tuple[Trace, int]:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    profile = punar.profile(model, x, lambda model, x: model(x).square().mean())
    with FlopCounterMode(display=False) as counter:
        model(x).square().mean().backward()
    return profile.trace, counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_that_torch_counts(name: str) -> None:
    trace, counted = traced(name)
    found = sum(work_of(trace, op).flops for op in trace.ops)
    assert found == counted


def test_attention_makes_two_products_and_in_backward_five() -> None:
    query = torch.randn(2, 3, 7, 4)
    profile = punar.profile(Attention(), query, lambda model, x: model(x).sum())
    forward, backward = (work_of(profile.trace, op).flops for op in profile.trace.ops if op.kind == "attention")
    assert (forward, backward) == (4 * 2 * 3 * 7 * 7 * 4, 10 * 2 * 3 * 7 * 7 * 4)


def test_bytes_are_those_read_and_written() -> None:
    trace, _ = traced("linear")
    (gelu,) = [op for op in trace.ops if op.name == "aten.gelu.default"]
    assert work_of(trace, gelu).bytes == 2 * 6 * 24 * 4
    assert work_of(trace, gelu).flops == 0


@pytest.mark.parametrize("signature", ["aten.item.default()", "mystery", "aten.mm.default(jagged[3, j1])", "x.y.z(float32[4])"])
def test_a_signature_of_another_form_has_no_operations(signature: str) -> None:
    trace, _ = traced("linear")
    fields = {"id": 0, "kind": "matmul", "is_backward": False, "has_grad_mode": True, "module": "", "inputs": (), "outputs": ()}
    op = Op(name="aten.mm.default", signature=signature, time_ns=1, peak_bytes=0, is_replayable=True, **fields)
    assert work_of(trace, op).flops == 0
