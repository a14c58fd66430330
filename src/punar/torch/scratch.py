"""What operators allocate and free inside one call, from the profiler's memory events. CPU only: CUDA's allocator keeps statistics.

An operator's scratch is invisible from outside: convolutions, attention and their backwards can take more of it than their outputs.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import profiler

_MARK = "punar::op"

_one_at_a_time = threading.Lock()
"""There is one profiler in a process; a second thread that traces meanwhile does without."""


_parked: list[Any] = []
"""A profile that goes on until no operator is running."""


def end_parked() -> None:
    """Ends a parked profile; to be called outside of operators."""
    while _parked:
        try:
            _parked.pop().__exit__(None, None, None)
        finally:
            _one_at_a_time.release()


def _profile() -> Any:
    profile = profiler.profile(use_device=None, profile_memory=True, use_kineto=True)
    profile.__enter__()
    return profile


@lru_cache(maxsize=1)
def _spend_warning() -> None:
    """Lets the profiler print its warnings where nobody sees them: that a block it does not know was freed, that its first thread is not the main one.

    Every block that is older than the profile raises the first, once a process; neither says anything of use to whom profiles only what is new.
    """
    block = torch.empty(1)
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            profile = _profile()
            del block
            profile.__exit__(None, None, None)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


class ScratchProbe:
    """Runs the profiler beside a traced step; a mark around each operator tells its memory events apart.

    Does nothing where a profiler is running already: then operators are taken to need their outputs alone.
    """

    def __init__(self) -> None:
        self.profile: Any = None
        self.marks: list[int] = []

    def start(self) -> None:
        if not torch._C._autograd._profiler_enabled() and _one_at_a_time.acquire(blocking=False):
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when profiling first begins: it would announce itself on stderr
            _spend_warning()
            self.profile = _profile()

    def mark(self, op: int) -> AbstractContextManager[Any]:
        """Surrounds the call of operator number ``op``."""
        if self.profile is None:
            return nullcontext()
        self.marks.append(op)
        return torch._C._profiler._RecordFunctionFast(_MARK)

    def stop(self) -> dict[int, int]:
        """Ends profiling; for each marked operator the most bytes that it had allocated above its start."""
        if self.profile is None:
            return {}
        profile, self.profile = self.profile, None
        try:
            profile.__exit__(None, None, None)
        finally:
            _one_at_a_time.release()
        return self._peaks(profile.kineto_results.events())

    def park(self) -> None:
        """Gives up what was seen, inside an operator's call, where profiling must not end: the profiler writes to what it keeps of the call when that returns."""
        if self.profile is not None:
            _parked.append(self.profile)
            self.profile = None

    def _peaks(self, events: Any) -> dict[int, int]:
        windows: list[tuple[int, int]] = []
        memory: list[tuple[int, int, int]] = []
        for place, event in enumerate(events):
            name = event.name()
            if name == _MARK:
                windows.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            elif name == "[memory]":
                memory.append((event.start_ns(), place, event.nbytes()))
        windows.sort()
        memory.sort()
        peaks, cursor = {}, 0
        for op, (start, end) in zip(self.marks, windows, strict=False):
            while cursor < len(memory) and memory[cursor][0] < start:
                cursor += 1
            live = peak = 0
            while cursor < len(memory) and memory[cursor][0] <= end:
                live += memory[cursor][2]
                peak = max(peak, live)
                cursor += 1
            peaks[op] = peak
        return peaks
