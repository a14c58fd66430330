"""Does a trace know which line of the model called an operator, and whose backward an operator is?"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import punar
from punar.ir import Trace


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * gradient * x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).sigmoid()  # the sigmoid's line
        return self.last(Square.apply(hidden))


def trace() -> Trace:
    return punar.profile(Model(), torch.randn(8, 16), lambda model, batch: model(batch).square().mean()).trace


def test_forward_operators_know_their_line() -> None:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(place for place, text in enumerate(lines, 1) if text.endswith("# the sigmoid's line"))
    sources = {op.name: op.source for op in trace().forward_ops}
    assert sources["aten.sigmoid.default"] == f"tests/torch/test_origins.py:{line}"


def test_backward_operators_know_whose_they_are() -> None:
    ops = trace().ops
    pairs = {(op.name, ops[op.forward].name, ops[op.forward].module) for op in ops if op.forward >= 0}
    assert ("aten.sigmoid_backward.default", "aten.sigmoid.default", "Model") in pairs
    assert ("aten.mul.Tensor", "aten.mul.Tensor", "Model") in pairs  # of the custom function
    assert {module for name, _, module in pairs if name == "aten.mm.default"} == {"Model.first", "Model.last"}


def test_what_a_trace_file_says_of_origins_is_kept() -> None:
    recorded = trace()
    assert Trace.from_json(recorded.to_json()) == recorded
