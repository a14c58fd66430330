"""What is derived from a trace: kept while it is planned for, and forgotten when planning is over, since it takes more memory than the trace itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from punar.ir.trace import Trace

T = TypeVar("T")

KEPT = 8
"""Of how many traces each function keeps what it returned."""

_derived: list[dict[int, tuple[Trace, Any]]] = []


def derived(function: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Decorates a function of a trace: it is computed once a trace, until ``forget_derived``.

    A trace is known by its identity: telling equal ones apart takes as long as reading them whole, and these functions are called at each event.
    """
    kept: dict[int, tuple[Trace, T]] = {}
    _derived.append(kept)

    @wraps(function)
    def once(trace: Trace) -> T:
        found = kept.get(id(trace))
        if found is None:
            made = function(trace)
            while len(kept) >= KEPT:
                kept.pop(next(iter(kept)), None)
            found = kept[id(trace)] = (trace, made)  # with the trace, so that no other one gets its id
        return found[1]

    return once


def forget_derived() -> None:
    """Lets go of all that was derived; it is computed anew where it is needed again."""
    for kept in _derived:
        kept.clear()
