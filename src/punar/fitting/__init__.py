"""What fits: the largest batch or sequence within a budget, or the batch, accumulation and plan of most samples a second."""

from punar.fitting.door import fit
from punar.fitting.record import Fit, Trial

__all__ = ["Fit", "Trial", "fit"]
