"""Unequal layers: which ones to recompute for a byte budget with least extra time?.

Made after pytorch/pytorch#194696, #32219; huggingface/transformers#26103 (#48200); discuss.huggingface.co/t/50203.
"""

import torch
import torch.nn as nn


class Wide(nn.Module):
    def __init__(self, d, k):
        super().__init__()
        self.a = nn.Linear(d, d * k)
        self.b = nn.Linear(d * k, d)

    def forward(self, x):
        return x + self.b(torch.nn.functional.gelu(self.a(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Wide(32, k) for k in (1, 16, 2, 8, 1, 4, 32, 1))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net(), torch.randn(128, 32), lambda m, b: m(b).square().mean())
