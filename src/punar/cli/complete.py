"""What a shell offers for arguments that have a fixed set of names; nothing here imports torch, since a shell waits for it."""

from __future__ import annotations

from collections.abc import Iterable

DEMO_MODELS = ("gpt2", "llama", "minilm", "moe", "unet", "vit")
"""As in ``punar.demo.models``, which imports torch."""

GOALS = ("batch", "length", "throughput")
"""As in ``punar.fitting``, which does too."""


def complete_model(typed: str) -> list[str]:
    """Demo models."""
    return _beginning(typed, DEMO_MODELS)


def complete_goal(typed: str) -> list[str]:
    """What ``punar fit`` maximizes."""
    return _beginning(typed, GOALS)


def complete_device(typed: str) -> list[str]:
    """Devices known by name."""
    from punar.costs.devices import known_devices

    return _beginning(typed, known_devices())


def complete_solver(typed: str) -> list[str]:
    """Solvers, those of other packages included."""
    from punar.solvers.registry import names

    return _beginning(typed, names())


def _beginning(typed: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(typed)]
