"""``replayable``: what a user vouches for, so that it may be run again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from punar.errors import UsageError
from punar.torch.operators import mark_replayable
from punar.torch.session import active_session

T = TypeVar("T")


class ReplayableCall:
    """A function in an operator's place on the tape."""

    is_replayable = True

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.name = name
        self.live: list[Callable[..., Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs what the user called, or, in a replay, what stands for it."""
        function = self.live.pop() if self.live else self.function
        return function(*args, **kwargs)

    def __str__(self) -> str:
        return f"punar.replayable:{self.name}"


def replayable(target: T) -> T:
    """Declares that running something again on equal inputs gives equal outputs and has no other effect.

    punar then counts it as one operator, and may drop what it returns. Use it for what punar cannot see into: functions
    that launch kernels of their own (Triton, C extensions) on tensors from ``empty``, custom operators of ``torch.library``, and
    ``torch.autograd.Function`` classes, whose forward then becomes the operator.

    Args:
        target: a function of tensors, run where no gradients are recorded (in a custom function's forward, for example); an operator overload;
            or a subclass of ``torch.autograd.Function``, which is changed in place.

    Returns:
        The function wrapped, or ``target`` itself.

    Raises:
        UsageError: the target is none of these.
    """
    if isinstance(target, torch._ops.OpOverload):
        mark_replayable(target)
        return target
    if isinstance(target, torch._ops.OpOverloadPacket):
        for overload in target.overloads():  # type: ignore[no-untyped-call]
            mark_replayable(getattr(target, overload))
        return target
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        _wrap_function_class(target)
        return target
    if isinstance(target, (torch.nn.Module, type)) or not callable(target):
        raise UsageError(
            f"asked to make {target!r} replayable, found a {type(target).__name__}; give a function, an operator or an autograd.Function class"
        )
    return _wrapped(target, target, f"{target.__module__}.{getattr(target, '__qualname__', repr(target))}")  # type: ignore[return-value]


def _wrapped(function: Callable[..., Any], replayed: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``function`` the first time, ``replayed`` when it is run again."""
    call = ReplayableCall(replayed, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        session = active_session()
        return function(*args, **kwargs) if session is None else session.call(call, function, args, kwargs)

    run.__name__ = getattr(function, "__name__", "run")
    run.__doc__ = function.__doc__
    return run


def _wrap_function_class(target: type[torch.autograd.Function]) -> None:
    forward = target.forward
    name = f"{target.__module__}.{target.__qualname__}"
    if target.setup_context is not torch.autograd.Function.setup_context:
        target.forward = staticmethod(_wrapped(forward, forward, name))  # type: ignore[method-assign]
        return

    def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        session = active_session()
        if session is None:
            return forward(ctx, *args, **kwargs)
        return session.call(call, lambda *a, **k: forward(ctx, *a, **k), args, kwargs)

    call = ReplayableCall(lambda *args, **kwargs: forward(_context(), *args, **kwargs), name)
    target.forward = staticmethod(run)  # type: ignore[method-assign]


def _context() -> SimpleNamespace:
    """Stands in for autograd's context in a replay, which needs nothing of it."""

    def ignore(*_: Any) -> None:
        return None

    needs = SimpleNamespace(
        save_for_backward=ignore, mark_dirty=ignore, mark_non_differentiable=ignore, set_materialize_grads=ignore, save_for_forward=ignore
    )
    needs.needs_input_grad = (True,) * 64
    return needs
