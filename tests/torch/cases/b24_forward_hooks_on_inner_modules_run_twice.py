"""Forward hooks used to collect features fire again in the recompute.

Made after pytorch/pytorch#134310; pytorch/torchtitan#1114 (hook conflict note).
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.feats = []
        self.pre = 0
        for layer in self.layers:
            layer[0].register_forward_hook(lambda m, i, o: self.feats.append(o))
            layer[1].register_forward_pre_hook(lambda m, i: setattr(self, "pre", self.pre + 1))

    def forward(self, x):
        self.feats.clear()
        self.pre = 0
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + sum(f.abs().mean() for f in self.feats)


def make():
    return (Net(), torch.randn(4, 8), lambda m, b: m(b))


def extra_state(m, b):
    return {"n_feats": len(m.feats), "pre_hooks": m.pre}
