"""Pieces: what is decided together, and that their steps are the best there are."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings

from punar.ir import Trace
from punar.ir.lineage import lineage_of
from punar.plan import simulate
from punar.plan.pieces import Piece, flips_of, pieces_of
from tests.solvers.problems import small_traces
from tests.synthetic import transformer


def decisions(trace: Trace, piece: Piece) -> list[tuple[int, int]]:
    """(bytes held, time) of every set of units."""
    sizes = lineage_of(trace).bytes
    sets = itertools.chain.from_iterable(itertools.combinations(range(len(piece.units)), k) for k in range(len(piece.units) + 1))
    return [(sum(sizes[v] for v in piece.held(frozenset(s))), piece.cost_ns(frozenset(s))) for s in sets]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(small_traces(most=8))
def test_the_flips_are_the_lower_hull_of_all_decisions(trace: Trace) -> None:
    sizes = lineage_of(trace).bytes
    for piece, flips in zip(pieces_of(trace), flips_of(trace), strict=True):
        held = sum(sizes[v] for v in piece.held(frozenset()))
        hull, cost = [(held, 0)], 0
        for flip in flips:
            held, cost = held - flip.bytes, cost + flip.cost_ns
            hull.append((held, cost))
        ratios = [flip.ratio for flip in flips]
        assert ratios == sorted(ratios)
        for bytes, time in decisions(trace, piece):
            for (more, fast), (less, slow) in itertools.pairwise(hull):
                assert (time - fast) * (more - less) >= (slow - fast) * (more - bytes)
            assert bytes >= hull[-1][0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(small_traces(most=8))
def test_pieces_share_no_operator_and_no_value(trace: Trace) -> None:
    ops = [op for piece in pieces_of(trace) for unit in piece.units for op in unit]
    values = [v for piece in pieces_of(trace) for row in (*piece.saved, piece.between) for v in row]
    assert len(ops) == len(set(ops))
    assert len(values) == len(set(values))


def test_a_transformer_falls_into_pieces_of_one_or_two_operators() -> None:
    trace = transformer(3)
    names = [[trace.ops[op].name for unit in piece.units for op in unit] for piece in pieces_of(trace)]
    assert ["project", "add"] in names
    assert ["down", "add"] in names
    assert max(map(len, names)) == 2


def test_dropping_one_piece_costs_its_own_operators_once() -> None:
    trace = transformer(3)
    producer = lineage_of(trace).producer
    for piece, flips in zip(pieces_of(trace), flips_of(trace), strict=True):
        again = set(piece.ops(flips[-1].rerun))
        seen = simulate(trace, [int(p in again) for p in producer])
        assert seen.time_ns - trace.plain_time_ns == sum(flip.cost_ns for flip in flips)
        assert seen.replayed_ops == len(again)
