"""Block returns a dataclass (HF ModelOutput style).

Made after pytorch/pytorch#124725.
"""

import dataclasses

import torch
import torch.nn as nn


@dataclasses.dataclass
class Out:
    h: torch.Tensor
    aux: torch.Tensor | None = None
    tag: str = "x"


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.l = nn.Linear(d, d)

    def forward(self, x):
        y = torch.tanh(self.l(x))
        return Out(h=y, aux=y.pow(2).mean())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x):
        aux = 0.0
        for layer in self.layers:
            o = layer(x)
            assert isinstance(o, Out)
            x = o.h
            aux = aux + o.aux
        return x.sum() + aux


def make():
    return (Net(), torch.randn(4, 8), lambda m, b: m(b))
