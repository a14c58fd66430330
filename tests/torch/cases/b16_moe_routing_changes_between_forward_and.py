"""MoE router whose load-balancing bias moves during forward: the recompute routes differently.

Made after pytorch/torchtitan#1117; NVIDIA-NeMo/Automodel#2635.
"""

import torch
import torch.nn as nn


class MoE(nn.Module):
    def __init__(self, d, e=4):
        super().__init__()
        self.gate = nn.Linear(d, e, bias=False)
        self.ex = nn.ModuleList(nn.Linear(d, d) for _ in range(e))
        self.register_buffer("bias", torch.zeros(e))

    def forward(self, x):
        sc = self.gate(x).softmax(-1)
        idx = (sc.detach() + self.bias).argmax(-1)
        out = torch.zeros_like(x)
        for e, ex in enumerate(self.ex):
            w = (idx == e).nonzero().flatten()
            if len(w):
                out = out.index_add(0, w, torch.tanh(ex(x[w])) * sc[w, e : e + 1])
        with torch.no_grad():
            self.bias -= 0.5 * (torch.bincount(idx, minlength=len(self.ex)) / len(idx) - 1 / len(self.ex))
        return x + out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MoE(8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net().train(), torch.randn(32, 8), lambda m, b: m(b).square().mean())
