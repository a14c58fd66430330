"""What a step that was traced on fake tensors leaves where no module's attributes are: functions' caches are emptied, the rest is told."""

from __future__ import annotations

import functools
import gc
import warnings
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from punar.torch.records import is_fake

_TYPES = frozenset({functools._lru_cache_wrapper, FakeTensor, nn.Parameter})

_MOST_LOOKED_AT = 10_000
"""So many objects of a cache are looked at."""


def forget_fakes(mode: FakeTensorMode | None) -> None:
    """Empties the caches of ``functools.lru_cache`` that keep fake tensors, masks or tables of rotations for example: the next call makes real ones.

    Then warns where tensors of ``mode`` are alive, which nobody but the step can have kept; with None, which stands for one of the user's, that is not asked.
    """
    alive = _alive()
    _empty_caches(alive)
    if mode is None or not _are_kept(alive, mode):
        return
    del alive
    gc.collect()
    left = _are_kept(_alive(), mode)
    if left:
        warnings.warn(
            f"a step was traced without data, and {left} of the tensors that it made, which have none, are still kept somewhere: in a table of a Python file, a list, "
            "or an object that is no module. A model that reads them again fails, or gives results without data. Empty that, or run the model once before it is "
            "traced where it keeps what it makes for later",
            stacklevel=5,
        )


def _empty_caches(alive: list[Any]) -> None:
    for cached in alive:
        if type(cached) is functools._lru_cache_wrapper and _keeps_fakes(cached):
            cached.cache_clear()


def _alive() -> list[Any]:
    """All caches and fake tensors."""
    return [each for each in gc.get_objects() if type(each) in _TYPES]


def _are_kept(alive: list[Any], mode: FakeTensorMode) -> int:
    return sum(getattr(each, "fake_mode", None) is mode for each in alive)


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
