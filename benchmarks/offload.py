"""Moving activations to disk: punar's choice beside recomputation alone and beside hooks that write every saved tensor and wait.

    python benchmarks/offload.py [--models gpt,llama,vit] [--scale 2] [--rounds 5] [--budget 0.4] [--folder /tmp] [--threads 1] [--json]

All runs of a model are in one process and take turns, in an order that rotates. A time is the median over the rounds of the ratio to the plain step of the same
round. Peaks are the meter's, of the whole step; those of the plain run and of the hooks are taken under a ``Remat`` that only measures. The resident set is
of the whole process, its growth in a step read from outside: another process samples it every two milliseconds. That is done in further steps, after the timed
ones, in which the C library is told to give freed memory back at once: else what one run freed would stay for the next.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from peers.models import MODELS, Subject
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import punar
from punar.reporting.table import format_columns
from punar.tiers import Block, Spool
from punar.units import format_bytes

M_MMAP_THRESHOLD = -3
"""glibc's name for the size from which memory comes from the system itself."""

WARM_UP = 5
"""Steps of each run before it counts: the first is recorded, three are timed."""

HEADER = ("model", "run", "peak", "resident set grows by", "time", "predicted", "moved", "copies hidden")

SAMPLER = """
import sys, time
page, most = 4096, 0
path = f"/proc/{sys.argv[1]}/statm"
while True:
    with open(path) as file:
        most = max(most, int(file.read().split()[1]) * page)
    import select
    if select.select([sys.stdin], [], [], 0.002)[0]:
        if not sys.stdin.readline():
            break
        print(most, flush=True)
        most = 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one model. ``predicted_ratio``, ``hidden``: None where nothing is predicted or moved."""

    model: str
    run: str
    peak_bytes: int
    resident_growth_bytes: int
    time_ratio: float
    predicted_ratio: float | None
    moved_bytes: int
    hidden: float | None
    is_identical: bool


@dataclass(slots=True)
class Run:
    """A way to take a step; ``remat`` is None for the plain one."""

    name: str
    step: Callable[[], Any]
    remat: punar.Remat | None = None
    moved: Callable[[], int] = lambda: 0


