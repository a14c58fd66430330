"""Finds where the training steps of a script that knows nothing of it begin and end.

A step begins with the first call of a module that records gradients, and ends where an optimizer is about to step: between two of these are all forward and
backward passes whose gradients that optimizer gets. Loading batches, evaluation and the optimizer itself are outside.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _python_dispatch as modes

from punar.torch.operators import in_backward


class Boundaries:
    """Within, ``block`` is entered and left around each training step of the thread that entered this.

    ``on_end`` is called after each step; ``optimizer`` is the one that steps then. A block is not entered inside a dispatch mode, saved-tensor hooks or a
    ``torch.func`` transform of the script's own, and not left before those that it was left inside of have ended: they are stacks.

    Source:
        The hooks are torch's own, global ones: of modules' calls (only while no step is under way) and of optimizers' steps.
    """

    def __init__(self, block: AbstractContextManager[Any], on_end: Callable[[], None] = lambda: None) -> None:
        self.block, self.on_end = block, on_end
        self.steps = 0
        self.is_inside = self.is_stepped = False
        self.optimizer: torch.optim.Optimizer | None = None
        self._thread = 0
        self._tops: tuple[Any, Any] = (None, None)
        self._hooks = ExitStack()
        self._waiting: Any = None

    def __enter__(self) -> Boundaries:
        self._thread = threading.get_ident()
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")  # ours may well fire twice
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            self._hooks.callback(register(self._on_optimizer).remove)
        self._hooks.callback(self._stop_waiting)
        self._wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._hooks.close()
        if self.is_inside:
            self.is_inside = False
            self.block.__exit__(kind, error, traceback)

    def _wait(self) -> None:
        """Looks at modules' calls from now on."""
        if self._waiting is None:
            self._waiting = register_module_forward_pre_hook(self._on_call)

    def _stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.remove()

    def _on_call(self, module: torch.nn.Module, args: Any) -> None:
        """A module is called: a step may begin."""
        if threading.get_ident() != self._thread or not torch.is_grad_enabled() or in_backward() or torch.compiler.is_compiling():
            return
        if self.is_inside:
            self._leave()  # an optimizer stepped within backward, and this is what follows
        if not self.is_inside and _tops() == (None, None) and torch._C._functorch.peek_interpreter_stack() is None:
            self._enter()

    def _on_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step, or has, in which case only what its own closure computed is under way."""
        if threading.get_ident() != self._thread or not self.is_inside:
            return
        self.optimizer = optimizer
        if in_backward():
            self._wait()
        else:
            self._leave()

    def _enter(self) -> None:
        self.block.__enter__()
        self.is_inside = True
        self._tops = _tops()
        self._stop_waiting()

    def _leave(self) -> None:
        if _tops() != self._tops:
            return
        self.is_inside = False
        self._wait()
        self.block.__exit__(None, None, None)
        self.steps += 1
        self.on_end()


def _tops() -> tuple[Any, Any]:
    """The innermost dispatch mode and saved-tensor hooks."""
    return modes._get_current_dispatch_mode(), torch._C._autograd._top_saved_tensors_default_hooks(True)
