"""The linear programme of the lower bound (``bound.py``), climbed by prices on a few moments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from punar.plan.bound import Item

Floats = NDArray[np.float64]

ROUNDS = 24
"""How often the most pressing moment is looked for and given a price."""

MOMENTS = 4
"""How many moments are priced before the ascent may stop for want of progress."""


class Table:
    """The items as arrays.

    Shapes: ``cost`` [items]; the others [spans], one row for each span of each item.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        rows = [(number, *span) for number, item in enumerate(items) for span in item.spans]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        self.cost: Floats = np.array([item.cost_ns for item in items], dtype=np.float64)
        self.item, self.start, self.end = columns[0], columns[2], columns[3]
        self.size: Floats = columns[1].astype(np.float64)

    def at(self, moment: int) -> Floats:
        """The bytes that each item gives back at a moment."""
        there = (self.start <= moment) & (moment < self.end)
        return np.bincount(self.item[there], weights=self.size[there], minlength=len(self.cost)).astype(np.float64)

    def relief(self, is_taken: NDArray[np.bool_], cells: int) -> Floats:
        """The bytes that some items give back in each cell."""
        there = is_taken[self.item]
        change: Floats = np.zeros(cells + 1)
        np.add.at(change, self.start[there], self.size[there])
        np.subtract.at(change, self.end[there], self.size[there])
        return np.cumsum(change[:cells])


class Ascent:
    """The programme of one budget: ``excess[cell]`` bytes are to be given back. Any prices, none negative, give a lower bound of it."""

    def __init__(self, table: Table, excess: Sequence[int]) -> None:
        self.table, self.excess = table, np.array(excess, dtype=np.float64)
        self.prices: dict[int, float] = {}
        self.relief: dict[int, Floats] = {}

    def climb(self) -> float:
        """Prices the most pressing moment, again and again, and settles all prices anew; the best value on the way."""
        best = 0.0
        for _ in range(ROUNDS):
            moment = self.most_pressed()
            if moment is None:
                break
            if moment not in self.prices:
                self.prices[moment], self.relief[moment] = 0.0, self.table.at(moment)
            value = self.settle_all(moment)
            if value <= best * (1 + 1e-6) and len(self.prices) > MOMENTS:
                break
            best = max(best, value)
        return best

    def settle_all(self, newest: int) -> float:
        """Moves along each price, and from each price to the newest and back; the value reached."""
        others = [moment for moment in self.prices if moment != newest]
        for _ in range(2):
            self.settle({newest: 1.0})
            for other in others:
                self.settle({other: -1.0, newest: 1.0})
                self.settle({other: 1.0})
        for first, second in pairwise(others):
            self.settle({first: -1.0, second: 1.0})
        return self.value()

    def reduced(self) -> Floats:
        """What each item still costs once the prices have paid for its relief."""
        left = self.table.cost.copy()
        for moment, price in self.prices.items():
            if price:
                left -= price * self.relief[moment]
        return left

    def settle(self, direction: dict[int, float]) -> None:
        """Moves the prices along a direction to where the value is highest, as far as they stay at least zero.

        The value is concave and piecewise linear: its slope is the excess less the relief of what the prices pay for.
        """
        rates: Floats = sum((weight * self.relief[moment] for moment, weight in direction.items()), np.zeros_like(self.table.cost))
        lowest = max((-self.prices[m] / w for m, w in direction.items() if w > 0), default=0.0)
        highest = min((-self.prices[m] / w for m, w in direction.items() if w < 0), default=float("inf"))
        moving = np.flatnonzero(rates)
        turns = self.reduced()[moving] / rates[moving]
        order = np.argsort(turns, kind="stable")
        slope = sum(weight * self.excess[moment] for moment, weight in direction.items()) - np.minimum(rates, 0.0).sum()
        left = slope - np.cumsum(np.abs(rates[moving])[order])
        steps = int(np.count_nonzero(left > 0)) + 1 if slope > 0 else 0
        step = float(turns[order[min(steps, len(order)) - 1]]) if steps and len(order) else lowest
        step = min(max(step, lowest), highest)
        for moment, weight in direction.items():
            self.prices[moment] = max(self.prices[moment] + weight * step, 0.0)

    def value(self) -> float:
        paid = sum(price * float(self.excess[moment]) for moment, price in self.prices.items())
        return paid + float(np.minimum(self.reduced(), 0.0).sum())

    def most_pressed(self) -> int | None:
        """The cell in which the items that the prices pay for leave most excess."""
        lacking = self.excess - self.table.relief(self.reduced() <= 0, len(self.excess))
        moment = int(np.argmax(lacking))
        return moment if lacking[moment] > 0 else None