class Sampler:
    """Reads this process's resident set from outside."""

    def __init__(self) -> None:
        import os

        command = [sys.executable, "-c", SAMPLER, str(os.getpid())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def highest(self) -> int:
        """The most bytes since it was last asked."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


class DiskHooks:
    """Every saved tensor that is no parameter is written to the disk, and read when backward asks, as ``save_on_cpu`` does with the computer's memory."""

    def __init__(self, spool: Spool, parameters: set[int]) -> None:
        self.spool, self.parameters, self.moved_bytes = spool, parameters, 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.moved_bytes = 0
        with saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in self.parameters or tensor.nbytes < 1 << 16:
            return tensor
        flat = tensor.detach().contiguous().view(-1)
        block = self.spool.write(flat.view(torch.uint8).numpy()).wait()
        self.moved_bytes += block.size
        return block, tensor.shape, tensor.dtype

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        block, shape, dtype = packed
        assert isinstance(block, Block)
        target = torch.empty(shape, dtype=dtype)
        array: np.ndarray[Any, Any] = target.view(-1).view(torch.uint8).numpy()
        self.spool.read(block, array).wait()
        self.spool.free(block)
        self.moved_bytes += block.size
        return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,llama,vit")
    parser.add_argument(
        "--scale", type=float, default=2, help="batch, in parts of that which makes a step of about two seconds on one thread"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.4, help="share of the plain step's activation peak")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to offload to")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = [result for name in options.models.split(",") for result in compare(MODELS[name](options.scale), options)]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(format_columns(HEADER, [cells(result) for result in results], left=2))


def compare(subject: Subject, options: argparse.Namespace) -> list[Result]:
    """All runs of one model, in turn."""
    with ExitStack() as stack:
        spool = stack.enter_context(Spool(options.folder))
        sampler = Sampler()
        stack.callback(sampler.close)
        runs = make_runs(subject, spool, options)
        times, identical = in_turns(subject, runs, options.rounds)
        growths = {run.name: growth_of(subject, run, sampler) for run in runs}
        return [result_of(subject, run, runs[0], times, growths[run.name], identical[run.name]) for run in runs]


def in_turns(
    subject: Subject, runs: list[Run], rounds: int, settle: Callable[[], None] = lambda: None
) -> tuple[dict[str, list[float]], dict[str, bool]]:
    """Seconds of each run's steps, and whether all gradients were bit for bit those of the first; ``settle`` waits for the device."""
    times: dict[str, list[float]] = {run.name: [] for run in runs}
    identical = dict.fromkeys(times, True)
    expected: list[Tensor] = []
    for round in range(WARM_UP + rounds):
        for run in runs[round % len(runs) :] + runs[: round % len(runs)]:
            subject.model.zero_grad(set_to_none=True)
            settle()
            start = time.perf_counter()
            run.step()
            settle()
            took = time.perf_counter() - start
            gradients = [p.grad for p in subject.model.parameters() if p.grad is not None]
            expected = expected or [gradient.clone() for gradient in gradients]
            identical[run.name] &= all(map(torch.equal, gradients, expected))
            if round >= WARM_UP:
                times[run.name].append(took)
        print(f"{subject.name}: round {round + 1} of {WARM_UP + rounds}", file=sys.stderr)
    return times, identical


def inside(subject: Subject, remat: punar.Remat) -> Callable[[], None]:
    """The model's step in a ``Remat``."""

    def step() -> None:
        with remat:
            subject.step()

    return step


def ratio_to(plain: list[float], mine: list[float]) -> float:
    """The median over the rounds of the ratio to the plain step of the same round."""
    return median(own / base for own, base in zip(mine, plain, strict=True))


def growth_of(subject: Subject, run: Run, sampler: Sampler) -> int:
    """By how much the resident set is higher during a step than before it; gradients are made in it, as in the steps that were timed."""
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    for _ in range(2):
        subject.model.zero_grad(set_to_none=True)
        library.malloc_trim(0)
        sampler.highest()
        time.sleep(0.05)
        before = sampler.highest()
        run.step()
    return sampler.highest() - before


def make_runs(subject: Subject, spool: Spool, options: argparse.Namespace) -> list[Run]:
    parameters = {p.untyped_storage().data_ptr() for p in subject.model.parameters()}
    hooks = DiskHooks(spool, parameters)
    meters = {name: punar.Remat() for name in ("plain", "hooks")}
    alone = punar.Remat(budget=options.budget)
    moving = punar.Remat(budget=options.budget, offload=f"disk:{options.folder}")

    def with_hooks() -> None:
        with hooks():
            subject.step()

    return [
        Run("plain", subject.step, meters["plain"]),
        Run("every saved tensor to disk", with_hooks, meters["hooks"], lambda: hooks.moved_bytes),
        Run("punar, recomputing", inside(subject, alone), alone),
        Run("punar, recomputing and moving", inside(subject, moving), moving, lambda: moving.stats[-1].moved_bytes),
    ]


def result_of(subject: Subject, run: Run, plain: Run, times: dict[str, list[float]], growth: int, is_identical: bool) -> Result:
    assert run.remat is not None
    moved = run.moved()
    plan = run.remat.plan if run.name.startswith("punar") else None
    stats = run.remat.stats
    if plan is None:  # once more, measured
        for _ in range(2):
            subject.model.zero_grad(set_to_none=True)
            with run.remat:
                run.step()
    peaks = [
        step.measured_peak_bytes for step in stats if step.measured_peak_bytes is not None and not (plan is not None and step.is_traced)
    ]
    hidden = None
    if plan is not None and plan.moves:
        hidden = max(0.0, 1 - median(step.stall_ns for step in stats[WARM_UP:]) / max(plan.copy_ns, 1))
    return Result(
        model=subject.name,
        run=run.name,
        peak_bytes=peaks[-1],
        resident_growth_bytes=growth,
        time_ratio=ratio_to(times[plain.name], times[run.name]),
        predicted_ratio=None if plan is None else plan.step_time_ns / 1e9 / median(times[plain.name]),
        moved_bytes=moved,
        hidden=hidden,
        is_identical=is_identical,
    )


def cells(result: Result) -> tuple[str, ...]:
    return (
        result.model,
        result.run + ("" if result.is_identical else " (GRADIENTS DIFFER)"),
        format_bytes(result.peak_bytes),
        format_bytes(result.resident_growth_bytes),
        f"{result.time_ratio:.2f}x",
        "" if result.predicted_ratio is None else f"{result.predicted_ratio:.2f}x",
        format_bytes(result.moved_bytes) if result.moved_bytes else "",
        "" if result.hidden is None else f"{100 * result.hidden:.0f} %",
    )


if __name__ == "__main__":
    main()
