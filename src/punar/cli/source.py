"""What a command works on: a user's function, a transformers model or a demo model."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from punar.cli.hf import PREFIX, Sizes, load_hf, make_tokens
from punar.cli.output import WrongArgument
from punar.errors import UsageError

if TYPE_CHECKING:
    from punar.demo.task import Task

Step = tuple[Any, Any, Callable[[Any, Any], Any]]

Sized = tuple[Any, Callable[[int], Any], Callable[[Any, Any], Any]]

_MAKE, _MAKE_BATCH = "make", "make_batch"


def load_step(source: str, *, seed: int, sizes: Sizes | None = None) -> Step:
    """The model, batch and loss function that ``source`` names.

    Args:
        source: ``hf:`` and the path of a transformers configuration; a path that ends in ``.py``, whose ``make()`` is called, or ``FILE.py:function`` or
            ``module:function``, which is called; or the name of a demo model.
        seed: set before the model is made.
        sizes: for a transformers model.

    Raises:
        WrongArgument: there is no such file, module or model, or sizes are missing or of no use.
        UsageError: the function is not there, or returns something else.
    """
    import torch

    torch.manual_seed(seed)
    asked = sizes or Sizes()
    if source.startswith(PREFIX):
        return load_hf(Path(source.removeprefix(PREFIX)), asked)
    if replace(asked, has_weights=True) != Sizes():
        raise WrongArgument(
            f"asked for --batch, --length, --dtype, --tensor or --stage of {source}, which makes its own; they are for hf:CONFIG.json"
        )
    place, _, function = source.rpartition(":")
    if source.endswith(".py"):
        place, function = source, _MAKE
    if place:
        return _made_by(source, _function_in(place, _names_in(place), function))
    task = load_task(source, steps=1, seed=seed)
    return task.model, task.batches[0], task.loss_fn


def load_sized(source: str, *, seed: int, sizes: Sizes, is_length: bool) -> Sized:
    """The model, the function that makes a batch of a size, and the loss function that ``source`` names.

    What a function returns in the batch's place is taken if it can be called, else its file or module must define ``make_batch``.

    Args:
        source: as for ``load_step``, but no demo model, whose batches are of one size.
        sizes: for a transformers model; of ``batch`` and ``length`` the one that is asked for is left out.
        is_length: whether the size asked for is the length, not the batch.

    Raises:
        WrongArgument: there is no such file or module, or sizes are missing or of no use, or it is a demo model.
        UsageError: the function is not there, or returns something else, or nothing makes a batch of a size.
    """
    import torch

    torch.manual_seed(seed)
    if source.startswith(PREFIX):
        return _sized_hf(source, sizes, is_length=is_length)
    if (sizes.batch, sizes.length, sizes.dtype) != (None, None, None):
        raise WrongArgument(f"asked for --batch, --length or --dtype of {source}, which makes its own; they are for hf:CONFIG.json")
    place, _, function = source.rpartition(":")
    if source.endswith(".py"):
        place, function = source, _MAKE
    if not place:
        raise WrongArgument(
            f"asked what fits of {source!r}, of which batches of any size are to be made; give a file that ends in .py, module:function or hf:CONFIG.json"
        )
    names = _names_in(place)
    model, batch, loss_fn = _made_by(source, _function_in(place, names, function))
    make_batch = batch if callable(batch) else names.get(_MAKE_BATCH)
    if not callable(make_batch):
        raise UsageError(
            f"asked for batches of any size of {source}, found a batch of one size and no make_batch(size) beside {function}(); define it, or have "
            f"{function}() return (model, make_batch, loss_fn)"
        )
    return model, make_batch, loss_fn


def _sized_hf(source: str, sizes: Sizes, *, is_length: bool) -> Sized:
    """A transformers model, with texts of the size."""
    fixed, given, other = ("batch", sizes.batch or 1, sizes.length) if is_length else ("length", sizes.length, sizes.batch)
    if given is None:
        raise WrongArgument(f"asked for the largest batch of {source}, of texts of unknown length; give --length")
    if other is not None:
        raise WrongArgument(f"asked what fits of {source}, which is to be found, with a value for it as well; give --{fixed} alone")
    path = Path(source.removeprefix(PREFIX))
    model, _, loss_fn = load_hf(path, replace(sizes, batch=1, length=2))
    vocabulary = model.config.get_text_config().vocab_size
    if is_length:
        return model, lambda size: make_tokens(given, size, vocabulary), loss_fn
    return model, lambda size: make_tokens(size, given, vocabulary), loss_fn


def load_task(name: str, *, steps: int, seed: int) -> Task:
    """The demo model of this name.

    Raises:
        WrongArgument: there is none.
    """
    from punar.demo.models import MODELS, make_task

    if name not in MODELS:
        raise WrongArgument(
            f"asked for {name!r}, which is no demo model; choose one of {', '.join(sorted(MODELS))}"
            ", or where a step is asked for, give a file that ends in .py, module:function or hf:CONFIG.json"
        )
    return make_task(name, steps=steps, seed=seed)


def _names_in(place: str) -> dict[str, Any]:
    """What a file or a module defines."""
    return _run(Path(place)) if place.endswith(".py") else _imported(place)


def _function_in(place: str, names: dict[str, Any], name: str) -> Callable[[], Any]:
    """The function of this name among what a file or a module defines."""
    function = names.get(name)
    if not callable(function):
        raise UsageError(f"asked for {name}() of {place}, which defines none; it must define {name}() -> (model, batch, loss_fn)")
    return function  # type: ignore[no-any-return]


def _run(path: Path) -> dict[str, Any]:
    if not path.is_file() or not os.access(path, os.R_OK):
        found = "may not be read" if path.is_file() else "is no file"
        raise WrongArgument(f"asked to read the step from {path}, which {found}; give a Python file with make(), or a demo model's name")
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` does, so that it finds its neighbours
    return runpy.run_path(str(path))


def _imported(name: str) -> dict[str, Any]:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return vars(importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another
        raise WrongArgument(
            f"asked to read the step from the module {name}, which is not found ({error}); check its name and the folder"
        ) from error


def _made_by(source: str, make: Callable[[], Any]) -> Step:
    match make():
        case (model, batch, loss_fn) if callable(loss_fn):
            return model, batch, loss_fn
        case other:
            called = f"make() of {source}" if source.endswith(".py") else f"{source}()"
            raise UsageError(f"{called} returned {type(other).__name__}; it must return (model, batch, loss_fn), the last one callable")
