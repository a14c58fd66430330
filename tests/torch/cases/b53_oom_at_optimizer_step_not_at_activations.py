"""Parameters dominate: Adam state on the first step() is what runs out, not activations.

Made after pytorch/pytorch#9439; roboflow/rf-detr#1342; NVIDIA/Megatron-LM#4638.
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, d=256):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.ReLU()) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net(), torch.randn(4, 256), lambda m, b: m(b).square().mean())


def step(m, b, lf):
    o = torch.optim.Adam(m.parameters())
    layer = lf(m, b)
    layer.backward()
    o.step()
    m._o = o
    return layer.detach()


STEPS = 1
