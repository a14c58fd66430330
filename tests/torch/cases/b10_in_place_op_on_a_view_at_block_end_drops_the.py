"""Block whose output is an in-place-modified view (InstanceNorm + inplace ReLU).

Made after pytorch/pytorch#26546, #36383.
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.InstanceNorm1d(4), nn.ReLU(inplace=True)) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net(), torch.randn(2, 4, 9).requires_grad_(), lambda m, b: m(b).norm())


def extra_state(m, b):
    return {"x_has_grad": b.grad is not None}
