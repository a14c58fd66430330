"""Usage counter / logged aux-loss accumulated by a checkpointed MoE layer.

Made after NVIDIA/Megatron-LM#1330; pytorch/torchtitan#1593, #3686, #4772.
"""

import torch
import torch.nn as nn


class Layer(nn.Module):
    def __init__(self, d, e=4):
        super().__init__()
        self.gate = nn.Linear(d, e)
        self.f = nn.Linear(d, d)
        self.register_buffer("tokens", torch.zeros(e))
        self.calls = 0
        self.log = []

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        self.calls += 1
        with torch.no_grad():
            self.tokens.add_(torch.bincount(p.argmax(-1), minlength=4).float())
            self.log.append(float(p.var()))
        return x + torch.relu(self.f(x)) * p.max(-1, keepdim=True).values


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net(), torch.randn(16, 8), lambda m, b: m(b).square().mean())


def extra_state(m, b):
    return {"calls": [layer.calls for layer in m.layers], "log": [len(layer.log) for layer in m.layers]}
