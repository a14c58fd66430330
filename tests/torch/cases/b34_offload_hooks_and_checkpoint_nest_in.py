"""save_on_cpu around / inside checkpoint: which tensors actually reach the offload hook?.

Made after pytorch/pytorch#84907, #147565; huggingface/accelerate#4175.
"""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(3))
        self.ck = None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.ck is None else checkpoint(layer, x, use_reentrant=self.ck)
        return x


def make():
    return (Net(), torch.randn(16, 32), lambda m, b: m(b).square().mean())
