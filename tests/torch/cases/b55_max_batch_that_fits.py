"""Largest batch that fits: probing by OOM gives wrong answers (last doubling untested, leftovers, dataset smaller than batch).

Made after Lightning-AI/pytorch-lightning#9625, #8028, #20231, #3259; orobix/quadra#118.
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def make_batch(n):
    return torch.randn(n, 32)


def make():
    return (Net(), make_batch(8), lambda m, b: m(b).square().mean())
