"""Thousands of small recomputed regions feeding one reduction.

Made after pytorch/pytorch#6959.
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, xs):
        return torch.stack([self.net(x) for x in xs]).mean()


def make():
    return (Net(), list(torch.randn(1500, 1, 4)), lambda m, b: m(b))
