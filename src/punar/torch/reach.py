"""What a function can reach by name: modules and schedulers of learning rates, to be put back where its step is repeated, and iterators, of which it would
take other items then."""

from __future__ import annotations

import functools
import io
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

_FOLLOWED = (nn.Module, LRScheduler, list, tuple, dict, FunctionType, MethodType)
"""Attributes of objects that may lead to modules or schedulers."""

_MOST_FOLLOWED = 256
"""So many objects are looked at until it is given up to find more; so many items of each."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Each once, in the order in which they were found."""

    modules: tuple[nn.Module, ...]
    schedulers: tuple[LRScheduler, ...]
    iterators: tuple[Iterator[Any], ...]


def reached_by(function: Callable[..., Any], arguments: Iterable[Any]) -> Reached:
    """What a call can reach: arguments, closures, globals that the function names, the object it is a method of.

    The same for functions found on the way, inside lists, tuples and dicts, and among the attributes of objects; iterators there if a function found
    before has the attribute's name.
    """
    modules: dict[int, nn.Module] = {}
    schedulers: dict[int, LRScheduler] = {}
    iterators: dict[int, Iterator[Any]] = {}
    names: set[str] = set()
    seen: set[int] = set()
    waiting: deque[Any] = deque([function, *arguments])
    while waiting and len(seen) < _MOST_FOLLOWED:
        item = waiting.popleft()
        if isinstance(item, nn.Module):
            modules[id(item)] = item
        elif isinstance(item, LRScheduler) and id(item) not in schedulers:
            schedulers[id(item)] = item
            waiting.extend(getattr(item, "_schedulers", ()))  # those that it has take turns
        elif isinstance(item, Iterator) and not isinstance(item, io.IOBase):
            iterators[id(item)] = item
        elif id(item) not in seen and (reached := list(itertools.islice(_reached_from(item, names), _MOST_FOLLOWED))):
            seen.add(id(item))
            waiting.extend(reached)
    return Reached(tuple(modules.values()), tuple(schedulers.values()), tuple(iterators.values()))


def _reached_from(item: Any, names: set[str]) -> Iterable[Any]:
    """What an object leads to. ``names``: those that functions found so far use, to be added to."""
    match item:
        case type() | ModuleType() | Tensor():
            return ()
        case list() | tuple():
            return item
        case dict():
            return item.values()
        case functools.partial():
            return (item.func, *item.args, *item.keywords.values())
        case MethodType():
            return (item.__func__, item.__self__)
        case FunctionType():
            names.update(used := _names_in(item.__code__))
            return _reached_from_function(item, used)
        case _:
            attributes = getattr(item, "__dict__", {})
            return [
                each for name, each in attributes.items() if isinstance(each, _FOLLOWED) or (isinstance(each, Iterator) and name in names)
            ]


def _reached_from_function(function: FunctionType, names: Iterable[str]) -> Iterator[Any]:
    """What is in a function's closure, its defaults, the globals that it names, and the function that it wraps."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a name that is not bound yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from (function.__globals__[name] for name in names if name in function.__globals__)
    yield getattr(function, "__wrapped__", None)


def _names_in(code: CodeType) -> list[str]:
    """The global names and attributes that a function uses, those in functions inside it too."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names_in(const)]
    return [*code.co_names, *inner]
