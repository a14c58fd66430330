"""Who holds the bytes at the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields

from punar.ir.trace import Trace
from punar.plan.playback import Holding, Peak
from punar.reporting.explain.gradients import gradients_before
from punar.reporting.explain.places import module_of, pattern_of

OPTIMIZER, GRADIENTS, OTHER = "(optimizer's state)", "(gradients from before)", "(other resident)"
"""Stand for modules where bytes are resident and belong to none that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What one module, or the same part of repeated ones, holds at the peak. Units: bytes, predicted.

    Attributes:
        module: its path; numbers that differ between repeated modules are ``*``. modules: how many they are.
        resident_bytes: there before the step: parameters, buffers, the batch.
        activation_bytes: made in forward and held. encoded_bytes: the same, in fewer bytes.
        recomputed_bytes: made again by replays, read back, or copied before it was overwritten.
        backward_bytes: made in backward: gradients.
        running_bytes: what the operator that runs allocates.
    """

    module: str
    modules: int = 1
    resident_bytes: int = 0
    activation_bytes: int = 0
    encoded_bytes: int = 0
    recomputed_bytes: int = 0
    backward_bytes: int = 0
    running_bytes: int = 0

    @property
    def bytes(self) -> int:
        return sum(getattr(self, name) for name in PARTS)


PARTS = tuple(field.name for field in fields(Holder) if field.name.endswith("_bytes"))
"""The fields that a holder's bytes are the sum of."""


def holders_at(trace: Trace, peak: Peak) -> tuple[Holder, ...]:
    """One holder a module, the largest first. Their bytes add up to the peak's."""
    table: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for module, size in _resident(trace):
        table[module]["resident_bytes"] += size
    for holding in peak.holdings:
        table[module_of(trace, holding.op)][_part(trace, holding)] += holding.bytes
    table[module_of(trace, peak.op)]["running_bytes"] += peak.own_bytes
    return _sorted(Holder(module=module, **parts) for module, parts in table.items())


def grouped(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    """The same with one holder for each part of repeated modules."""
    groups: dict[str, list[Holder]] = defaultdict(list)
    for holder in holders:
        groups[pattern_of(holder.module)].append(holder)
    return _sorted(
        Holder(module=module, modules=len(members), **{name: sum(getattr(m, name) for m in members) for name in PARTS})
        for module, members in groups.items()
    )


def _sorted(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    return tuple(sorted((holder for holder in holders if holder.bytes), key=lambda holder: (-holder.bytes, holder.module)))


def _part(trace: Trace, holding: Holding) -> str:
    if holding.form == "original":
        return "backward_bytes" if trace.ops[holding.op].is_backward else "activation_bytes"
    return f"{holding.form}_bytes"


def _resident(trace: Trace) -> list[tuple[str, int]]:
    """What was there before the step, by the module that first read it; what no module read, by what it is."""
    left = trace.resident_bytes
    found = []
    for title, known in ((OPTIMIZER, int(trace.meta.get("optimizer_bytes", 0))), (GRADIENTS, gradients_before(trace))):
        size = min(left, known)
        found.append((title, size))
        left -= size
    read = [(storage.module, storage.bytes) for storage in trace.storages if storage.is_source and storage.module]
    if sum(size for _, size in read) <= left:  # else some of it came during the step, and nobody knows what is whose
        found += read
        left -= sum(size for _, size in read)
    return [*found, (OTHER, left)]
