"""The largest size that fits, by few looks at how the least peak grows with the size.

NOTE. How the size is found.

1. Sizes are counted in steps of the granularity asked for, from 1 on. The least peak is taken to grow with the size; nothing else is assumed of it.
2. From the first size on the next ones are twice as large, until there are enough to lay a polynomial through: a line where the least peak is nearly affine
   (batches), a parabola where attention's scores make it quadratic (lengths).
3. The next size to look at is the largest that the polynomial through the last ones says fits, at most ``LEAP`` times the largest that is known to.
4. Every third look halves what is left instead, so that a peak that grows in stairs, which no polynomial follows, costs no more than bisection does.
5. It ends when a size is known to fit and the next one is known not to: both were looked at.

Source: the secant method kept in a bracket; Dekker 1969, Finding a zero by means of successive linear interpolation. Rules 2 and 4 are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

LEAP = 16
"""How many times the largest size that is known to fit the next one is at most: what is extrapolated further is too often wrong."""


@dataclass(slots=True, kw_only=True)
class Bracket:
    """What is known of the largest size that fits.

    Attributes:
        budget_bytes: what the least peak may be.
        most: the largest size asked about.
        degree: of the polynomial.
        peaks: the least peak of each size that was looked at. Units: bytes.
        fits, exceeds: the largest size that is known to fit, 0 for none, and the smallest that is known not to; ``most + 1`` stands for none.
    """

    budget_bytes: int
    most: int
    degree: int
    peaks: dict[int, int] = field(default_factory=dict)
    fits: int = 0
    exceeds: int = 0

    def __post_init__(self) -> None:
        self.exceeds = self.most + 1

    @property
    def is_closed(self) -> bool:
        """Whether nothing is left to look at (Rule 5)."""
        return self.exceeds - self.fits <= 1

    def add(self, size: int, peak_bytes: int) -> None:
        """Notes what was found at a size."""
        self.peaks[size] = peak_bytes
        if peak_bytes <= self.budget_bytes:
            self.fits = max(self.fits, size)
        else:
            self.exceeds = min(self.exceeds, size)

    def next_size(self, first: int) -> int:
        """The size to look at next; ``first``: the one to begin with."""
        if not self.peaks:
            return min(first, self.most)
        if not self.fits:
            return self.within(1 if len(self.peaks) > 1 else self.exceeds // 2)
        is_bounded = self.exceeds <= self.most
        if len(self.peaks) <= self.degree:
            return self.within(2 * self.fits)
        if len(self.peaks) % 3 == 0 and is_bounded:
            return self.within((self.fits + self.exceeds) // 2)
        return self.within(self.predicted())

    def within(self, size: int) -> int:
        """The size, or the nearest that is not known yet (Rule 3)."""
        return min(max(size, self.fits + 1), self.exceeds - 1, max(LEAP * self.fits, 1))

    def predicted(self) -> int:
        """The largest size that fits by the polynomial; the next one to the largest known where that was just confirmed."""
        near = sorted(self.peaks, key=lambda size: (abs(self.peaks[size] - self.budget_bytes), size))[: self.degree + 1]
        low, high = self.fits, min(self.exceeds, LEAP * self.fits + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if interpolated([(size, self.peaks[size]) for size in near], middle) <= self.budget_bytes:
                low = middle
            else:
                high = middle
        return low


def interpolated(points: list[tuple[int, int]], at: int) -> float:
    """The polynomial through points, somewhere. Source: Lagrange's form."""
    total = 0.0
    for here, value in points:
        term = float(value)
        for other, _ in points:
            if other != here:
                term *= (at - other) / (here - other)
        total += term
    return total


def largest(least_peak: Callable[[int], int], *, budget_bytes: int, first: int = 1, most: int, degree: int = 1, trials: int) -> Bracket:
    """Looks at sizes from 1 to ``most`` until the largest whose least peak is within the budget is known, or as often as allowed.

    Complexity: O(log most) looks; a few where the peak is near the polynomial.
    """
    bracket = Bracket(budget_bytes=budget_bytes, most=most, degree=degree)
    while not bracket.is_closed and len(bracket.peaks) < trials:
        size = bracket.next_size(first)
        bracket.add(size, least_peak(size))
    return bracket
