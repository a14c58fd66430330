"""Complex (FFT) and sparse (graph adjacency) tensors saved for backward.

Made after (kind asked for; no single public thread found, offloaders' empty()+copy_() pattern as in pytorch save_on_cpu).
"""

import torch
import torch.nn as nn


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Parameter(torch.randn(d // 2 + 1, dtype=torch.cfloat) * 0.3)
        self.l = nn.Linear(d, d)

    def forward(self, x, adj):
        y = torch.fft.irfft(torch.fft.rfft(x) * self.f, n=x.shape[-1])
        return torch.tanh(self.l(torch.sparse.mm(adj, y)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(8) for _ in range(2))
        self.e = nn.Parameter(torch.rand(6))

    def forward(self, x):
        i = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])
        adj = torch.sparse_coo_tensor(i, self.e, (5, 5))
        for layer in self.layers:
            x = layer(x, adj)
        return x


def make():
    return (Net(), torch.randn(5, 8), lambda m, b: m(b).square().mean())
