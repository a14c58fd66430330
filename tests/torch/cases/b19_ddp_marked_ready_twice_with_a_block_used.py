"""DDP: one module checkpointed twice in a step (shared weights) with the reentrant engine.

Made after lucidrains/DALLE2-pytorch#225; microsoft/FocalNet#4; pytorch/pytorch#24005.
"""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self, mode=None):
        super().__init__()
        self.b = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.o = nn.Linear(8, 1)
        self.mode = mode

    def forward(self, x):
        for _ in range(2):
            x = self.b(x) if self.mode is None else checkpoint(self.b, x, use_reentrant=self.mode)
        return self.o(x)


class Wrap(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)


def make():
    return (Wrap(), torch.randn(4, 8), lambda m, b: m(b).square().mean())
