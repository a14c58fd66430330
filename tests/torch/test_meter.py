"""Does the meter count what the allocator hands out?

Two witnesses: the profiler's memory events, to the byte; and malloc itself, through a library preloaded into a process of its own, up to what
it rounds each block.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import punar
from tests.torch.harness import RandomRemat, assert_nothing_lives

ROOT = Path(__file__).parents[2]


def feed_forward() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(3))
    )


def convolutions() -> nn.Module:
    layers = [
        nn.Unflatten(1, (1, 64)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.ReLU(inplace=True),
        nn.Conv1d(4, 4, 3, padding=1),
        nn.Tanh(),
    ]
    return nn.Sequential(*layers, nn.Flatten())


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (8, 8)), nn.GRU(8, 8, batch_first=True), _First(), nn.Flatten())


class _First(nn.Module):
    def forward(self, outputs: tuple[Tensor, ...]) -> Tensor:
        return outputs[0]


MODELS = [feed_forward, convolutions, recurrent]


def profiled_peak(step: Callable[[], None]) -> int:
    """The most bytes allocated above the start, by the profiler's account."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = found.profiler.kineto_results.events()
    live = peak = 0
    for _, _, nbytes in sorted((e.start_ns(), place, e.nbytes()) for place, e in enumerate(events) if e.name() == "[memory]"):
        live += nbytes
        peak = max(peak, live)
    return peak


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "remat", [lambda: punar.Remat(), lambda: punar.Remat(budget="min"), lambda: RandomRemat(1, 0.2)], ids=["plain", "min", "random"]
)
@pytest.mark.parametrize("build", MODELS)
def test_equals_the_profilers_memory_events(build: Callable[[], nn.Module], remat: Callable[[], punar.Remat]) -> None:
    model, batch, used = build(), torch.randn(32, 64), remat()

    def step() -> None:
        with used:
            model(batch).square().mean().backward()

    for _ in range(2):
        step()
        model.zero_grad()
    peak = profiled_peak(step)
    meter = used._session.meter
    assert used.stats[-1].measured_peak_bytes - meter.resident == meter.peak
    assert abs(peak - meter.peak) <= 1024  # the tensors on which the profiler and the tape themselves work are a few bytes large
    assert meter.peak > 10_000


def test_counts_what_operators_make_inside_one_another() -> None:
    """One loss function runs many operators in C++; each storage they make is seen, and its end too."""
    remat = punar.Remat()
    inputs, target = torch.randn(64, 100, requires_grad=True), torch.randint(0, 100, (64,))
    with remat:
        loss = nn.functional.cross_entropy(inputs, target, label_smoothing=0.1)
        during = remat._session.meter.live
        loss.backward()
    assert during >= 64 * 100 * 4  # the logarithms of the probabilities, which no Python code ever held
    inputs.grad = None
    del loss, inputs, target
    assert_nothing_lives(remat)


ALLOCATOR_SCRIPT = """
import ctypes, gc, sys
import torch
from torch import nn
import punar

torch.set_num_threads(1)
witness = ctypes.CDLL(sys.argv[1])
for name in ("allocations_live", "allocations_peak"):
    getattr(witness, name).restype = ctypes.c_long
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256), nn.Tanh()) for _ in range(4)]
model, batch = nn.Sequential(*blocks), torch.randn(512, 256)
remat = punar.Remat(budget=sys.argv[2] if sys.argv[2] != "none" else None)
for _ in range(4):
    model.zero_grad()
    gc.collect()
    before = witness.allocations_live()
    witness.allocations_restart()
    with remat:
        model(batch).square().mean().backward()
    peak, left = witness.allocations_peak() - before, witness.allocations_live() - before
print(peak, left, remat._session.meter.peak, remat._session.meter.live, remat.stats[-1].replayed_operators)
"""


@pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="needs gcc and glibc, to build the allocator's witness")
@pytest.mark.parametrize("budget", ["none", "min"])
def test_equals_the_allocator(budget: str, tmp_path: Path) -> None:
    witness = tmp_path / "allocations.so"
    source = ROOT / "benchmarks" / "peers" / "allocations.c"
    command = ["gcc", "-O2", "-DLEAST=65536", "-shared", "-fPIC", "-o", str(witness), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    environment = os.environ | {"LD_PRELOAD": str(witness), "PYTHONPATH": os.pathsep.join(sys.path), "KINETO_LOG_LEVEL": "99"}
    command = [sys.executable, "-c", ALLOCATOR_SCRIPT, str(witness), budget]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=ROOT)
    peak, left, meter_peak, meter_live, replayed = map(int, ran.stdout.split())
    assert abs(peak - meter_peak) <= 0.01 * meter_peak  # blocks are rounded, and those below 64 KiB are not counted
    assert abs(left - meter_live) <= 0.01 * meter_live
    assert (replayed > 0) == (budget == "min")
