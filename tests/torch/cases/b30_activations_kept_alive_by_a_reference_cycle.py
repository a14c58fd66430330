"""Reference cycle: the block's closure can reach the block's output; activations then wait for gc.

Made after pytorch/pytorch#84413, #154642, #80151.
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net(), torch.randn(4, 8), lambda m, b: m(b).square().mean())
