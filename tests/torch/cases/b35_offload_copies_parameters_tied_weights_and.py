"""A naive saved-tensor offloader also ships weights, and a tied weight several times.

Made after huggingface/trl#4247; meta-llama/llama-cookbook#115; meta-pytorch/torchtune#1847.
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, v=400, d=64):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.layers = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(3))
        self.q = nn.Linear(d, d)
        self.k = nn.Linear(d, d)
        self.v = nn.Linear(d, d)

    def forward(self, i):
        x = self.emb(i)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        a = self.q(x) * self.k(x) + self.v(x)
        return a @ self.emb.weight.t() + a * 0.5 @ self.emb.weight.t()


def make():
    return (Net(), torch.randint(0, 400, (2, 16)), lambda m, b: m(b).logsumexp(-1).mean())
