"""A table by module: what each holds at the peak, and what it takes in time, plain and under a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from punar.ir.trace import Trace
from punar.plan.playback import Playback
from punar.reporting.explain.choices import Choice
from punar.reporting.explain.holders import grouped, holders_at
from punar.reporting.explain.places import module_of, pattern_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One module, or the same part of repeated ones: numbers that differ between them are ``*``. Units: bytes, nanoseconds, predicted.

    Attributes:
        plain_bytes, planned_bytes: what it holds at the peak of the plain step, and of the planned one.
        kept_bytes, recomputed_bytes, moved_bytes, compressed_bytes: what becomes under the plan of what it makes and backward needs.
        forward_ns, backward_ns, replay_ns: what its operators take.
    """

    module: str
    plain_bytes: int = 0
    planned_bytes: int = 0
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    moved_bytes: int = 0
    compressed_bytes: int = 0
    forward_ns: int = 0
    backward_ns: int = 0
    replay_ns: int = 0


def modules_of(trace: Trace, plain: Playback, planned: Playback, choices: Iterable[Choice]) -> tuple[ModuleRow, ...]:
    """One row for each part of the model, what holds most at the planned peak first.

    Args:
        choices: of the plan, or of the plain step.
    """
    table: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, seen in (("plain_bytes", plain), ("planned_bytes", planned)):
        for holder in grouped(holders_at(trace, seen.peak)):
            table[holder.module][name] += holder.bytes
    for choice in choices:
        table[choice.module][f"{choice.action}_bytes"] += choice.bytes
    for run in planned.runs:
        phase = "replay" if run.is_replay else "backward" if trace.ops[run.op].is_backward else "forward"
        table[pattern_of(module_of(trace, run.op))][f"{phase}_ns"] += run.takes_ns
    rows = (ModuleRow(module=module, **numbers) for module, numbers in table.items())
    return tuple(sorted(rows, key=lambda row: (-row.planned_bytes, -row.plain_bytes, row.module)))
