"""Pinned host memory is its own budget (WSL caps it; the caching host allocator rounds to powers of two).

Made after unslothai/unsloth#338, #1744 (unslothai/unsloth-zoo#1257); pytorch/pytorch#95823, #86097, #186161.
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.GELU()) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net(), torch.randn(33, 48), lambda m, b: m(b).square().mean())
