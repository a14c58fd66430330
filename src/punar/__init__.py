"""punar: makes a neural network's training step fit a memory budget at the least extra time.

``import punar`` alone loads neither torch nor a solver library; each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from punar.errors import BudgetError, InfeasibleBudget, PlanError, PunarError

if TYPE_CHECKING:
    from punar.api import Frontier, frontier, profile, solve
    from punar.fitting import Fit, fit
    from punar.plan import Plan
    from punar.profiles import Profile, explain
    from punar.remat import Remat
    from punar.reporting.explain import Explanation
    from punar.targets import Targets
    from punar.torch.replayable import replayable
    from punar.verification import Verification, verify

__version__ = "0.1.0"

_HOMES = {
    "Explanation": "punar.reporting.explain",
    "Fit": "punar.fitting",
    "Frontier": "punar.api",
    "Plan": "punar.plan",
    "Profile": "punar.profiles",
    "Remat": "punar.remat",
    "Targets": "punar.targets",
    "Verification": "punar.verification",
    "explain": "punar.profiles",
    "fit": "punar.fitting",
    "frontier": "punar.api",
    "profile": "punar.api",
    "replayable": "punar.torch.replayable",
    "solve": "punar.api",
    "verify": "punar.verification",
}

__all__ = [
    "BudgetError",
    "Explanation",
    "Fit",
    "Frontier",
    "InfeasibleBudget",
    "Plan",
    "PlanError",
    "Profile",
    "PunarError",
    "Remat",
    "Targets",
    "Verification",
    "explain",
    "fit",
    "frontier",
    "profile",
    "replayable",
    "solve",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'punar' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
