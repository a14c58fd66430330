"""Moving activations from a GPU to pinned memory: punar's choice beside recomputation alone and beside ``save_on_cpu``. One GPU, under five minutes.

    python benchmarks/cuda_offload.py [--models gpt,vit,llama] [--scale 16] [--rounds 5] [--budget 0.4] [--json]

First two models are stepped at a small scale, plain and under a budget with ``offload="cpu"``: if a gradient differs in a bit, this ends with exit status 4.
Then all runs of a model take turns, in an order that rotates, with deterministic kernels. A time is the median over the rounds of the ratio to the plain step of
the same round. A peak is what the caching allocator reached in one more step of each run (``torch.cuda.max_memory_allocated``), less what was allocated before the
model's first step. A run is said to hide the share of its copies' time, as predicted, that does not show in its step beside the plain step and the
recomputation that was predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Protocol

import torch
from offload import Run, in_turns, inside, ratio_to
from peers.models import MODELS, Subject
from torch.autograd.graph import save_on_cpu

import punar
from punar.reporting.table import format_columns
from punar.units import format_bytes

HEADER = ("model", "run", "peak", "time", "predicted", "moved", "copies hidden")

CHECKED, CHECKED_SCALE = ("gpt", "vit"), 1.0

NO_DEVICE, DIFFERENT = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one model. ``predicted_ratio``, ``hidden``: None where nothing is predicted or moved."""

    model: str
    run: str
    peak_bytes: int
    time_ratio: float
    predicted_ratio: float | None
    moved_bytes: int
    hidden: float | None
    is_identical: bool


class Device(Protocol):
    """Where the steps run. ``place``: what ``offload`` is told."""

    name: str
    place: str

    def settle(self) -> None:
        """Waits until all that was asked of it is done."""
        ...

    def allocated(self) -> int:
        """Bytes that are allocated now."""
        ...

    def peak_of(self, step: Callable[[], object]) -> int:
        """The most bytes allocated during a step."""
        ...


class Gpu:
    """The current CUDA device."""

    name, place = "cuda", "cpu"

    def settle(self) -> None:
        torch.cuda.synchronize()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def peak_of(self, step: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,vit,llama")
    parser.add_argument(
        "--scale", type=float, default=16, help="batch, in parts of that which makes a step of about two seconds on one CPU thread"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.4, help="share of the plain step's activation peak")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "this measures copies between a GPU and the computer's memory, and found no CUDA device here; run it where there is one",
            file=sys.stderr,
        )
        return NO_DEVICE
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    gpu = Gpu()
    wrong = [text for name in CHECKED for text in check(made(name, CHECKED_SCALE, gpu), gpu, options.budget)]
    for text in wrong:
        print(text, file=sys.stderr)
    if wrong:
        return DIFFERENT
    results = []
    for name in options.models.split(","):
        before = gpu.allocated()
        results += compare(made(name, options.scale, gpu), gpu, options, before)
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        print(format_columns(HEADER, [cells(result) for result in results], left=2))
    return 0 if all(result.is_identical for result in results) else DIFFERENT


def made(name: str, scale: float, device: Device) -> Subject:
    """A model with its batch on the device."""
    torch.manual_seed(0)
    with torch.device(device.name):
        return MODELS[name](scale)


def check(subject: Subject, device: Device, budget: float) -> list[str]:
    """What is wrong with a model's steps that move, in words."""
    remat = punar.Remat(budget=budget, offload=device.place)
    runs = [Run("plain", subject.step), Run("moving", inside(subject, remat))]
    _, identical = in_turns(subject, runs, 1, device.settle)
    moved = sum(step.moved_bytes for step in remat.stats)
    print(f"{subject.name}: {format_bytes(moved)} moved in {len(remat.stats)} steps", file=sys.stderr)
    if not identical["plain"]:
        return [
            f"{subject.name}: plain steps differ from one another already: their kernels are not deterministic, and nothing can be said"
        ]
    return [] if identical["moving"] else [f"{subject.name}: gradients of steps that move differ from the plain step's"]


def compare(subject: Subject, device: Device, options: argparse.Namespace, before_bytes: int = 0) -> list[Result]:
    """All runs of one model, in turn; ``before_bytes`` were allocated before it was made."""
    runs = make_runs(subject, device, options.budget)
    times, identical = in_turns(subject, runs, options.rounds, device.settle)
    results = []
    for run in runs:
        subject.model.zero_grad(set_to_none=True)
        peak_bytes = device.peak_of(run.step) - before_bytes
        results.append(result_of(subject, run, times, peak_bytes, identical[run.name]))
    return results


def make_runs(subject: Subject, device: Device, budget: float) -> list[Run]:
    alone = punar.Remat(budget=budget)
    moving = punar.Remat(budget=budget, offload=device.place)
    saved: list[int] = []

    def with_hooks() -> None:
        saved.clear()
        with counting_save_on_cpu(saved):
            subject.step()

    return [
        Run("plain", subject.step),
        Run("save_on_cpu", with_hooks, moved=lambda: 2 * sum(saved)),
        Run("punar, recomputing", inside(subject, alone), alone),
        Run("punar, recomputing and moving", inside(subject, moving), moving, lambda: moving.stats[-1].moved_bytes),
    ]


class counting_save_on_cpu(save_on_cpu):
    """Torch's own hooks, the bytes that they pack counted."""

    def __init__(self, saved: list[int]) -> None:
        super().__init__(pin_memory=True)
        pack = self.pack_hook

        def counting(tensor: torch.Tensor) -> object:
            saved.append(tensor.nbytes)
            return pack(tensor)

        self.pack_hook = counting


def result_of(subject: Subject, run: Run, times: dict[str, list[float]], peak_bytes: int, is_identical: bool) -> Result:
    plain = times["plain"]
    plan = None if run.remat is None else run.remat.plan
    return Result(
        model=subject.name,
        run=run.name,
        peak_bytes=peak_bytes,
        time_ratio=ratio_to(plain, times[run.name]),
        predicted_ratio=None if plan is None else plan.step_time_ns / 1e9 / median(plain),
        moved_bytes=run.moved(),
        hidden=None if plan is None or not plan.moves else hidden(plan, median(plain), median(times[run.name])),
        is_identical=is_identical,
    )


def hidden(plan: punar.Plan, plain_s: float, step_s: float) -> float:
    """The share of the copies' time that does not show in a step."""
    recomputed_ns = plan.time_ns - plan.plain_time_ns - plan.stall_ns
    shown_ns = (step_s - plain_s) * 1e9 - recomputed_ns
    return min(1.0, max(0.0, 1 - shown_ns / max(plan.copy_ns, 1)))


def cells(result: Result) -> tuple[str, ...]:
    return (
        result.model,
        result.run + ("" if result.is_identical else " (GRADIENTS DIFFER)"),
        format_bytes(result.peak_bytes),
        f"{result.time_ratio:.2f}x",
        "" if result.predicted_ratio is None else f"{result.predicted_ratio:.2f}x",
        format_bytes(result.moved_bytes) if result.moved_bytes else "",
        "" if result.hidden is None else f"{100 * result.hidden:.0f} %",
    )


if __name__ == "__main__":
    sys.exit(main())
