"""Least cuts against the search of everything."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from punar.plan.cut import Network

arcs = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 9)), max_size=14)


def cut_value(links: list[tuple[int, int, int]], side: tuple[bool, ...]) -> int:
    return sum(capacity for tail, head, capacity in links if not side[tail] and side[head])


@given(arcs)
def test_the_sink_side_is_a_least_cut_and_the_smallest(links: list[tuple[int, int, int]]) -> None:
    links = [link for link in links if link[0] != link[1]]
    network = Network(6)
    for tail, head, capacity in links:
        network.link(tail, head, capacity)
    found = tuple(network.sink_side())
    sides = [(False, True, *rest) for rest in itertools.product((False, True), repeat=4)]
    least = min(cut_value(links, side) for side in sides)
    assert cut_value(links, found) == least
    assert sum(found) == min(sum(side) for side in sides if cut_value(links, side) == least)
