"""How well peaks and times are predicted: the demo's models, each under several budgets, beside the plain step.

    python benchmarks/prediction.py [--json] [--rounds 12] [--models minilm,gpt2,...] [--threads 1]

The runs of a model take turns in one process, a step each. In the first rounds steps are recorded and operators timed; then the predictions are taken, and the
rounds that follow are measured. A predicted time is relative to the plain step of the rounds that it was learned in, a measured one to the plain step of its own round,
so that a machine that becomes slower meanwhile is no error. A measured time is the median of the rounds, a measured peak the highest of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median

import torch

import punar
from punar.demo.models import MODELS, make_task
from punar.reporting.table import format_columns

BUDGETS: tuple[float | str, ...] = (0.95, 0.8, 0.6, 0.45, "min")
LEARNING = 20
"""Rounds in which times are learned: the step that is recorded, those that punar times under one plan after another, and some whose backward runs unwatched."""

LAST = 12
"""The last of them, in which what a step takes was learned: it is judged by the passes before the 17th."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One model under one budget. Errors are relative: (predicted - measured) / measured."""

    model: str
    budget: str
    predicted_peak_bytes: int
    measured_peak_bytes: int
    peak_error: float
    predicted_time_ratio: float
    measured_time_ratio: float
    time_error: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [row for name in options.models.split(",") for row in predict(name, options.rounds)]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    header = ("model", "budget", "peak, predicted", "measured", "error", "time, predicted", "measured", "error")
    print(format_columns(header, [cells(row) for row in rows]))
    times = sorted(abs(row.time_error) for row in rows)
    peaks = sorted(abs(row.peak_error) for row in rows)
    print(f"\nabsolute errors, median and worst: peak {median(peaks):.2%}, {peaks[-1]:.2%}; time {median(times):.1%}, {times[-1]:.1%}")


def cells(row: Prediction) -> tuple[str, ...]:
    return (
        row.model,
        row.budget,
        str(row.predicted_peak_bytes),
        str(row.measured_peak_bytes),
        f"{row.peak_error:+.2%}",
        f"{row.predicted_time_ratio:.3f}",
        f"{row.measured_time_ratio:.3f}",
        f"{row.time_error:+.1%}",
    )


def predict(name: str, rounds: int) -> list[Prediction]:
    """Runs one model under all budgets that are feasible for it."""
    print(f"measuring {name}", file=sys.stderr)
    task = make_task(name, steps=2, seed=0)
    runs = {budget: (copy.deepcopy(task.model), punar.Remat(budget=budget)) for budget in BUDGETS}
    times: dict[float | str, list[int]] = {budget: [] for budget in ("plain", *BUDGETS)}
    predicted: dict[float | str, float] = {}
    for turn in range(rounds + LEARNING):
        if turn == LEARNING:
            plain_ns = median(times["plain"][LEARNING - LAST : LEARNING - 2])
            predicted = {budget: remat.plan.step_time_ns / plain_ns for budget, (_, remat) in runs.items()}
        times["plain"].append(step(task, task.model, None))
        for budget, (model, remat) in list(runs.items()):
            try:
                times[budget].append(step(task, model, remat))
            except punar.InfeasibleBudget:
                del runs[budget]
    return [result(name, budget, remat, times, predicted[budget]) for budget, (_, remat) in runs.items()]


def step(task, model: torch.nn.Module, remat: punar.Remat | None) -> int:
    model.zero_grad()
    torch.manual_seed(0)
    batch = {key: value.clone() for key, value in task.batches[0].items()}
    start = time.perf_counter_ns()
    if remat is None:
        task.loss_fn(model, batch).backward()
    else:
        with remat:
            task.loss_fn(model, batch).backward()
    return time.perf_counter_ns() - start


def result(name: str, budget: float | str, remat: punar.Remat, times: dict[float | str, list[int]], predicted: float) -> Prediction:
    plan = remat.stats[-1].plan
    assert plan is not None
    obeying = [stats for stats in remat.stats if stats.plan is not None and stats.plan.hold_from == plan.hold_from]
    measured = max(stats.measured_peak_bytes or 0 for stats in obeying)  # not measured where backward ran unwatched
    ratio = median(a / b for a, b in zip(times[budget][LEARNING:], times["plain"][LEARNING:], strict=True))
    return Prediction(
        model=name,
        budget=str(budget),
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=measured,
        peak_error=plan.peak_bytes / measured - 1,
        predicted_time_ratio=predicted,
        measured_time_ratio=ratio,
        time_error=predicted / ratio - 1,
    )


if __name__ == "__main__":
    main()
