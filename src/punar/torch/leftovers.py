"""What a step that was traced on fake tensors leaves where no module's attributes are: functions' caches are emptied, the rest is told."""

from __future__ import annotations

import functools
import gc
import warnings
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from punar.torch.records import is_fake

_MOST_LOOKED_AT = 10_000
"""So many objects of a cache are looked at."""


def empty_caches() -> None:
    """Empties the caches of ``functools.lru_cache`` that keep fake tensors, masks or tables of rotations for example: the next call makes real ones."""
    for cached in gc.get_objects():
        if type(cached) is functools._lru_cache_wrapper and _keeps_fakes(cached):
            cached.cache_clear()


def warn_of_fakes(mode: FakeTensorMode) -> None:
    """Warns where tensors of a mode are alive that nobody but the step can have kept."""
    if _alive(mode):
        gc.collect()
    left = _alive(mode)
    if left:
        warnings.warn(
            f"a step was traced without data, and {left} of the tensors that it made, which have none, are still kept somewhere: in a table of a Python file, a list, "
            "or an object that is no module. A model that reads them again fails, or gives results without data. Empty that, or run the model once before it is "
            "traced where it keeps what it makes for later",
            stacklevel=5,
        )


def _alive(mode: FakeTensorMode) -> int:
    return sum(issubclass(type(each), Tensor) and is_fake(each) and getattr(each, "fake_mode", None) is mode for each in gc.get_objects())


def _keeps_fakes(cached: Any) -> bool:
    """Whether a fake tensor is among a cache's keys and results, or inside containers there."""
    waiting, seen = [cached], {id(cached)}
    while waiting and len(seen) < _MOST_LOOKED_AT:
        for each in gc.get_referents(waiting.pop()):
            if issubclass(type(each), Tensor):
                if is_fake(each):
                    return True
            elif id(each) not in seen and (type(each) in (list, tuple, dict, set) or type(each).__name__ == "_lru_list_elem"):
                seen.add(id(each))
                waiting.append(each)
    return False
