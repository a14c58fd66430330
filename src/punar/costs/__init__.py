"""What operators cost: measured times, a model of them, and a cache between runs. Knows no framework."""

from punar.costs.cache import CostCache, remembered
from punar.costs.ledger import Ledger
from punar.costs.model import CostModel, fit
from punar.costs.work import Work, work_of

__all__ = ["CostCache", "CostModel", "Ledger", "Work", "fit", "remembered", "work_of"]
