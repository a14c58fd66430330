"""What memory costs in time: the frontier, what was chosen, and what plans of the literature would do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One plan of the frontier. Units: bytes of the whole step; ratios of extra time to the plain step, predicted.

    ``bound``: a proved lower bound on the overhead of any plan of at most this peak.
    """

    peak_bytes: int
    overhead: float
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPoint:
    """A plan of another solver, or the chosen one; ``name``: as it is spelled. Units: as in ``CurvePoint``."""

    name: str
    peak_bytes: int
    overhead: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The frontier by rising peak. ``chosen``: the plan that the page is of, by the same times, None for the plain step. ``peers``: solvers of the literature."""

    points: tuple[CurvePoint, ...]
    chosen: NamedPoint | None
    peers: tuple[NamedPoint, ...]
