"""Does the benchmark of the ``cpu`` tier measure what it says? Here on the CPU, at tiny sizes, with a disk in the place of pinned memory."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import punar
from tests.benchmarks.test_peers import BENCHMARKS, module

RUNS = ["plain", "save_on_cpu", "punar, recomputing", "punar, recomputing and moving"]


class Cpu:
    """Stands for the GPU; peaks are a meter's."""

    name = "cpu"

    def __init__(self, folder: Path) -> None:
        self.place = f"disk:{folder}"
        self.settled = 0

    def settle(self) -> None:
        self.settled += 1

    def allocated(self) -> int:
        return 0

    def peak_of(self, step: Callable[[], object]) -> int:
        step()
        return 1


@pytest.fixture
def cuda_offload(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PUNAR_CACHE", "off")
    monkeypatch.delitem(sys.modules, "offload", raising=False)
    found = module("cuda_offload", monkeypatch)
    assert Path(str(found.__file__)).parent == BENCHMARKS
    return found


def test_all_runs(cuda_offload: ModuleType, tmp_path: Path) -> None:
    cpu = Cpu(tmp_path)
    subject = cuda_offload.made("tiny", 0.5, cpu)
    results = cuda_offload.compare(subject, cpu, argparse.Namespace(budget=0.5, rounds=1))
    assert [result.run for result in results] == RUNS
    assert all(result.is_identical for result in results)
    assert results[0].time_ratio == 1
    assert results[1].moved_bytes > 0
    assert all(len(cuda_offload.cells(result)) == len(cuda_offload.HEADER) for result in results)
    assert cpu.settled > 0


def test_what_differs_is_said(cuda_offload: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Cpu(tmp_path)
    assert cuda_offload.check(cuda_offload.made("tiny", 0.2, cpu), cpu, 0.5) == []
    stop = punar.Remat.__exit__

    def wrong(self: punar.Remat, *error: Any) -> None:
        stop(self, *error)
        for parameter in parameters:
            parameter.grad = None if parameter.grad is None else parameter.grad + 1

    subject = cuda_offload.made("tiny", 0.2, cpu)
    parameters = list(subject.model.parameters())
    monkeypatch.setattr(punar.Remat, "__exit__", wrong)
    assert "differ from the plain step's" in cuda_offload.check(subject, cpu, 0.5)[0]


@pytest.mark.parametrize(("step_s", "share"), [(1.0, 1.0), (1.1, 1.0), (1.15, 0.5), (1.2, 0.0), (3.0, 0.0)])
def test_the_share_that_is_hidden(cuda_offload: ModuleType, step_s: float, share: float) -> None:
    plan = argparse.Namespace(time_ns=1_150_000_000, plain_time_ns=1_000_000_000, stall_ns=50_000_000, copy_ns=100_000_000)
    assert cuda_offload.hidden(plan, 1.0, step_s) == pytest.approx(share)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device() -> None:
    ended = subprocess.run([sys.executable, str(BENCHMARKS / "cuda_offload.py")], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "found no CUDA device here" in ended.stderr
    assert ended.stdout == ""
