"""Scalars for TensorBoard."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from punar.errors import UsageError
from punar.export.libraries import imported
from punar.export.metrics import METRICS
from punar.torch.session import StepStats

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes each step's numbers as scalars ``punar/step_seconds``, ``punar/measured_peak_bytes`` and so on.

    Args:
        to: a folder for the event files, or the ``SummaryWriter`` that the program has already.
        first_step: the number of the next step, where a run goes on.

    Raises:
        MissingDependency: ``tensorboard`` is not installed.
        UsageError: the folder cannot be made, or this is neither.
    """

    def __init__(self, to: str | os.PathLike[str] | SummaryWriter, *, first_step: int = 0) -> None:
        self._end: Callable[[], object] | None = None
        if isinstance(to, (str, os.PathLike)):
            self._writer = _opened(os.fspath(to))
            self._end = weakref.finalize(self, self._writer.close)  # also when the process ends: a writer loses what it has not flushed
        elif hasattr(to, "add_scalar"):
            self._writer = to
        else:
            raise UsageError(f"asked to write scalars with a {type(to).__name__}; give a folder or a SummaryWriter")
        self._step = first_step

    def __call__(self, stats: StepStats) -> None:
        """Writes a step's scalars; they are on disk within the writer's own interval, two minutes by default."""
        for metric in METRICS:
            number = metric.read(stats)
            if number is not None:
                self._writer.add_scalar(f"punar/{metric.full_name}", number, self._step)
        self._step += 1

    def close(self) -> None:
        """Flushes what was written, and closes the writer unless it is the program's."""
        self._writer.flush()
        if self._end is not None:
            self._end()


def _opened(folder: str) -> SummaryWriter:
    writer = imported("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter
    try:
        return writer(folder)  # type: ignore[no-any-return]
    except OSError as error:
        raise UsageError(
            f"asked to write scalars to {folder}: {error.strerror or error}; give a folder that is there or can be made"
        ) from error
