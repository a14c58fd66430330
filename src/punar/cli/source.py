"""What a command works on: a user's script or a demo model."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from punar.errors import UsageError

Step = tuple[Any, Any, Callable[[Any, Any], Any]]


def load_step(source: str, *, seed: int) -> Step:
    """The model, batch and loss function that ``source`` names.

    Args:
        source: a path that ends in ``.py``, whose ``make()`` is called, or the name of a demo model.
        seed: set before the model is made.

    Raises:
        UsageError: there is no such file or model, the file has no ``make()``, or that returns something else.
    """
    import torch

    torch.manual_seed(seed)
    if source.endswith(".py"):
        return _from_file(Path(source))
    from punar.demo.models import make_task

    task = make_task(source, steps=1, seed=seed)
    return task.model, task.batches[0], task.loss_fn


def _from_file(path: Path) -> Step:
    if not path.is_file():
        raise UsageError(f"asked to read the step from {path}, which is no file; give a Python file with make(), or a demo model's name")
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
