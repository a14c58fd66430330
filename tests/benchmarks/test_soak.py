"""Does the soak find what rises, and is nothing found where nothing does? Here for seconds."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.test_peers import module


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        return module("soak", patch)


def test_all_troubles_come_and_nothing_is_left(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So short a run says nothing of the resident set, nor of what is allocated."""
    monkeypatch.setattr(soak, "SHAPES", (64, 128))
    monkeypatch.setattr(soak, "RENEWED", 7)
    monkeypatch.setattr(soak, "THREADED", 5)
    for name in ("allocated_bytes", "resident_bytes"):
        monkeypatch.setitem(soak.SLACK, name, 1 << 40)
    threads = torch.get_num_threads()
    assert soak.main(["--seconds", "1000", "--steps", "72", "--counts", "9", "--json"]) == 0
    torch.set_num_threads(threads)
    body = json.loads(capsys.readouterr().out)
    assert (body["rising"], body["different"], len(body["counts"])) == ({}, [], 9)
    assert list(body["strands"]) == ["Shapes", "OutOfMemory", "DiskFull", "OtherPlans", "Interrupts", "Threads"]
    assert all(strand["steps"] >= 12 for strand in body["strands"].values())
    assert body["strands"]["DiskFull"]["seen"] > 0
    assert body["strands"]["Threads"]["events"] > 0


@pytest.mark.parametrize("name", ["OutOfMemory", "DiskFull", "Interrupts"])
def test_a_trouble_happens(name: str, soak: ModuleType, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    torch.set_num_threads(1)
    strand = next(s for s in soak.strands(str(tmp_path), 3, is_leaking=False) if type(s).__name__ == name)
    strand.steps = 38  # the disk is full from the 41st step on
    for _ in range(60):
        strand.step()
        if strand.events + (strand.see() if name == "OutOfMemory" else 0) >= 2:
            break
    assert strand.events + strand.see() >= 2
    assert strand.is_equal()


def test_a_leak_is_found(soak: ModuleType, tmp_path: Path) -> None:
    leaking = soak.strands(str(tmp_path), 0, is_leaking=True)[-1]
    counts = list(soak.soak([leaking], seconds=1000, most_steps=18, counts=9))
    rises = soak.rising(counts)
    assert rises["tensor_bytes"][1] - rises["tensor_bytes"][0] == 6 * 1024  # two steps a count, three counts further on


def test_weights_that_differ_are_found(soak: ModuleType, tmp_path: Path) -> None:
    strand = soak.strands(str(tmp_path), 0, is_leaking=False)[-1]
    assert strand.is_equal()
    with torch.no_grad():
        next(strand.model.parameters())[0] += 1e-6
    assert not strand.is_equal()


@given(st.lists(st.integers(0, 1000), min_size=9, max_size=30), st.integers(1, 50))
def test_what_rises_is_what_is_higher_at_the_end(soak: ModuleType, heights: list[int], step: int) -> None:
    def counted(values: list[int]) -> object:
        names = {"seconds": 0.0, "steps": 0, "tensor_bytes": 0, "descriptors": 0, "children": 0, "allocated_bytes": 0, "resident_bytes": 0}
        return [soak.Count(**names, threads=value) for value in values]

    assert ("threads" in soak.rising(counted([k * step for k in range(len(heights))]))) is True
    assert soak.rising(counted([7] * len(heights))) == {}
    falling = sorted(heights, reverse=True)
    assert soak.rising(counted(falling)) == {}
