"""Forward without backward in between (eval step, skipped micro-batch, early return) and gradient accumulation with different s..

Made after deepspeedai/DeepSpeed#3005; meta-pytorch/torchtune#2709.
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net(), [torch.randn(n, 8) for n in (4, 7, 1, 5)], lambda m, b: m(b[0]).square().mean())


def step(m, b, lf):
    m.zero_grad()
    m(b[1])
    with torch.no_grad():
        m(b[2])
    t = 0.0
    for x in b:
        layer = m(x).square().sum() / 4
        layer.backward()
        t = t + layer.detach()
    return t
