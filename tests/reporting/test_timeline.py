"""Is a timeline a valid trace event file, and does it show what the simulator says?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from punar.errors import PlanError
from punar.ir import Trace
from punar.plan import Plan, make_plan
from punar.plan.moves import Channel, Move
from punar.reporting.timeline import BACKWARD, FIRST_CHANNEL, FORWARD, REPLAY, Timeline
from tests.synthetic import transformer

REQUIRED = {
    "X": {"name": str, "ts": (int, float), "dur": (int, float), "pid": int, "tid": int},
    "C": {"name": str, "ts": (int, float), "pid": int, "args": dict},
    "i": {"name": str, "ts": (int, float), "pid": int, "tid": int, "s": str},
    "M": {"name": str, "pid": int, "args": dict},
}
"""The fields that the trace event format asks of each phase, with their types."""

DISK = Channel(name="disk:/x", capacity_bytes=1 << 40, write_bytes_per_s=10**9, read_bytes_per_s=10**9)
TRACE = transformer(3)


def plan_with_moves(trace: Trace) -> Plan:
    """Drops what the first two blocks can drop, but for one value, which moves."""
    early = [value for op in trace.forward_ops[2:12] for value in op.outputs]
    moved = trace.ops[1].outputs[0]
    hold = [int(value.id in early) for value in trace.values]
    moves = (Move(value=moved, land=14, fetch=0),)
    return make_plan(trace, hold, solver="greedy", budget_bytes=1 << 30, moves=moves, channels=(DISK,))


def events_of(timeline: Timeline, tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "step.json"
    timeline.save(path)
    body = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(body["traceEvents"], list)
    return list(body["traceEvents"])


@pytest.mark.parametrize("plan", [None, plan_with_moves(TRACE)], ids=["plain", "plan"])
def test_every_event_has_what_the_format_requires(plan: Plan | None, tmp_path: Path) -> None:
    events = events_of(Timeline.of(TRACE, plan), tmp_path)
    assert {event["ph"] for event in events} == set(REQUIRED)
    for event in events:
        for name, kind in REQUIRED[event["ph"]].items():
            assert isinstance(event[name], kind), (name, event)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in events if event["ph"] == "X"} <= named


def test_what_runs_is_on_its_own_track(tmp_path: Path) -> None:
    plan = plan_with_moves(TRACE)
    events = events_of(Timeline.of(TRACE, plan), tmp_path)
    on = {track: [event for event in events if event["ph"] == "X" and event["tid"] == track] for track in range(1, 5)}
    assert len(on[FORWARD]) + len(on[BACKWARD]) == len(TRACE.ops)
    assert len(on[REPLAY]) == plan.replayed_ops > 0
    assert [event["name"].split(":")[0] for event in on[FIRST_CHANNEL]] == ["copy out", "copy in"]
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == pytest.approx(plan.time_ns / 1000)


def test_the_counter_reaches_the_predicted_peak(tmp_path: Path) -> None:
    plan = plan_with_moves(TRACE)
    events = events_of(Timeline.of(TRACE, plan), tmp_path)
    counters = [event for event in events if event["ph"] == "C"]
    assert max(event["args"]["bytes"] for event in counters) == plan.peak_bytes
    (peak,) = (event for event in events if event["ph"] == "i")
    assert plan.peak_bytes in [event["args"]["bytes"] for event in counters if event["ts"] == peak["ts"]]


def test_a_path_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="asked to write"):
        Timeline.of(TRACE).save(tmp_path / "none" / "step.json")
