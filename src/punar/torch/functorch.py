"""Lets ``torch.func`` transforms run inside a step.

They refuse to run while saved-tensor hooks are installed, though what they save is not handed to hooks at all. For as long as
a transform runs, the step's hooks are taken off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph

_original = graph.disable_saved_tensors_hooks
_lock = threading.Lock()
_installed = 0
_local = threading.local()

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


@contextmanager
def hooks(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """Installs saved-tensor hooks that step aside for ``torch.func`` transforms of this thread."""
    previous = getattr(_local, "hooks", None)
    _local.hooks = (pack, unpack)
    _install(1)
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    try:
        yield
    finally:
        remove_hooks()
        _install(-1)
        _local.hooks = previous


def remove_hooks() -> None:
    """Takes this thread's hooks off, also before their block ends; they must be the last that were put on. Once more changes nothing."""
    if getattr(_local, "hooks", None) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        _local.hooks = None


def _install(count: int) -> None:
    global _installed
    with _lock:
        _installed += count
        graph.disable_saved_tensors_hooks = _disable if _installed else _original


@contextmanager
def _disable(error_message: str) -> Iterator[None]:
    mine = getattr(_local, "hooks", None)
    top = torch._C._autograd._top_saved_tensors_default_hooks(True) if mine is not None else None
    if mine is None or top is None or top[0] is not mine[0]:
        with _original(error_message):
            yield
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with _original(error_message):
            yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*mine)
