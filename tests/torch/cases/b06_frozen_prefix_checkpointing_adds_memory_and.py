"""Only the last layers train; per-block checkpointing of the frozen prefix holds inputs autograd would have dropped.

Made after huggingface/transformers#19340.
"""

import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(d, d), nn.ReLU())

    def forward(self, x):
        return self.f(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(64) for _ in range(10))
        for layer in self.layers[:8]:
            layer.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net(), torch.randn(512, 64), lambda m, b: m(b).square().mean())
