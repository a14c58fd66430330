"""What fits: the largest batch or sequence within a budget, or the batch, accumulation and plan of most samples a second."""

from punar.fitting.door import fit
from punar.fitting.record import GOALS, Fit, Trial

__all__ = ["GOALS", "Fit", "Trial", "fit"]
