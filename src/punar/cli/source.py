"""What a command works on: a user's script or a demo model."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from punar.cli.output import WrongArgument
from punar.errors import UsageError

if TYPE_CHECKING:
    from punar.demo.task import Task

Step = tuple[Any, Any, Callable[[Any, Any], Any]]


def load_step(source: str, *, seed: int) -> Step:
    """The model, batch and loss function that ``source`` names.

    Args:
        source: a path that ends in ``.py``, whose ``make()`` is called, or the name of a demo model.
        seed: set before the model is made.

    Raises:
        WrongArgument: there is no such file or model.
        UsageError: the file has no ``make()``, or that returns something else.
    """
    import torch

    torch.manual_seed(seed)
    if source.endswith(".py"):
        return _from_file(Path(source))
    task = load_task(source, steps=1, seed=seed)
    return task.model, task.batches[0], task.loss_fn


def load_task(name: str, *, steps: int, seed: int) -> Task:
    """The demo model of this name.

    Raises:
        WrongArgument: there is none.
    """
    from punar.demo.models import MODELS, make_task

    if name not in MODELS:
        raise WrongArgument(
            f"asked for {name!r}, which is no demo model; choose one of {', '.join(sorted(MODELS))}"
            ", or where a step is asked for, give a file that ends in .py"
        )
    return make_task(name, steps=steps, seed=seed)


def _from_file(path: Path) -> Step:
    if not path.is_file() or not os.access(path, os.R_OK):
        found = "may not be read" if path.is_file() else "is no file"
        raise WrongArgument(f"asked to read the step from {path}, which {found}; give a Python file with make(), or a demo model's name")
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` does, so that it finds its neighbours
    make = runpy.run_path(str(path)).get("make")
    if not callable(make):
        raise UsageError(f"asked for make() of {path}, which defines none; it must define make() -> (model, batch, loss_fn)")
    match make():
        case (model, batch, loss_fn) if callable(loss_fn):
            return model, batch, loss_fn
        case other:
            raise UsageError(
                f"make() of {path} returned {type(other).__name__}; it must return (model, batch, loss_fn), the last one callable"
            )
