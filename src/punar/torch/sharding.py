"""A step whose parameters, gradients and optimizer state are spread over several devices, as one of the devices sees it.

Source:
    Rajbhandari, Rasley, Ruwase and He, 2020, ZeRO: memory optimizations toward training trillion parameter models, arXiv:1910.02054 (stage 3).
    What is gathered at a time is as in torch's FSDP2: each block is a unit of its own, the next one is fetched beside it, and what is in no
    block stays gathered. Deviation: communication takes no time here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from punar.ir import Trace
from punar.torch.fake import FakeStep

_GATHERED_BLOCKS = 2
"""The block that computes and the one that is fetched for it."""


def sharded(step: FakeStep, model: nn.Module, shards: int) -> Trace:
    """The trace of one of ``shards`` devices, each with its share of parameters and gradients, and all of the activations of its own batch.

    A gradient is whole while the operator that makes it runs, and a share of it afterwards.
    """
    trace = step.trace
    if shards == 1:
        return trace
    whole = sum(trace.storages[number].bytes for number in step.parameters)
    resident = trace.resident_bytes - whole + _share(whole, shards) + min(gathered_bytes(model), whole)
    storages = tuple(replace(s, bytes=_share(s.bytes, shards)) if s.id in step.gradients and not s.is_source else s for s in trace.storages)
    kept = sum(trace.storages[number].bytes for number in step.gradients if trace.storages[number].is_source)
    meta = trace.meta | {"shards": str(shards), "source_bytes": str(int(trace.meta["source_bytes"]) - trace.resident_bytes + resident)}
    return replace(trace, storages=storages, resident_bytes=resident - kept + _share(kept, shards), meta=meta)


def gathered_bytes(model: nn.Module) -> int:
    """The most bytes of whole parameters that a device has at a time: those in no block, and the two largest blocks."""
    blocks = [_bytes_of(block.parameters()) for block in _blocks(model)]
    return _bytes_of(model.parameters()) - sum(blocks) + sum(sorted(blocks)[-_GATHERED_BLOCKS:])


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost elements of the model's lists of modules."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return list(module.children())
    return [block for child in module.children() for block in _blocks(child)]


def _bytes_of(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _share(nbytes: int, shards: int) -> int:
    return -(-nbytes // shards)
