"""Stochastic depth drawing from a private torch.Generator, not the global one.

Made after pytorch/pytorch#25104 (see also #127676, same effect for MPS RNG).
"""

import torch
import torch.nn as nn


class Noisy(nn.Module):
    def __init__(self, d, gen):
        super().__init__()
        self.lin = nn.Linear(d, d)
        self.gen = [gen]

    def forward(self, x):
        keep = (torch.rand(x.shape, generator=self.gen[0]) > 0.4).to(x.dtype)
        return x + torch.tanh(self.lin(x)) * keep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator()
        g.manual_seed(11)
        self.g = [g]
        self.layers = nn.ModuleList(Noisy(12, g) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net(), torch.randn(6, 12), lambda m, b: m(b).square().sum())


def extra_state(m, b):
    return {"gen_state_hash": hash(m.g[0].get_state().numpy().tobytes())}
