"""Wrapper modules leak into names, types and attribute access.

Made after pytorch/pytorch#117399, #80089; facebookresearch/d2go#578; pytorch/torchtitan#2622; mosaicml/composer#2745.
"""

import torch
import torch.nn as nn


class Blk(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.bn(self.l(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Blk() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net(), torch.randn(3, 4), lambda m, b: m(b).square().mean())
