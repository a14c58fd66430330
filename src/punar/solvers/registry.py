"""Solvers by name, as they are spelled: ``auto``, ``every:3``, ``auto{effort=2}``; others join through the entry points "punar.solvers"."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from punar.errors import UsageError
from punar.solvers.base import Solver

GROUP = "punar.solvers"

OURS = {
    "auto": "punar.solvers.auto:Auto",
    "checkmate": "punar.solvers.checkmate:Checkmate",
    "chen-greedy": "punar.solvers.chen:ChenGreedy",
    "dtr": "punar.solvers.dtr:Dtr",
    "every": "punar.solvers.every:Every",
    "full": "punar.solvers.every:Full",
    "greedy": "punar.solvers.greedy:Greedy",
    "milp": "punar.solvers.milp:Milp",
    "none": "punar.solvers.none:KeepAll",
    "revolve": "punar.solvers.revolve:Revolve",
    "rotor": "punar.solvers.rotor:Rotor",
    "selective": "punar.solvers.selective:Selective",
    "sqrt": "punar.solvers.every:Sqrt",
}

_SPELLING = re.compile(r"^\s*([A-Za-z][\w-]*)(?::(\w+))?(?:\{([^{}]*)\})?\s*$")


class UnknownSolver(UsageError):
    """No solver has this name, or it cannot have these options.

    Attributes:
        known: the names there are.
    """

    def __init__(self, message: str, *, known: tuple[str, ...]) -> None:
        super().__init__(message)
        self.known = known


def names() -> tuple[str, ...]:
    """The solvers there are, sorted; those of other packages included."""
    return tuple(sorted({*OURS, *_foreign()}))


@lru_cache(maxsize=1)
def _foreign() -> dict[str, Callable[[], object]]:
    return {point.name: point.load for point in entry_points(group=GROUP)}


def find(spelling: str) -> Solver:
    """The solver that a spelling names, with its options.

    Raises:
        UnknownSolver: there is no such solver or option.
    """
    match = _SPELLING.match(spelling)
    if match is None or match[1] not in names():
        raise UnknownSolver(
            f"asked for solver {spelling!r}, found none of that name; the solvers are {', '.join(names())} "
            f"(write 'every:3' for groups of three blocks, 'name{{field=value}}' for options)",
            known=names(),
        )
    kind = _kind(match[1])
    return _with_options(kind, spelling, match[2], match[3] or "")


def _kind(name: str) -> Callable[..., Solver]:
    if name not in OURS:
        return cast("Callable[..., Solver]", _foreign()[name]())
    module, _, attribute = OURS[name].partition(":")
    return cast("Callable[..., Solver]", getattr(import_module(module), attribute))


def _with_options(kind: Callable[..., Solver], spelling: str, first: str | None, rest: str) -> Solver:
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = dict(pair.partition("=")[::2] for pair in rest.split(",") if pair.strip())
    options = {name.strip(): value.strip() for name, value in given.items()}
    if first is not None:
        options = {next(iter(fields), "value"): first, **options}
    try:
        return kind(**{name: _read(fields[name], value) for name, value in options.items()})
    except (KeyError, ValueError) as error:
        raise UnknownSolver(
            f"asked for solver {spelling!r}, of which {error} is no option it can have; its options are "
            f"{', '.join(f'{f.name} ({f.type}, {f.default})' for f in fields.values()) or 'none'}",
            known=names(),
        ) from error


def _read(field: dataclasses.Field[object], text: str) -> object:
    kind = cast("Callable[[str], object]", type(field.default))
    return kind(text)
