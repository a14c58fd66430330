"""LoRA on a frozen backbone: no block input requires grad, so reentrant checkpointing cuts the graph.

Made after huggingface/transformers#23170, #21381; huggingface/peft#1142; locuslab/open-unlearning#178.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, d, r=2):
        super().__init__()
        self.base = nn.Linear(d, d)
        self.base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(r, d) * 0.1)
        self.B = nn.Parameter(torch.randn(d, r) * 0.1)

    def forward(self, x):
        return self.base(x) + x @ self.A.t() @ self.B.t()


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up = LoRALinear(d)
        self.down = LoRALinear(d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, v=50, d=16):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.emb.requires_grad_(False)
        self.layers = nn.ModuleList(Block(d) for _ in range(3))
        self.head = nn.Linear(d, v)
        self.head.requires_grad_(False)

    def forward(self, i):
        x = self.emb(i)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make():
    return (Net(), torch.randint(0, 50, (2, 7)), lambda m, b: F.cross_entropy(m(b).flatten(0, 1), b.flatten()))
