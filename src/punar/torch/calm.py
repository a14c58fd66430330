"""When a step need not be watched: its plan holds everything, and it has begun like this for a while.

Seeing each operator from Python costs microseconds. Where no plan has anything to drop that time buys nothing, so that after a few such blocks most of the next
run as they are. Of these only the first tensors that autograd saves are looked at: they tell a batch of another shape, after which blocks are watched again. So does
now and then a block for no reason, since a model may change in ways that its first tensors do not show.
"""

from __future__ import annotations

import torch
from torch import Tensor

Signs = tuple[tuple[torch.dtype, torch.Size], ...]
"""How a block begins: the first tensors that autograd saves in it."""

LOOKED_AT = 8
"""So many of them."""

_ENOUGH = 4
"""After so many watched blocks in a row in which nothing was new and nothing dropped, blocks run unwatched."""

_LEFT_ALONE = 64
"""So many, before one is watched again."""


class Calm:
    """What is known of the blocks so far."""

    def __init__(self) -> None:
        self.known: set[Signs] = set()
        self.seen: list[tuple[torch.dtype, torch.Size]] = []
        self.same = self.left = 0

    @property
    def is_calm(self) -> bool:
        """Whether the next block may run unwatched."""
        return self.left > 0

    @property
    def is_known(self) -> bool:
        """Whether the present block has begun like one that was watched."""
        return tuple(self.seen) in self.known

    def begin(self) -> None:
        self.seen = []

    def look(self, tensor: Tensor) -> bool:
        """Notes a saved tensor; says whether there are more to look at."""
        if len(self.seen) < LOOKED_AT:
            self.seen.append((tensor.dtype, tensor.shape))
        return len(self.seen) < LOOKED_AT

    def end_watched(self, *, is_plain: bool) -> None:
        """A watched block is over; ``is_plain``: it obeyed plans that hold everything, and kept to them."""
        if not is_plain:
            self.known, self.same = set(), 0
        else:
            self.same = self.same + 1 if self.is_known else 0
            self.known.add(tuple(self.seen))
        self.left = _LEFT_ALONE if self.same >= _ENOUGH else 0

    def end_unwatched(self) -> None:
        """An unwatched block is over."""
        self.left -= 1
        if not self.is_known:
            self.known, self.same, self.left = set(), 0, 0
