"""Where blocks are found."""

from __future__ import annotations

import pytest

from punar.ir.blocks import cuts_of, layout_of, narrow_cuts, runs_of
from tests.solvers.problems import named
from tests.synthetic import chain, transformer


@pytest.mark.parametrize("blocks", [2, 3, 7, 24])
def test_the_blocks_of_a_transformer_are_cut_at_the_residual_stream(blocks: int) -> None:
    trace = transformer(blocks)
    run = runs_of(trace)[0]
    assert (run.start, run.length, run.count) == (1, 10, blocks)
    crossing = {layout_of(trace).crossing[cut] for cut in cuts_of(trace)[1:-1]}
    assert crossing == {1 << 20}


def test_alternating_blocks_are_found() -> None:
    """Four pairs: seen as eight blocks, for operators of equal signatures."""
    run = runs_of(named("alternating"))[0]
    assert run.length * run.count == 80
    assert run.length in (10, 20)


def test_an_unrolled_cell_is_found_at_every_step() -> None:
    run = runs_of(named("recurrent"))[0]
    assert run.length == 3
    assert run.count >= 23


def test_without_repetition_cuts_are_spread_over_the_bytes() -> None:
    trace = named("irregular")
    assert runs_of(trace) == ()
    cuts = cuts_of(trace)
    assert cuts[0] == 0
    assert cuts[-1] == len(layout_of(trace).ops)
    assert 5 <= len(cuts) <= 9


def test_narrow_places_are_preferred() -> None:
    trace = chain([100, 100, 100, 1, 100, 100, 100, 100])
    assert 4 in narrow_cuts(trace, 2)


def test_backward_comes_to_later_segments_first() -> None:
    layout = layout_of(transformer(4))
    entries = [layout.entry(1 + 10 * k, 11 + 10 * k) for k in range(4)]
    assert entries == sorted(entries, reverse=True)
