"""What is derived from a trace: kept while it is planned for, and forgotten when planning is over, since it takes more memory than the trace itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

from punar.ir.trace import Trace

T = TypeVar("T")

KEPT = 8
"""Of how many traces each function keeps what it returned."""

_derived: list[Any] = []


class _Same:
    """A trace, equal to itself alone: telling equal ones apart takes as long as reading them whole, and what is derived is asked for at each event."""

    __slots__ = ("trace",)

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __hash__(self) -> int:
        return id(self.trace)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.trace is other.trace


def derived(function: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Decorates a function of a trace: it is computed once a trace, known by its identity, until ``forget_derived``."""
    cached = lru_cache(maxsize=KEPT)(lambda same: function(same.trace))
    _derived.append(cached)

    @wraps(function)
    def once(trace: Trace) -> T:
        return cached(_Same(trace))

    return once


def forget_derived() -> None:
    """Lets go of all that was derived; it is computed anew where it is needed again."""
    for function in _derived:
        function.cache_clear()
