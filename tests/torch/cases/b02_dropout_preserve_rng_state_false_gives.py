"""Dropout under checkpoint when the integrator turned preserve_rng_state off for speed.

Made after allenai/OLMo-core#828.
"""

import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Dropout(0.3), nn.Linear(d, d), nn.Dropout(0.3))

    def forward(self, x):
        return x + self.f(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net().train(), torch.randn(8, 16), lambda m, b: m(b).square().mean())
