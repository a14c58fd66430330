"""The peers, as patches of a model's blocks that can be put on and taken off: same weights, same process.

Source: ``checkpoint`` and ``checkpoint_sequential``: Chen, Xu, Zhang, Guestrin 2016, Training deep nets with sublinear memory cost,
arXiv:1604.06174, in ``torch.utils.checkpoint``. Selective checkpointing: Korthikanti et al. 2022, Reducing activation recomputation in large
transformer models, arXiv:2205.05198, with the operator lists that torchtitan's users start from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from peers.models import Subject

Forward = Callable[..., Any]
Patch = Callable[[], AbstractContextManager[None]]

_aten = torch.ops.aten
PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
ATTENTION = {_aten._scaled_dot_product_flash_attention_for_cpu.default}
HEAVY = PRODUCTS | ATTENTION | {_aten.convolution.default}


def patches_of(subject: Subject) -> dict[str, Patch]:
    """Every peer that this model and this environment allow, by name."""
    blocks = subject.blocks
    found: dict[str, Patch] = {"checkpoint": partial(replaced, blocks, checkpointed)}
    for step in (2, 3, 4):
        found[f"checkpoint, every {step}"] = partial(replaced, blocks[::step], checkpointed)
    if subject.is_chain:
        for segments in sorted({round(len(blocks) ** 0.5), len(blocks) // 2} - {0, 1}):
            found[f"sequential, {segments} segments"] = partial(in_segments, blocks, segments)
    found["selective, heavy"] = partial(replaced, blocks, partial(selective, HEAVY, ()))
    found["selective, every 2nd product"] = partial(replaced, blocks, partial(selective, HEAVY, PRODUCTS))
    if subject.has_attention:
        found["selective, attention"] = partial(replaced, blocks, partial(selective, ATTENTION, ()))
    return found | remat_patches(subject) | fairscale_patches(subject)


# -- patching ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def replaced(modules: Sequence[nn.Module], wrap: Callable[[Forward], Forward]) -> Iterator[None]:
    """Each module runs ``wrap(forward)`` in place of its ``forward`` while the block lasts."""
    for module in modules:
        module.forward = wrap(module.forward)
    try:
        yield
    finally:
        restore(modules)


def restore(modules: Sequence[nn.Module]) -> None:
    """Gives each module its class's ``forward`` back."""
    for module in modules:
        module.__dict__.pop("forward", None)


# -- torch's own -------------------------------------------------------------------------------------------------------------------


def checkpointed(forward: Forward) -> Forward:
    return partial(checkpoint, forward, use_reentrant=False)


def selective(saved: set[Any], halved: Sequence[Any] | set[Any], forward: Forward) -> Forward:
    """Checkpoints a block without the operators in ``saved``; of those in ``halved``, every second runs again."""

    def contexts() -> Any:
        seen = {False: count(1), True: count(1)}

        def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if func in halved and next(seen[context.is_recompute]) % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if func in saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


@contextmanager
def in_segments(blocks: Sequence[nn.Module], segments: int) -> Iterator[None]:
    """The first block runs the whole chain through ``checkpoint_sequential``, with the arguments that it was given; the others pass on what they get."""
    forwards = [block.forward for block in blocks]

    def run_chain(x: Any, *args: Any, **kwargs: Any) -> Any:
        calls = [lambda y, forward=forward: forward(y, *args, **kwargs) for forward in forwards]
        return checkpoint_sequential(calls, segments, x, use_reentrant=False)

    blocks[0].forward = run_chain
    for block in blocks[1:]:
        block.forward = lambda x, *args, **kwargs: x
    try:
        yield
    finally:
        restore(blocks)


# -- packages ----------------------------------------------------------------------------------------------------------------------


def remat_patches(subject: Subject) -> dict[str, Patch]:
    """torch_remat, each block a region; on the GPT also with the annotations that keep attention's and the wide layer's output."""
    try:
        import torch_remat
    except ImportError:
        skip("torch_remat")
        return {}

    def region(forward: Forward) -> Forward:
        return torch_remat.checkpoint(region_name="block")(forward)

    def annotated(forward: Forward) -> Forward:
        block = forward.__self__  # type: ignore[attr-defined]

        def body(x: Any) -> Any:
            mixed = torch_remat.region(block.attention, "attention", recompute=False)(block.norm1(x))
            torch_remat.recompute_needs_tensor(mixed)
            x = x + mixed
            wide = torch_remat.region(block.mlp[0], "wide", recompute=False)(block.norm2(x))
            torch_remat.recompute_needs_tensor(wide)
            return x + block.mlp[2](block.mlp[1](wide))

        return torch_remat.checkpoint(region_name="block")(body)

    found: dict[str, Patch] = {"torch_remat": partial(replaced, subject.blocks, region)}
    if subject.name in ("gpt", "tiny"):
        found["torch_remat, annotated"] = partial(replaced, subject.blocks, annotated)
    return found


def fairscale_patches(subject: Subject) -> dict[str, Patch]:
    """fairscale's ``checkpoint_wrapper`` around each block."""
    try:
        from fairscale.nn import checkpoint_wrapper
    except ImportError:
        skip("fairscale")
        return {}

    @contextmanager
    def wrapped() -> Iterator[None]:
        for block in subject.blocks:
            checkpoint_wrapper(block)  # replaces the module's forward in place
        try:
            yield
        finally:
            restore(subject.blocks)

    return {"fairscale": wrapped}


def skip(package: str) -> None:
    print(f"skipping {package}: it is not installed; pip install '.[bench]' installs it", file=sys.stderr)
