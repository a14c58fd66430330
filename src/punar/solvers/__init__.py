"""How a plan is found: one algorithm a file, a registry by name, one door. No framework is imported here."""

from punar.solvers.base import Solver, holder_lines, holders_at_peak
from punar.solvers.compress import codable
from punar.solvers.door import frontier, frontier_points, least, least_peak, solve
from punar.solvers.registry import UnknownSolver, find, names

__all__ = [
    "Solver",
    "UnknownSolver",
    "codable",
    "find",
    "frontier",
    "frontier_points",
    "holder_lines",
    "holders_at_peak",
    "least",
    "least_peak",
    "names",
    "solve",
]
