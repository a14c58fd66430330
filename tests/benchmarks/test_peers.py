"""Does the comparison with the peers measure what it says, and add up what it measured?"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

RESULT_KEYS = {
    "model",
    "scale",
    "rounds",
    "threads",
    "torch",
    "memory_by",
    "plain_peak_bytes",
    "runs",
    "predicted_frontier",
    "points",
    "known",
}
POINT_KEYS = {"peer", "family", "memory_ratio", "time_ratio", "at_its_memory", "at_its_time", "plain_memory_to_peer"}


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One round of the tiny model, in the processes that a user's call starts."""
    out = tmp_path_factory.mktemp("peers")
    options = ["--model=tiny", "--scale=0.25", "--rounds=1", f"--out={out}"]
    command = [sys.executable, str(BENCHMARKS / "peers.py"), *options]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert "our time no worse at" in (out / "summary.md").read_text(encoding="utf-8")
    assert json.loads((out / "summary.json").read_text(encoding="utf-8"))["models"] == ["tiny"]
    return json.loads((out / "tiny.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_writes_the_keys_that_readers_need(results: dict[str, Any]) -> None:
    """Is everything there that the table and the figure read?"""
    assert results.keys() >= RESULT_KEYS
    assert {"checkpoint", "checkpoint, every 2", "selective, heavy", "sequential, 2 segments"} <= {p["peer"] for p in results["points"]}
    for point in results["points"]:
        assert point.keys() == POINT_KEYS


@pytest.mark.slow
def test_every_run_computes_the_plain_steps_gradients(results: dict[str, Any]) -> None:
    """Do the peers, and punar, do the work that they are timed at?"""
    runs = {run["name"]: run for run in results["runs"]}
    assert not [name for name, run in runs.items() if run["error"]]
    assert not [name for name, run in runs.items() if not run["is_identical"] or run["gradient_error"] > 0]
    assert any(name.startswith("punar") and run["replayed_operators"] > 0 for name, run in runs.items())
    assert runs["checkpoint, every 2"]["peak_bytes"] < runs["plain"]["peak_bytes"]


@pytest.mark.slow
def test_punar_is_given_no_more_than_a_peer_used(results: dict[str, Any]) -> None:
    """Is each comparison at a peer's memory within that memory, by measure, and each at its time within that time?"""
    at_memory = [point["at_its_memory"] for point in results["points"] if point["at_its_memory"]]
    at_time = [point["at_its_time"] for point in results["points"] if point["at_its_time"]]
    assert at_memory
    assert max(found["memory_to_peer"] for found in at_memory) <= 1
    assert all(found["time_to_peer"]["median"] <= 1 for found in at_time)


def point(theirs: float, ours: float | None, memory: float | None) -> dict[str, Any]:
    """A peer of half the plain memory that takes ``theirs``; punar takes ``ours`` there and ``memory`` of the peer's at its time."""
    spread = {"median": 0.0, "low": 0.0, "high": 0.0}
    at_memory = None
    if ours is not None:
        ratio = ours / theirs
        at_memory = {"time_ratio": spread | {"median": ours}, "time_to_peer": {"median": ratio, "low": ratio - 0.01, "high": ratio + 0.01}}
    at_time = None if memory is None else {"memory_to_peer": memory}
    return {"time_ratio": spread | {"median": theirs}, "at_its_memory": at_memory, "at_its_time": at_time, "plain_memory_to_peer": 2.0}


def test_totals_count_what_punar_cannot_do_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three points: one won, one lost, one that no plan of punar's reaches. What do the counts and medians say?"""
    totals = module("peers.summary", monkeypatch).totals
    found = totals([point(1.2, 1.1, 0.8), point(1.2, 1.3, 1.1), point(1.3, None, None)])
    assert (found["points"], found["time_no_worse"], found["memory_lower"]) == (3, 1, 1)
    assert (found["time_better_beyond_noise"], found["time_worse_beyond_noise"]) == (1, 2)
    assert found["median_overhead_reduction"] == pytest.approx(0.0)  # one half saved, one half more
    assert found["median_memory_reduction"] == pytest.approx(-0.1)  # 0.8, 1.1 and the plain step's 2.0


def test_a_ratio_pairs_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is a slow round of the machine taken out by the other run's time in the same round?"""
    ratio = module("peers.measure", monkeypatch).Ratio.of([1.1, 11.0, 2.2], [1.0, 10.0, 2.0])
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.1, 1.1, 1.1))


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    """What does a wrong name say?"""
    command = [sys.executable, str(BENCHMARKS / "peers.py"), "--model=gtp", f"--out={tmp_path}"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert "asked for the model gtp; there are gpt, gpt2" in ran.stderr
