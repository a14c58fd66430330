"""The random state that an operator drew from, so that a replay draws the same numbers.

Only operators that draw have their state captured; the user's own generators are found among the operator's arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator that a random operator called like this draws from; None where its device has none that we know."""
    device: torch.device | None = None
    for item in (*args, *kwargs.values()):
        if isinstance(item, torch.Generator):
            return item
        if device is None and isinstance(item, Tensor):
            device = item.device
    return default_generator(torch.device(kwargs.get("device") or device or "cpu"))


def default_generator(device: torch.device) -> torch.Generator | None:
    """The device's own generator."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return None


class RandomState:
    """A generator and the state it had before an operator drew from it."""

    __slots__ = ("generator", "state")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.state = generator.get_state()

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """The generator is as it was before the operator, and afterwards as it is now."""
        present = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(present)
