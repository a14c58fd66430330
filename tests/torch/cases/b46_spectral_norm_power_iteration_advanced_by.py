"""spectral_norm advances its power iteration at every forward, also at the replayed one.

Made after pytorch/pytorch#62293, #13350.
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        S = torch.nn.utils.parametrizations.spectral_norm
        self.layers = nn.ModuleList(nn.Sequential(S(nn.Linear(12, 12)), nn.LeakyReLU(0.1)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net().train(), torch.randn(8, 12), lambda m, b: m(b).square().mean())
