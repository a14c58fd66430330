"""1F1B pipeline: stage i holds (S - i) micro-batches at once, so stages need different plans.

Made after NVIDIA-NeMo/Megatron-Bridge#5077; sail-sg/zero-bubble-pipeline-parallelism#8; NVIDIA-NeMo/Speech#4813; IEIT-Yuan/Yuan-2.0#18.
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net().train(), [torch.randn(8, 32) for _ in range(4)], lambda m, b: m(b[0]).square().mean())


def step(m, b, lf):
    m.zero_grad()
    L = [m(x).square().mean() for x in b]
    for layer in L:
        layer.backward()
    return sum(layer.detach() for layer in L)
