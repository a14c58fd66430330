"""Weight is an int8 wrapper subclass that dequantises on use (float8/quantised/DTensor style).

Made after pytorch/ao#893, #3349; NVIDIA/TransformerEngine#1568; meta-pytorch/torchtune#2684.
"""

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map


class Q(torch.Tensor):
    @staticmethod
    def __new__(c, q, s):
        return torch.Tensor._make_wrapper_subclass(c, q.shape, dtype=torch.float32, requires_grad=False)

    def __init__(self, q, sc):
        self.q, self.s = (q, sc)

    def __tensor_flatten__(self):
        return (["q", "s"], None)

    @classmethod
    def __tensor_unflatten__(c, t, m, a, b):
        return c(t["q"], t["s"])

    @classmethod
    def __torch_dispatch__(c, f, types, args=(), kw=None):
        if f in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return c(args[0].q, args[0].s)
        if f is torch.ops.aten.t.default:
            return c(args[0].q.t(), args[0].s)

        def d(t):
            return t.q.float() * t.s if isinstance(t, Q) else t

        return f(*tree_map(d, args), **tree_map(d, kw or {}))


class QLin(nn.Module):
    def __init__(self, d):
        super().__init__()
        w = torch.randn(d, d) * 0.3
        sc = w.abs().max() / 127
        self.w = nn.Parameter(Q((w / sc).round().to(torch.int8), sc), requires_grad=False)
        self.A = nn.Parameter(torch.randn(d, 2) * 0.2)
        self.B = nn.Parameter(torch.randn(2, d) * 0.2)

    def forward(self, x):
        return torch.tanh(nn.functional.linear(x, self.w) + x @ self.A @ self.B)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(QLin(16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net(), torch.randn(8, 16, requires_grad=True), lambda m, b: m(b).square().mean())
