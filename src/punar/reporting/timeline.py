"""One predicted step as a timeline, in the trace event format that Perfetto and ``chrome://tracing`` open.

Source: Google, Trace Event Format, 2016 (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): complete events
(``X``), counters (``C``), an instant (``i``) at the peak, and metadata (``M``) that names the tracks. Times are microseconds there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from punar.ir.trace import Op, Trace
from punar.plan.moves import Channel, Copy
from punar.plan.plan import Plan, write_text
from punar.plan.playback import Playback, Run, play
from punar.reporting.explain import check_plan
from punar.reporting.page import memory_of
from punar.reporting.plot import plot_memory
from punar.units import format_bytes

FORWARD, BACKWARD, REPLAY, FIRST_CHANNEL = 1, 2, 3, 4
"""The tracks; each channel that values are moved to, or codec, has one of its own after them."""

_PROCESS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a step is predicted to do when: operators, replays and copies, and the bytes there are meanwhile.

    Attributes:
        title: what the step is of.
        playback: what the simulator saw. Units: nanoseconds from the step's start, bytes of the whole step.
    """

    title: str
    playback: Playback
    _trace: Trace = field(repr=False)
    _channels: tuple[Channel, ...] = field(default=(), repr=False)
    _plan: Plan | None = field(default=None, repr=False)

    @classmethod
    def of(cls, trace: Trace, plan: Plan | None = None) -> Timeline:
        """The timeline of a traced step under a plan, of the plain step where there is none.

        Raises:
            UsageError: the plan is none.
            PlanMismatch: it was made for another step.
        """
        check_plan(trace, plan)
        if plan is None:
            return cls(title=f"plain step, {trace.device}", playback=play(trace, (0,) * len(trace.values)), _trace=trace)
        if plan.resident_bytes > trace.resident_bytes:  # a Remat's plan may count more than was there when its step was recorded
            trace = replace(trace, resident_bytes=plan.resident_bytes)
        playback = play(trace, plan.hold_from, is_closed=True, moves=plan.moves, channels=plan.channels)
        title = f"step within {format_bytes(plan.budget_bytes)}, solver {plan.solver}, {trace.device}"
        return cls(title=title, playback=playback, _trace=trace, _channels=plan.channels, _plan=plan)

    def to_dict(self) -> dict[str, Any]:
        """The trace event file as JSON-able data."""
        events = [*self._names(), *map(self._run, self.playback.runs), *map(self._copy, self.playback.copies), *self._memory()]
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {
                "title": self.title,
                "is_predicted": True,
                "peak_bytes": self.playback.peak.bytes,
                "time_ns": self.playback.end_ns,
            },
        }

    def save(self, path: str | Path) -> None:
        """Writes the trace event file.

        Raises:
            PlanError: the file cannot be written.
        """
        write_text(path, json.dumps(self.to_dict()))

    def plot(self, target: Any) -> Any:
        """Draws memory over time by kind, with matplotlib; returns the axes.

        Args:
            target: the path of a file that ends in ``.png``, ``.svg`` or ``.pdf``, or axes of matplotlib's.

        Raises:
            UsageError: the target is neither.
            MissingDependency: matplotlib is not installed.
            PlanError: the file cannot be written.
        """
        return plot_memory(memory_of(self._trace, self._plan, end_ns=self.playback.end_ns), self.title, target)

    def _names(self) -> Iterator[dict[str, Any]]:
        yield {"name": "process_name", "ph": "M", "pid": _PROCESS, "tid": 0, "args": {"name": f"punar, predicted: {self.title}"}}
        tracks = ["forward", "backward", "replay"]
        tracks += [f"{'codec' if channel.is_codec else 'copies to and from'} {channel.name}" for channel in self._channels]
        for track, name in enumerate(tracks, FORWARD):
            yield {"name": "thread_name", "ph": "M", "pid": _PROCESS, "tid": track, "args": {"name": name}}
            yield {"name": "thread_sort_index", "ph": "M", "pid": _PROCESS, "tid": track, "args": {"sort_index": track}}

    def _run(self, run: Run) -> dict[str, Any]:
        op = self._trace.ops[run.op]
        track = REPLAY if run.is_replay else BACKWARD if op.is_backward else FORWARD
        return _complete(op.name, track, run.start_ns, run.takes_ns, _about(op, self._trace))

    def _copy(self, copy: Copy) -> dict[str, Any]:
        channel, value = self._channels[copy.tier], self._trace.values[copy.value]
        verb = ("encode" if copy.is_out else "decode") if channel.is_codec else ("copy out" if copy.is_out else "copy in")
        maker = self._trace.ops[value.producer]
        about = _about(maker, self._trace) | {"bytes": self._trace.storages[value.storage].bytes}
        return _complete(f"{verb}: {maker.name}", FIRST_CHANNEL + copy.tier, copy.start_ns, copy.takes_ns, about)

    def _memory(self) -> Iterator[dict[str, Any]]:
        is_told = False
        for time_ns, size in self.playback.memory:
            yield {"name": "memory", "ph": "C", "ts": time_ns / 1000, "pid": _PROCESS, "args": {"bytes": size}}
            if size == self.playback.peak.bytes and not is_told:
                is_told = True
                name = f"peak {format_bytes(size)}"
                yield {"name": name, "ph": "i", "ts": time_ns / 1000, "pid": _PROCESS, "tid": FORWARD, "s": "p"}


def _complete(name: str, track: int, start_ns: int, takes_ns: int, about: dict[str, Any]) -> dict[str, Any]:
    """A complete event: something that has a beginning and a length."""
    return {"name": name, "ph": "X", "ts": start_ns / 1000, "dur": takes_ns / 1000, "pid": _PROCESS, "tid": track, "args": about}


def _about(op: Op, trace: Trace) -> dict[str, Any]:
    """What is shown when an event is selected: names and sizes, no contents."""
    origin = trace.ops[op.forward] if op.forward >= 0 else op
    about: dict[str, Any] = {"module": origin.module, "source": origin.source, "allocates_bytes": op.peak_bytes}
    return {name: content for name, content in about.items() if content != ""}
