"""A step's surroundings: run it once and put everything back as it was."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from punar.errors import UsageError

LossFn = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The states of the generators that everyone shares: torch's on the CPU and on each CUDA device, Python's and numpy's."""

    torch: Tensor
    cuda: list[Tensor]
    python: Any
    numpy: Any

    @classmethod
    def take(cls) -> RandomStates:
        return cls(
            torch=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            python=random.getstate(),
            numpy=_numpy_random(),
        )

    def restore(self) -> None:
        """Puts the generators back as they were."""
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)

    def differences(self, other: RandomStates) -> list[str]:
        """Which generators have another state, by name."""
        found = [] if torch.equal(self.torch, other.torch) else ["torch's random state"]
        if any(not torch.equal(a, b) for a, b in zip(self.cuda, other.cuda, strict=True)):
            found.append("CUDA's random state")
        if self.python != other.python:
            found.append("Python's random state")
        if repr(self.numpy) != repr(other.numpy):
            found.append("numpy's random state")
        return found


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """Copies of gradients, buffers and random state; what a step changes of a model besides its activations."""

    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    random: RandomStates

    @classmethod
    def take(cls, model: nn.Module) -> StateSnapshot:
        return cls(
            gradients={name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()},
            buffers={name: b.detach().clone() for name, b in model.named_buffers()},
            random=RandomStates.take(),
        )

    def restore(self, model: nn.Module) -> None:
        """Puts the model and the random generators back as they were."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                old = self.gradients[name]
                parameter.grad = None if old is None else old.clone()
            for name, buffer in model.named_buffers():
                if name in self.buffers:
                    buffer.copy_(self.buffers[name])
        self.random.restore()

    def differences(self, other: StateSnapshot) -> list[str]:
        """What is not equal bit for bit, by name."""
        found = [f"gradient of {name}" for name, g in self.gradients.items() if not _same(g, other.gradients.get(name))]
        found += [f"buffer {name}" for name, b in self.buffers.items() if not _same(b, other.buffers.get(name))]
        return found + self.random.differences(other.random)


def gradient_errors(exact: StateSnapshot, rounded: StateSnapshot) -> tuple[dict[str, float], float]:
    """How far gradients are from those of an exact step: the norm of the difference in parts of the norm, of each parameter and of all together.

    A gradient of zeros counts by its own error's norm; one that is there in one of the two alone is infinitely far.
    """
    errors, wrong, whole = {}, 0.0, 0.0
    for name, gradient in exact.gradients.items():
        other = rounded.gradients[name]
        if gradient is None or other is None:
            errors[name] = 0.0 if gradient is other else math.inf
            continue
        size = float(gradient.double().norm())
        distance = float((gradient.double() - other.double()).norm())
        errors[name] = distance / size if size else distance
        wrong, whole = wrong + distance**2, whole + size**2
    total = (wrong / whole) ** 0.5 if whole else wrong**0.5
    return errors, math.inf if math.inf in errors.values() else total


def _numpy_random() -> Any:
    import sys

    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return bytes_equal(a, b)


def bytes_equal(a: Tensor, b: Tensor) -> bool:
    """Equality bit for bit: NaNs equal themselves, 0.0 is not -0.0."""
    if type(a) is not Tensor and hasattr(a, "to_local"):
        a, b = a.to_local(), b.to_local()  # type: ignore[attr-defined]
    left, right = (t.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for t in (a, b))
    return bool(torch.equal(left, right))


@contextmanager
def restored(model: nn.Module) -> Iterator[StateSnapshot]:
    """Whatever the block does to gradients, buffers and random state is undone at its end."""
    snapshot = StateSnapshot.take(model)
    try:
        yield snapshot
    finally:
        snapshot.restore(model)


def run_step(model: nn.Module, batch: Any, loss_fn: LossFn, in_flight: int = 1) -> Tensor:
    """One forward and backward pass, or so many forward passes and then the backward pass of each, in the same order; returns the first loss.

    Raises:
        UsageError: the loss is no real scalar tensor, nothing requires a gradient, or ``loss_fn`` ran backward itself.
    """
    losses = [check_loss(loss_fn(model, batch)) for _ in range(in_flight)]
    try:
        for loss in losses:
            loss.backward()
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise UsageError(
            "asked for a step, loss_fn(model, batch) ran backward itself; it must only return the loss: remove its backward()"
        ) from error
    detached: Tensor = losses[0].detach()
    return detached


def check_loss(loss: Any) -> Tensor:
    """Raises ``UsageError`` where backward could not start from this; returns it."""
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"asked for a step, loss_fn(model, batch) returned a {type(loss).__name__}; it must return a scalar tensor: return the loss"
        )
    if loss.numel() != 1:
        raise UsageError(
            f"asked for a step, the loss has shape {list(loss.shape)}; backward starts from one number: reduce it with .mean() or .sum() in loss_fn"
        )
    if loss.is_complex():
        raise UsageError(
            f"asked for a step, the loss is complex ({loss.dtype}); backward starts from a real number: return its .real or .abs()"
        )
    if not loss.requires_grad:
        raise UsageError(
            "asked for a step, the loss requires no gradient: no parameter of the model that it depends on does, or it was computed under no_grad. "
            "Set requires_grad on what should train"
        )
    return loss
