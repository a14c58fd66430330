"""Sharded weights: hooks gather before forward and free after it; the replay starts below those hooks.

Made after pytorch/pytorch#82203; deepspeedai/DeepSpeed#8148; Lightning-AI/pytorch-lightning#19267; NVIDIA/Megatron-LM#6153.
"""

import torch
import torch.nn as nn


class Sharded(nn.Module):
    """full weight is only visible between the pre- and post-forward hooks, as with ZeRO/FSDP/accelerate offload hooks"""

    def __init__(self, d):
        super().__init__()
        self.full = nn.Parameter(torch.randn(d, d) * 0.3)
        self.cur = None
        self.register_forward_pre_hook(lambda m, a: setattr(m, "cur", (m.full,)))
        self.register_forward_hook(lambda m, a, o: setattr(m, "cur", (m.full[:0],)))

    def forward(self, x):
        return torch.sigmoid(x) @ self.cur[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Sharded(8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def make():
    return (Net(), torch.randn(4, 8, requires_grad=True), lambda m, b: m(b).square().mean())
