"""A line of JSON for each step, in a file."""

from __future__ import annotations

import json
import os
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from punar.errors import UsageError
from punar.torch.session import StepStats


class JsonLines:
    """Appends a line for each step to a file: the fields of its ``StepStats`` in their units, and what was asked of its plan.

    Args:
        path: the file; what is in it stays. Several processes each need their own.

    Raises:
        UsageError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._steps = 0
        try:
            self._path = Path(path)
            self._append("")
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(
                f"asked to write a line for each step to {path}: {getattr(error, 'strerror', None) or error}; give a file in a folder that is there"
            ) from error

    def __call__(self, stats: StepStats) -> None:
        """Writes a step's line.

        Raises:
            OSError: the disk is full, for example.
        """
        self._steps += 1
        self._append(json.dumps({"step": self._steps, "unix_time_s": time.time()} | line_of(stats)) + "\n")

    def _append(self, text: str) -> None:
        with self._path.open(
            "a", encoding="utf-8"
        ) as file:  # anew each time: a step is on disk when it is over, and nothing is left to close
            file.write(text)


def line_of(stats: StepStats) -> dict[str, Any]:
    """A step's fields as JSON-able data; of its plan ``solver``, ``budget_bytes``, ``fingerprint`` and ``overhead``, or None where it had none."""
    body = {field.name: getattr(stats, field.name) for field in fields(stats) if field.name != "plan"}
    plan = stats.plan
    return body | {name: None if plan is None else getattr(plan, name) for name in ("solver", "budget_bytes", "fingerprint", "overhead")}
