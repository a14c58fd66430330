"""U-Net: encoder outputs stay alive through the skips, so the saving differs per level.

Made after cybertronai/gradient-checkpointing#11; Project-MONAI/MONAI#8554; m2lines/Samudra#243.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.SiLU(), nn.Conv2d(o, o, 3, padding=1), nn.SiLU())


class Net(nn.Module):
    def __init__(self, c=4):
        super().__init__()
        self.down = nn.ModuleList([conv(3, c), conv(c, 2 * c), conv(2 * c, 4 * c)])
        self.up = nn.ModuleList([conv(6 * c, 2 * c), conv(3 * c, c)])
        self.o = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        k = []
        for i, d in enumerate(self.down):
            x = d(x if i == 0 else F.avg_pool2d(x, 2))
            k.append(x)
        for i, u in enumerate(self.up):
            x = u(torch.cat([F.interpolate(x, scale_factor=2.0), k[1 - i]], 1))
        return self.o(x)


def make():
    return (Net(), torch.randn(2, 3, 32, 32), lambda m, b: m(b).square().mean())
