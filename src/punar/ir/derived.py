"""What is derived from a trace: kept while it is planned for, and forgotten when planning is over, since it takes more memory than the trace itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from punar.ir.trace import Trace

T = TypeVar("T")

_derived: list[Any] = []


def derived(function: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Decorates a function of a trace: it is computed once a trace, until ``forget_derived``."""
    cached = lru_cache(maxsize=8)(function)
    _derived.append(cached)
    return cached


def forget_derived() -> None:
    """Lets go of all that was derived; it is computed anew where it is needed again."""
    for function in _derived:
        function.cache_clear()
