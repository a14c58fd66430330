"""A model of operators' times: for each kind, time = start + bytes / bandwidth + operations / rate, fitted robustly to what was measured.

Source:
    The form is the roofline's two terms, added: Williams, Waterman and Patterson, 2009, Roofline, DOI 10.1145/1498765.1498785. The fit is
    least squares of relative errors, reweighted after Huber, 1964, Robust estimation of a location parameter, DOI 10.1214/aoms/1177703732.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from punar.costs.work import Work

_ROUNDS = 10
_OUTLIER = 0.1
"""Relative errors beyond this count linearly."""

_FEWEST = 4
"""A kind of which fewer operators were measured is taken as like all of them."""

_LEAST_SPREAD = 0.02

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One operator's measured time with what it does."""

    kind: str
    work: Work
    time_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """``start_ns + bytes * per_byte_ns + flops * per_flop_ns``; ``spread``: the usual distance of the logarithm of a measured time from it."""

    start_ns: float
    per_byte_ns: float
    per_flop_ns: float
    spread: float

    def predict_ns(self, work: Work) -> float:
        return self.start_ns + work.bytes * self.per_byte_ns + work.flops * self.per_flop_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A line for each kind of operator, and one for the kinds that were measured too seldom."""

    lines: Mapping[str, Line]
    rest: Line

    def line_of(self, kind: str) -> Line:
        return self.lines.get(kind, self.rest)

    def predict_ns(self, kind: str, work: Work) -> float:
        """The time expected of an operator. Units: nanoseconds."""
        return self.line_of(kind).predict_ns(work)


def fit(measured: Iterable[Measured]) -> CostModel:
    """Fits a model to measured operators.

    Raises:
        ValueError: nothing was measured.
    """
    rows = [row for row in measured if row.time_ns > 0]
    if not rows:
        raise ValueError("asked to fit a cost model, found no measured operator; measure a step first")
    kinds: dict[str, list[Measured]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    return CostModel(lines={kind: _fit_line(group) for kind, group in kinds.items() if len(group) >= _FEWEST}, rest=_fit_line(rows))


def _fit_line(rows: list[Measured]) -> Line:
    times = np.array([row.time_ns for row in rows])
    features = np.array([[1.0, row.work.bytes, row.work.flops] for row in rows])
    relative = features / times[:, None]
    weights = np.ones(len(rows))
    found = np.zeros(3)
    for _ in range(_ROUNDS):
        found = _non_negative(relative * weights[:, None], weights)
        error = np.abs(relative @ found - 1.0)
        weights = np.sqrt(np.minimum(1.0, _OUTLIER / np.maximum(error, _OUTLIER)))
    predicted = np.maximum(features @ found, 1.0)
    spread = 1.4826 * float(np.median(np.abs(np.log(times / predicted))))
    start, per_byte, per_flop = (float(number) for number in found)
    return Line(start_ns=start, per_byte_ns=per_byte, per_flop_ns=per_flop, spread=max(spread, _LEAST_SPREAD))


def _non_negative(features: Array, target: Array) -> Array:
    """Least squares with no coefficient below zero: with three of them, the best of all subsets."""
    best, best_error = np.zeros(features.shape[1]), float("inf")
    for size in range(1, features.shape[1] + 1):
        for columns in map(list, combinations(range(features.shape[1]), size)):
            found = np.zeros(features.shape[1])
            found[columns] = _solve(features[:, columns], target)
            error = float(np.sum((features @ found - target) ** 2))
            if (found >= 0).all() and error < best_error:
                best, best_error = found, error
    return best


def _solve(features: Array, target: Array) -> Array:
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)  # bytes and operations differ by many orders of magnitude
    solution = np.linalg.lstsq(features / scale, target, rcond=None)[0]
    return np.asarray(solution / scale, dtype=np.float64)
