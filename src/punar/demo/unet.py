"""A U-Net that removes noise from images: long skip connections, and batch normalisation whose statistics advance once a step."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from punar.demo.random_weights import image_batches
from punar.demo.task import Batch, Task


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Source: Ronneberger, Fischer and Brox, 2015, arXiv:1505.04597, figure 1, with padding and batch normalisation."""

    def __init__(self, *, channels: int, depth: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth + 1)]
        pairs = list(pairwise(widths))
        self.enter = DoubleConv(3, channels)
        self.down = nn.ModuleList(DoubleConv(small, large) for small, large in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(large, small, 2, 2) for small, large in reversed(pairs))
        self.merge = nn.ModuleList(DoubleConv(2 * small, small) for small, _ in reversed(pairs))
        self.leave = nn.Conv2d(channels, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Shapes: [batch, 3, image, image] to the same."""
        x = self.enter(images)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        noise: Tensor = self.leave(x)
        return noise


def make_task(*, steps: int, seed: int, batch: int = 6, image: int = 96, channels: int = 16, depth: int = 3) -> Task:
    """A U-Net that predicts the noise in random images."""
    torch.manual_seed(seed)
    return Task(
        name="unet",
        description=f"U-Net, depth {depth}, {channels} channels, random weights, {batch} random images of {image}x{image}, batch norm",
        model=UNet(channels=channels, depth=depth).train(),
        batches=image_batches(steps, batch, image, seed, classes=10),
        loss_fn=denoising_loss,
    )


def denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of the predicted noise; the noise is drawn inside the step."""
    noise = torch.randn_like(batch["images"])
    # Not F.mse_loss: the scalar it returns stands on a storage as large as the images, which then lives as long as the loss does.
    error: Tensor = model(batch["images"] + noise) - noise
    return error.square().mean()
