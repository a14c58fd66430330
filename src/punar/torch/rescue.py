"""What a step that ran out of memory is repeated under, and when a looser plan may be tried again."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from punar.ir import Trace

_ALLOCATORS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "STATUS_ALLOC_FAILED",
    "error: out of memory",
)
"""How torch's CPU allocator, NVIDIA's libraries and its driver say that memory ran out, in a ``RuntimeError``."""

TIGHTER = 0.8
"""The next plan reaches at most so much of the failed one's peak, of what is not resident."""

PATIENCE, MOST_PATIENCE = 16, 1024
"""After so many steps without a rescue the looser plan is tried again, twice as many each time that it fails, up to so many."""


@dataclass(frozen=True, slots=True)
class CutRecording:
    """A step that ran out of memory while it was recorded.

    ``trace``: as far as it came, with a backward pass that follows from it. ``peak_bytes``: what the whole step had, or was to be kept within.
    ``is_exhausted``: nothing more of it could be dropped when it failed.
    """

    trace: Trace
    peak_bytes: int
    is_exhausted: bool


class Ladder:
    """How tight plans must be: a ceiling for their peak, lowered at each rescue and taken back a rung at a time when all is quiet.

    ``ceilings``: bytes of the whole step, the one in force last.
    """

    def __init__(self) -> None:
        self.ceilings: list[int] = []
        self.patience = PATIENCE
        self.quiet = 0
        self.is_trial = False

    @property
    def ceiling_bytes(self) -> int | None:
        """The peak that no plan may exceed now; None where there is no such limit."""
        return self.ceilings[-1] if self.ceilings else None

    def tighten(self, ceiling_bytes: int) -> None:
        """A step failed and is repeated under this ceiling."""
        if self.is_trial:
            self.patience = min(2 * self.patience, MOST_PATIENCE)
        self.ceilings.append(ceiling_bytes)
        self.quiet, self.is_trial = 0, False

    def rest(self) -> bool:
        """A step went through at once. Says whether plans may be looser from the next one on."""
        self.quiet += 1
        if self.quiet < self.patience:
            return False
        if self.is_trial:
            self.patience = PATIENCE  # the looser plan has held
        self.quiet, self.is_trial = 0, bool(self.ceilings)
        if self.is_trial:
            self.ceilings.pop()
        return self.is_trial


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATORS)


def let_go(error: BaseException) -> None:
    """Frees what a failed step left: the frames that its error's traceback holds, of which it keeps the text, garbage, and what caches keep for later."""
    add_note(error, f"Where it was raised:\n{''.join(traceback.format_tb(error.__traceback__))}")
    for each in _chain(error):
        each.__traceback__ = None
    gc.collect()
    torch.clear_autocast_cache()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came from, less one that was being handled before the step began, of which it is no part."""
    waiting, seen = [error], {id(sys.exc_info()[1])}
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting.extend(cause for cause in (each.__cause__, each.__context__) if cause is not None)


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an error; before Python 3.11 it is only kept, in ``__notes__``."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]


def is_alone() -> bool:
    """Whether this process trains by itself: where others take part, they would have to repeat the step as well."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)
