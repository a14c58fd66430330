"""When a step need not be watched: its plan holds everything, and it has begun like this for a while.

Seeing each operator from Python costs microseconds. Where no plan has anything to drop that time buys nothing, so that after a few such blocks most of the next
run as they are. Of these only the first tensors that autograd saves are looked at, and how many nodes its graphs got in all: these tell a batch of another shape or a
part that is added to the step, after which blocks are watched again. So is now and then a block for no reason, since a model may change in ways that neither shows.
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

_MOST_ENOUGH = 1024
"""Where a step that begins as usual had another number of nodes, or went over its budget, twice as many are watched the next time, up to so many: it may
come back."""

_LEFT_ALONE = 64
"""So many, before one is watched again."""


class Calm:
    """What is known of the blocks so far."""

    def __init__(self) -> None:
        self.known: dict[Signs, set[int]] = {}
        self.seen: list[tuple[torch.dtype, torch.Size]] = []
        self.same = self.left = self.first_node = 0
        self.enough = _ENOUGH

    @property
    def is_calm(self) -> bool:
        """Whether the next block may run unwatched."""
        return self.left > 0

    def begin(self) -> None:
        self.seen = []
        self.first_node = next_node()

    def look(self, tensor: Tensor) -> bool:
        """Notes a saved tensor; says whether there are more to look at."""
        if len(self.seen) < LOOKED_AT:
            self.seen.append((tensor.dtype, tensor.shape))
        return len(self.seen) < LOOKED_AT

    def end_watched(self, *, is_plain: bool, is_traced: bool) -> None:
        """A watched block is over; ``is_plain``: it obeyed plans that hold everything, and kept their budget; ``is_traced``: that is not known yet."""
        if is_traced:
            self.same = 0
        elif not is_plain:
            self.known, self.same = {}, 0
        else:
            nodes = self.known.setdefault(tuple(self.seen), set())
            self.same = self.same + 1 if self.nodes in nodes else 0
            nodes.add(self.nodes)
        self.left = _LEFT_ALONE if self.same >= self.enough else 0

    def end_unwatched(self, *, is_over: bool) -> bool:
        """An unwatched block is over; ``is_over``: it took more than its budget. Says whether it was like one that was watched."""
        self.left -= 1
        nodes = self.known.get(tuple(self.seen), set())
        is_known = self.nodes in nodes
        if is_over or (nodes and not is_known):
            self.enough = min(2 * self.enough, _MOST_ENOUGH)
        if is_over or not is_known:
            self.known, self.same, self.left = {}, 0, 0
        return is_known

    @property
    def nodes(self) -> int:
        """Nodes that autograd has made in the present block."""
        return next_node() - self.first_node


def next_node() -> int:
    """The number that autograd gives to the next node of a graph that this thread makes."""
    return torch._C._autograd._get_sequence_nr()
