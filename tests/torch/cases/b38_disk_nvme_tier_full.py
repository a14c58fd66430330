"""Disk tier: the spill directory fills up mid-forward; DeepSpeed left zero-length swap files and died in backward.

Made after deepspeedai/DeepSpeed#1627, #3062; pytorch/pytorch#28997, #158657.
"""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make():
    return (Net(), torch.randn(256, 128), lambda m, b: m(b).square().mean())


def limit_files(nbytes=64 << 10):
    """in a subprocess: any file larger than nbytes fails with EFBIG, like a full disk"""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
