"""Planning under meta/fake tensors: checkpoint itself must not need a real device.

Made after pytorch/pytorch#133550.
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net(), torch.randn(3, 8), lambda m, b: m(b).square().mean())
