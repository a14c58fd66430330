"""Who is told when an optimizer steps: by one hook of torch's before the step and one after it, put there once and for all.

torch iterates over its hooks while they run. One that is put there or taken away meanwhile, by another thread or by the garbage collector, would break the
optimizer's step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Listener = Callable[[torch.optim.Optimizer], None]


class Listeners:
    """Methods that are called with each optimizer that steps, as long as their objects live. ``register``: puts the hook there that calls them."""

    def __init__(self, register: Callable[[Callable[[torch.optim.Optimizer, Any, Any], None]], object]) -> None:
        self._lock = threading.Lock()
        self._methods: tuple[weakref.WeakMethod[Listener], ...] = ()  # never changed, but replaced: it may be iterated over
        register(self._tell)

    def add(self, method: Listener) -> None:
        with self._lock:
            self._methods = (*(known for known in self._methods if known() is not None), weakref.WeakMethod(method))

    def remove(self, method: Listener) -> None:
        with self._lock:
            self._methods = tuple(known for known in self._methods if known() not in (None, method))

    def _tell(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for known in self._methods:
            method = known()
            if method is not None:
                method(optimizer)


BEFORE_STEP = Listeners(register_optimizer_step_pre_hook)

AFTER_STEP = Listeners(register_optimizer_step_post_hook)
