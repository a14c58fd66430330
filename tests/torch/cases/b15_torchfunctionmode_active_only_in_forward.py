"""TorchFunctionMode active in forward, not in backward.

Made after pytorch/pytorch#147995.
"""

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode


class Widen(TorchFunctionMode):
    def __torch_function__(self, f, types, args=(), kw=None):
        if f is torch.matmul:
            return torch.cat([f(args[0], args[1]), f(args[0], args[1])], -1)
        return f(*args, **kw or {})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 4) * 0.3)

    def forward(self, x):
        return torch.tanh(torch.matmul(x, self.w))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(m, b):
    with Widen():
        y = m(b)
    return y.square().sum()


def make():
    return (Net(), torch.randn(4, 8), loss_fn)
