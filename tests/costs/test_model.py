"""Does the cost model find the line that times lie on, whatever a few of them say?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from punar.costs import Work, fit
from punar.costs.model import Measured


def rows(start: float, per_byte: float, per_flop: float, *, kind: str = "matmul", count: int = 40, seed: int = 0) -> list[Measured]:
    draw = np.random.default_rng(seed)
    works = [Work(bytes=int(10 ** draw.uniform(2, 8)), flops=int(10 ** draw.uniform(2, 10))) for _ in range(count)]
    return [Measured(kind=kind, work=w, time_ns=start + w.bytes * per_byte + w.flops * per_flop) for w in works]


@given(
    start=st.floats(100, 20_000),
    per_byte=st.floats(0.01, 1),
    per_flop=st.floats(0.001, 0.1),
    outliers=st.integers(0, 6),
    seed=st.integers(0, 99),
)
@example(start=100.0, per_byte=1.0, per_flop=0.0625, outliers=4, seed=31)
@settings(max_examples=60, deadline=None)
def test_a_line_is_found_beside_outliers(start: float, per_byte: float, per_flop: float, outliers: int, seed: int) -> None:
    measured = rows(start, per_byte, per_flop, seed=seed)
    spoiled = [Measured(kind=row.kind, work=row.work, time_ns=row.time_ns * 20) for row in measured[:outliers]] + measured[outliers:]
    model = fit(spoiled)
    for row in measured:
        assert model.predict_ns("matmul", row.work) == pytest.approx(row.time_ns, rel=0.5 if outliers else 1e-6)


def test_no_coefficient_is_negative() -> None:
    """Larger operators that were faster must not make still larger ones take no time."""
    falling = [Measured(kind="other", work=Work(bytes=1000 * n, flops=0), time_ns=10_000 - 900 * n) for n in range(1, 9)]
    line = fit(falling).line_of("other")
    assert min(line.start_ns, line.per_byte_ns, line.per_flop_ns) >= 0
    assert line.predict_ns(Work(bytes=1 << 40, flops=0)) > 0


def test_a_kind_measured_seldom_is_like_all() -> None:
    model = fit([*rows(500, 0.1, 0.01), *rows(9e9, 0.1, 0.01, kind="norm", count=2)])
    assert "norm" not in model.lines
    assert model.line_of("norm") is model.rest is model.line_of("never seen")


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="found no measured operator"):
        fit([])
