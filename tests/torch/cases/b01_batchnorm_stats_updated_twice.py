"""BatchNorm running statistics advanced once in forward and again in the recompute.

Made after pytorch/pytorch#96136.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, padding=1)
        self.bn = nn.BatchNorm2d(c)

    def forward(self, x):
        return x + F.relu(self.bn(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        for b in self.body:
            x = b(x)
        return self.head(x.mean((2, 3)))


def make():
    return (Net().train(), (torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])), lambda m, b: F.cross_entropy(m(b[0]), b[1]))


STEPS = 3
