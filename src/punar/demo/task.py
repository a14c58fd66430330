"""One training job: a model, its batches and its loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

Batch = dict[str, Tensor]
LossFn = Callable[[Any, Batch], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained. ``loss_fn(model, batch)`` gives a scalar; every batch has the same shapes."""

    name: str
    description: str
    model: nn.Module
    batches: tuple[Batch, ...]
    loss_fn: LossFn
    learning_rate: float = 1e-4


@contextmanager
def offline() -> Iterator[None]:
    """Keeps transformers from asking any hub for anything."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers from drawing progress bars and from listing the weights that a model leaves out on purpose."""
    from transformers.utils import logging

    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()
