"""Small trunk, big vocabulary: the loss head sets the peak and per-block checkpointing cannot move it.

Made after huggingface/trl#5575; NVIDIA-NeMo/Automodel#3907; NVIDIA-NeMo/labs-molt#121; linkedin/Liger-Kernel#533.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self, v=8000, d=32):
        super().__init__()
        self.e = nn.Embedding(v, d)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.GELU()) for _ in range(4))
        self.h = nn.Linear(d, v, bias=False)

    def forward(self, i):
        x = self.e(i)
        for layer in self.layers:
            x = x + layer(x)
        return self.h(x)


def make():
    return (Net(), torch.randint(0, 8000, (2, 64)), lambda m, b: F.cross_entropy(m(b).float().flatten(0, 1), b.flatten()))
