"""What goes to stdout and what to stderr, and the exit codes."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from punar.errors import BudgetError, InfeasibleBudget, PunarError, TargetError, UsageError, VerificationError
from punar.reporting.table import format_columns, make_table


class Exit(enum.IntEnum):
    """How a command ended."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    INFEASIBLE = 3
    NOT_VERIFIED = 4
    MISSED = 5


class WrongArgument(UsageError):
    """What an argument names is not there; what is there and is damaged is another matter."""


def exit_code(error: PunarError) -> Exit:
    """The exit code that an error of ours stands for."""
    match error:
        case InfeasibleBudget():
            return Exit.INFEASIBLE
        case BudgetError() | TargetError() | WrongArgument():
            return Exit.USAGE
        case VerificationError():
            return Exit.NOT_VERIFIED
        case _:
            return Exit.ERROR


def talk() -> Console:
    """The console for people, on stderr."""
    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """One message on stderr."""
    print(text, file=sys.stderr)


def emit(text: str) -> None:
    """Data on stdout."""
    print(text)


def emit_json(body: dict[str, Any]) -> None:
    """Data on stdout as JSON."""
    emit(json.dumps(body, indent=2))


def emit_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> None:
    """A table on stdout: rich where a person reads it on a wide enough terminal, else aligned plain text."""
    text = format_columns(header, rows, left=left)
    console = Console()
    if console.is_terminal and console.width >= max(map(len, text.splitlines())):
        console.print(make_table(header, rows, left=left))
    else:
        emit(text)
