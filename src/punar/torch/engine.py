"""Tells who watches this thread that a backward pass is about to run, so that it may step aside.

Autograd's engine restores the dispatch modes that were active when it was called before each node it runs: a mode cannot leave from within. The one
Python function through which ``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` call the engine is therefore wrapped.
Where a version of torch has no such function, backward passes are simply watched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils import _python_dispatch as modes

Runner = Callable[[Callable[[], Any], Iterable[Any]], Any]
"""Called in place of the engine with a function that calls it, and with what backward is to start from; returns what the engine returns."""

_NAME = "_engine_run_backward"
_original: Any = getattr(torch.autograd, _NAME, None)
_local = threading.local()


@contextmanager
def announced(runner: Runner) -> Iterator[None]:
    """Within, the engine is called by way of ``runner`` in this thread."""
    if _original is not None:
        setattr(torch.autograd, _NAME, _run_backward)
    previous = getattr(_local, "runner", None)
    _local.runner = runner
    try:
        yield
    finally:
        _local.runner = previous


def _run_backward(outputs: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    runner: Runner | None = getattr(_local, "runner", None)
    if runner is None:
        return _original(outputs, *args, **kwargs)
    return runner(lambda: _original(outputs, *args, **kwargs), outputs)


def nodes_from(outputs: Iterable[Any]) -> Iterator[tuple[Any, torch.Tensor | None]]:
    """The nodes that a backward pass from these tensors or gradient edges leads to, each once, with the leaf whose gradient the node writes, if any."""
    nodes = [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in outputs]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        following = node.next_functions
        yield node, None if following else getattr(node, "variable", None)
        for after, _ in following:
            if after not in seen:
                seen.add(after)
                nodes.append(after)


def runs_python(outputs: Iterable[Any]) -> bool:
    """Whether backward from these tensors or gradient edges runs Python code that can be found beforehand: hooks of leaves, custom functions.

    Hooks of other tensors cannot be found.
    """
    for node, leaf in nodes_from(outputs):
        if isinstance(node, BackwardCFunction):
            return True
        if leaf is not None and (leaf._backward_hooks or leaf._post_accumulate_grad_hooks):
            return True
    return False


def is_innermost(mode: modes.TorchDispatchMode) -> bool:
    """Whether a mode is the one that sees operators first."""
    return modes._get_current_dispatch_mode() is mode


@contextmanager
def aside(mode: modes.TorchDispatchMode) -> Iterator[None]:
    """Within, the innermost mode sees no operators."""
    modes._pop_mode()
    try:
        yield
    finally:
        modes._push_mode(mode)
