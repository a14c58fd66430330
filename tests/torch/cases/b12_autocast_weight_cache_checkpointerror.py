"""autocast keeps a process-wide weight-cast cache; a weight already cast outside the block is a hit in forward, a miss in recompute.

Made after pytorch/pytorch#141896.
"""

import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, shared, d):
        super().__init__()
        self.shared = shared
        self.own = nn.Linear(d, d)

    def forward(self, x):
        return torch.tanh(self.own(self.shared(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Block(self.shared, 16) for _ in range(2))

    def forward(self, x):
        x = self.shared(x)
        for layer in self.layers:
            x = layer(x)
        return x.float()


def loss_fn(m, b):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m(b)
    return y.square().mean()


def make():
    return (Net(), torch.randn(8, 16), loss_fn)
