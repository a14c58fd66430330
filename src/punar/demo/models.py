"""The demo's models by name."""

from __future__ import annotations

from collections.abc import Callable

from punar.demo import minilm, moe, random_weights, unet
from punar.demo.task import Task
from punar.errors import UsageError

MODELS: dict[str, Callable[..., Task]] = {
    "gpt2": random_weights.make_gpt2,
    "llama": random_weights.make_llama,
    "minilm": minilm.make_task,
    "moe": moe.make_task,
    "unet": unet.make_task,
    "vit": random_weights.make_vit,
}


def make_task(name: str, *, steps: int, seed: int) -> Task:
    """Builds a demo model with ``steps`` batches.

    Raises:
        UsageError: no demo model has this name.
        MissingDependency: the model needs a package that is not installed.
    """
    if name not in MODELS:
        raise UsageError(f"asked for the demo model {name!r}, which does not exist; choose one of {', '.join(sorted(MODELS))}")
    return MODELS[name](steps=steps, seed=seed)
