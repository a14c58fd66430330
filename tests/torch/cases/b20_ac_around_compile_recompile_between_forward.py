"""A compiled helper inside checkpointed blocks: after a shape-driven recompile the replay may pick another cache entry.

Made after pytorch/pytorch#166926; unslothai/unsloth-zoo#1001.
"""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a = nn.Linear(d, d)
        self.b = nn.Linear(d, d)
        self.h = self.helper

    def helper(self, x):
        return torch.relu(self.b(torch.sin(x) * x.shape[0]))

    def forward(self, x):
        return x + self.h(torch.tanh(self.a(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(2))
        self.ck = False

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i:
                x = x[: len(x) - 3]
            x = checkpoint(layer, x, use_reentrant=False) if self.ck else layer(x)
        return x


def make():
    return (Net(), torch.randn(9, 8), lambda m, b: m(b).square().mean())
