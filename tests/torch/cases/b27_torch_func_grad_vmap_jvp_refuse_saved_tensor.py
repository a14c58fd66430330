"""torch.func.grad / vmap per-sample gradients over a model with recompute inside.

Made after pytorch/pytorch#122729, #146036, #141845, #165880.
"""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.ck = False

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.ck else layer(x)
        return x


def make():
    return (Net(), torch.randn(5, 6), lambda m, b: m(b).square().mean())
