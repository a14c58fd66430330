"""What users may give: each ``check_`` raises an error that says what was asked and what to give, or returns what was meant."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from punar.errors import BudgetError, UsageError
from punar.plan.codecs import OPTIONS
from punar.solvers import find
from punar.torch.places import Place
from punar.torch.session import StepStats
from punar.units import parse_bytes

Budget = str | int | float | None
Compress = str | Iterable[str] | None
Exporter = Callable[[StepStats], object]
LossFn = Callable[[Any, Any], Any]
Offloading = str | Sequence[str] | None

EXACT = ("mask",)
"""How values are compressed where nobody says how: what costs no precision."""


def describe_type(item: object) -> str:
    """Names what was given instead of what was asked for."""
    return f"something of type {type(item).__name__}"


def check_budget(budget: Budget) -> Budget:
    """Raises ``BudgetError`` where a budget is none; returns it, texts of bytes as an int."""
    hint = 'give bytes such as "6 GiB", a fraction such as 0.4, "min", "auto" or None'
    if budget is None or budget in ("min", "auto"):
        return budget
    if isinstance(budget, numbers.Real) and not isinstance(budget, (bool, int, float)):
        budget = int(budget) if isinstance(budget, numbers.Integral) else float(budget)  # numpy's
    if isinstance(budget, bool) or not isinstance(budget, (str, int, float)):
        raise BudgetError(f"budget {budget!r} is a {type(budget).__name__}; {hint}")
    if isinstance(budget, str):
        return parse_bytes(budget)
    if isinstance(budget, float):
        if math.isfinite(budget) and 0 < budget <= 1:
            return budget
        raise BudgetError(f"budget {budget!r} is a float outside (0, 1]: a float is a share of the plain step's activation peak; {hint}")
    if budget <= 0:
        raise BudgetError(f"budget {budget} B is not positive; {hint}")
    return budget


def check_limit(limit: str | int | None) -> int | None:
    """Raises ``BudgetError`` where a limit is no positive number of bytes; returns it in bytes."""
    if limit is None:
        return None
    error = BudgetError(f'limit {limit!r} is no positive number of bytes; give an int or a text such as "6 GiB"')
    try:
        checked = check_budget(limit)
    except BudgetError:
        raise error from None
    if not isinstance(checked, int):
        raise error
    return checked


def check_modules(modules: torch.nn.Module | Iterable[torch.nn.Module]) -> tuple[torch.nn.Module, ...]:
    """Raises ``UsageError`` where these are no modules; returns them."""
    if isinstance(modules, torch.nn.Module):
        return (modules,)
    found = tuple(modules) if isinstance(modules, Iterable) else (modules,)
    if wrong := [item for item in found if not isinstance(item, torch.nn.Module)]:
        raise UsageError(f"asked to put modules back, found {describe_type(wrong[0])} among them; give torch.nn.Modules")
    return found


def check_function(function: object) -> None:
    """Raises ``UsageError`` where something cannot be run as a step: its call must be the whole step."""
    if not callable(function):
        raise UsageError(f"asked to run a step, found {describe_type(function)}; give a function, and its arguments after it")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(
            "asked to run a step, found a function whose call runs nothing yet, a generator or a coroutine; give one that has run forward and "
            "backward when it returns"
        )


def check_offload(offload: Offloading) -> tuple[Place, ...]:
    """Reads where to offload to.

    Raises:
        UsageError: it is no text such as ``"cpu"``, ``"cpu:32 GiB"``, ``"disk:/path"`` or ``"disk:/path:500 GiB"``, nor a list of them.
    """
    if offload is None:
        return ()
    asked = [offload] if isinstance(offload, (str, bytes)) or not isinstance(offload, Sequence) else offload
    if not asked:
        raise UsageError(f"asked to offload to {offload!r}, which is no place: name one, or leave `offload` out")
    places = tuple(map(_place_in, asked))
    if len({place.name for place in places}) < len(places):
        raise UsageError(f"asked to offload to {offload!r}, which names a place twice: name each once")
    return places


def _place_in(text: object) -> Place:
    kind, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
    if text == "cpu" or (kind == "cpu" and _is_size(rest)):
        return Place(folder=None, most_bytes=parse_bytes(rest) if rest else None)
    if kind != "disk" or not rest:
        raise UsageError(
            f"asked to offload to {text!r}; what can be offloaded to is the computer's memory, for tensors on a CUDA device, and a disk: "
            'give "cpu", "cpu:32 GiB" to use at most so much of it, "disk:/path/of/a/folder" or "disk:/path/of/a/folder:500 GiB"'
        )
    folder, _, size = rest.rpartition(":")
    if folder and _is_size(size):
        return Place(folder=folder, most_bytes=parse_bytes(size))
    return Place(folder=rest, most_bytes=None)  # a colon is part of the path


def _is_size(text: str) -> bool:
    try:
        return parse_bytes(text) > 0
    except BudgetError:
        return False


def check_compress(compress: Compress) -> tuple[str, ...]:
    """Raises ``UsageError`` where these are no ways to compress; returns them, each once."""
    if compress is None:
        return ()
    asked = (compress,) if isinstance(compress, str) else tuple(compress) if isinstance(compress, Iterable) else (compress,)
    if unknown := [name for name in asked if name not in OPTIONS]:
        raise UsageError(f"asked to compress by {unknown[0]!r}; give some of {', '.join(map(repr, OPTIONS))}, or () for nothing")
    return tuple(option for option in OPTIONS if option in asked)


def check_exporters(on_step: Exporter | Iterable[Exporter] | None) -> tuple[Exporter, ...]:
    """Raises ``UsageError`` where something that is to be called after each step cannot be; returns all that can."""
    if on_step is None:
        return ()
    asked = (on_step,) if callable(on_step) or not isinstance(on_step, Iterable) else tuple(on_step)
    for export in asked:
        if isinstance(export, type) or not callable(export):
            found = f"the class {export.__name__}" if isinstance(export, type) else describe_type(export)
            raise UsageError(
                f"asked to call {found} after each step; give a function of one StepStats, an exporter such as punar.export.JsonLines(path), or a list"
            )
    return asked


def check_solver(solver: str) -> str:
    """Raises ``UsageError`` where there is no such solver; returns its name."""
    if not isinstance(solver, str):
        raise UsageError(f"asked for a solver, found {describe_type(solver)}; give its name, such as 'auto'")
    find(solver)
    return solver
