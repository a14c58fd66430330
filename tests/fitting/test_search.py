"""Does the search find the largest size that fits, whatever the least peak looks like, and with few looks?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from punar.fitting.search import LEAP, interpolated, largest

Peak = Callable[[int], int]


def looks(peak: Peak, **options: int) -> tuple[int, list[int]]:
    """What a search finds, and the sizes that it looked at."""
    seen: list[int] = []

    def look(size: int) -> int:
        seen.append(size)
        return peak(size)

    return largest(look, **{"trials": 1000, "most": 1 << 20, **options}).fits, seen


@given(
    steps=st.lists(st.integers(0, 1000), min_size=1, max_size=300),
    budget=st.integers(0, 100_000),
    first=st.integers(1, 300),
    degree=st.sampled_from([1, 2]),
)
def test_it_is_what_looking_at_every_size_finds(steps: list[int], budget: int, first: int, degree: int) -> None:
    peaks = [sum(steps[: size + 1]) for size in range(len(steps))]
    found, seen = looks(lambda size: peaks[size - 1], budget_bytes=budget, first=first, most=len(peaks), degree=degree)
    assert found == sum(peak <= budget for peak in peaks)
    assert len(seen) == len(set(seen))
    assert found in (0, len(peaks)) or {found, found + 1} <= set(seen)


@given(base=st.integers(0, 10**10), slope=st.integers(1, 10**8), answer=st.integers(1, 10**5))
def test_a_line_takes_few_looks(base: int, slope: int, answer: int) -> None:
    found, seen = looks(lambda size: base + slope * size, budget_bytes=base + slope * answer)
    assert found == answer
    assert len(seen) <= 11


@given(a=st.integers(1, 1000), b=st.integers(0, 10**6), answer=st.integers(100, 10**5))
def test_a_parabola_takes_few_looks(a: int, b: int, answer: int) -> None:
    found, seen = looks(lambda size: a * size**2 + b * size, budget_bytes=a * answer**2 + b * answer, first=64, degree=2)
    assert found == answer
    assert len(seen) <= 11


@given(answer=st.integers(1, 10**6), rise=st.integers(1, 10**9))
def test_a_cliff_takes_no_more_than_bisection_does(answer: int, rise: int) -> None:
    _, seen = looks(lambda size: size if size <= answer else 10**12 + rise * size, budget_bytes=10**11)
    assert len(seen) <= 3 * 21 + 6


def test_it_never_leaps_far_beyond_what_is_known_to_fit() -> None:
    _, seen = looks(lambda size: size, budget_bytes=10**5)
    known = [max([size for size in seen[:place] if size <= 10**5], default=1) for place in range(len(seen))]
    assert all(size <= LEAP * before for size, before in zip(seen, known, strict=True))


def test_looks_are_bounded_and_what_is_known_then_is_said() -> None:
    bracket = largest(lambda size: size, budget_bytes=10**6, most=1 << 30, trials=4)
    assert (len(bracket.peaks), bracket.fits, bracket.is_closed) == (4, max(bracket.peaks), False)


@pytest.mark.parametrize("at", [0, 3, 10])
def test_a_parabola_goes_through_its_points(at: int) -> None:
    assert interpolated([(1, 4), (2, 9), (5, 36)], at) == pytest.approx((at + 1) ** 2)
