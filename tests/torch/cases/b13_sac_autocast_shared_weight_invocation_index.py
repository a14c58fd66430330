"""Selective checkpointing (keep matmuls) of two regions sharing one weight under autocast.

Made after pytorch/pytorch#193338.
"""

import functools

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(16, 16)
        self.o = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.sac = False

    def reg(self, i, x):
        return torch.tanh(self.o[i](self.w(x)))

    def forward(self, x):
        for i in range(2):
            if self.sac:
                cf = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten._to_copy.default, torch.ops.aten.mm.default])
                x = checkpoint(self.reg, i, x, use_reentrant=False, context_fn=cf)
            else:
                x = self.reg(i, x)
        return x.float()


def loss_fn(m, b):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m(b)
    return y.square().mean()


def make():
    return (Net(), torch.randn(8, 16), loss_fn)
