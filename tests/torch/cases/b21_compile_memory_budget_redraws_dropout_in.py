"""torch.compile with activation_memory_budget < 1 on a model with dropout.

Made after pytorch/pytorch#190758, #190717.
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.Dropout(0.5), nn.GELU()) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net().train(), torch.randn(32, 64), lambda m, b: m(b).square().sum())
