"""Small models that several tests train."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 32


class Block(nn.Module):
    """A residual perceptron block with everything that makes recomputation worthwhile: norm, GELU, dropout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def make_blocks(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(count)))


def stepping(
    step: Callable[[nn.Module, Tensor], Tensor], make_model: Callable[[], nn.Module] = make_blocks, rows: int = 64, width: int = WIDTH
):
    """What ``harness.train`` takes: makes the model, the batch, and a step that zeroes gradients first."""

    def make() -> tuple[nn.Module, Callable[[], Tensor]]:
        model, x = make_model(), torch.randn(rows, width)

        def run() -> Tensor:
            model.zero_grad()
            return step(model, x)

        return model, run

    return make


def plain_step(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def second_order(model: nn.Module, x: Tensor) -> Tensor:
    """The gradients' squares are part of what is differentiated."""
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()
    return loss
