"""What goes to stdout and what to stderr, and the exit codes."""

from __future__ import annotations

import enum
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from punar.errors import BudgetError, InfeasibleBudget, PunarError, TargetError, UsageError, VerificationError
from punar.reporting.table import format_columns, make_table

PATIENCE_SECONDS = 1.0
"""What takes less is over before anyone asks what it does."""


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


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Within, a person at a terminal sees on stderr what is done and for how long, from the first second on; gives what changes the text."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    progress = Progress(*columns, console=talk(), transient=True, disable=not sys.stderr.isatty())
    task = progress.add_task(text, total=None)
    timer = threading.Timer(PATIENCE_SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda said: progress.update(task, description=said)
    finally:
        timer.cancel()
        timer.join()  # else it might begin to show after the end
        progress.stop()


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
