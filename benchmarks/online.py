"""What the first step costs that is kept under its budget before there is a plan: beside the planned steps, and the bound that no plan can beat.

    python benchmarks/online.py [--json] [--models gpt2,vit,unet] [--threads 1] [--rounds 3]

Budgets are shares of the plain step's own activation peak, given in bytes. For each, a new ``Remat`` runs its first step, which evicts while it is recorded, and then
planned ones. Peaks are of the whole step. ``replays`` is what replaying took, relative to the plain step's operators: measured in the first step, in the planned ones
the median of some, and for the bound what a proof leaves no plan of that trace below. ``step`` is the first step's time relative to that of a step which is recorded
without a budget. All are measured in turn, so often; the median is printed.
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import nn

import punar
from punar.demo.models import make_task
from punar.demo.task import Task
from punar.plan import simulate
from punar.reporting.table import format_columns
from punar.units import format_bytes

SHARES = (0.9, 0.75, 0.6, 0.5)

PLANNED_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model under one budget; ratios are relative to the plain step's operators, ``step_ratio`` to a recorded step without a budget."""

    model: str
    share: float
    budget_bytes: int
    plain_bytes: int
    first_bytes: int
    planned_bytes: int
    first_replays: float
    planned_replays: float
    bound_replays: float
    first_operators: int
    planned_operators: int
    evicted_bytes: int
    step_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one new ``Remat`` did. Times in nanoseconds."""

    first: punar.StepStats
    planned: punar.StepStats
    first_replays_ns: int
    planned_replays_ns: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--models", default="gpt2,vit,unet")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [row for name in options.models.split(",") for row in rows_of(make_task(name, steps=1, seed=0), name, options.rounds)]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    header = (
        "model",
        "budget",
        "in bytes",
        "plain",
        "first step",
        "planned",
        "first replays",
        "planned",
        "bound",
        "operators",
        "planned",
        "step",
    )
    print(format_columns(header, [cells(row) for row in rows]))


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.model,
        str(row.share),
        *(format_bytes(each) for each in (row.budget_bytes, row.plain_bytes, row.first_bytes, row.planned_bytes)),
        *(f"{each:.1%}" for each in (row.first_replays, row.planned_replays, row.bound_replays)),
        str(row.first_operators),
        str(row.planned_operators),
        f"{row.step_ratio:.2f}x",
    )


def rows_of(task: Task, name: str, rounds: int) -> list[Row]:
    """A model under all budgets, in turn."""
    run(task, None, 0)
    plain: list[punar.StepStats] = []
    seen: dict[float, list[Seen]] = {share: [] for share in SHARES}
    trace = None
    for _ in range(rounds):
        remat = run(task, None, 0)[0]
        plain.append(remat.stats[0])
        trace = remat.trace
        assert trace is not None
        peak_bytes = simulate(trace, (0,) * len(trace.values)).peak_bytes
        for share in SHARES:
            budget_bytes = trace.resident_bytes + int(share * (peak_bytes - trace.resident_bytes))
            seen[share].append(seen_under(task, budget_bytes))
    return [row_of(name, share, plain, each) for share, each in seen.items()]


def seen_under(task: Task, budget_bytes: int) -> Seen:
    remat, replays_ns = run(task, budget_bytes, PLANNED_STEPS)
    planned = next(stats for stats in reversed(remat.stats) if stats.measured_peak_bytes is not None)
    return Seen(first=remat.stats[0], planned=planned, first_replays_ns=replays_ns[0], planned_replays_ns=int(median(replays_ns[1:])))


def run(task: Task, budget_bytes: int | None, planned_steps: int) -> tuple[punar.Remat, list[int]]:
    """A first step and so many planned ones; what their replays took."""
    model: nn.Module = copy.deepcopy(task.model)
    remat = punar.Remat(budget=budget_bytes)
    replays_ns = []
    for _ in range(1 + planned_steps):
        torch.manual_seed(1)
        model.zero_grad()
        with remat:
            task.loss_fn(model, task.batches[0]).backward()
        replays_ns.append(remat._session.count.time_ns)
    return remat, replays_ns


def row_of(name: str, share: float, plain: list[punar.StepStats], seen: list[Seen]) -> Row:
    plan = seen[-1].planned.plan
    assert plan is not None
    operators_ns = plan.plain_time_ns
    return Row(
        model=name,
        share=share,
        budget_bytes=plan.budget_bytes,
        plain_bytes=plan.plain_peak_bytes,
        first_bytes=max(each.first.measured_peak_bytes or 0 for each in seen),
        planned_bytes=max(each.planned.measured_peak_bytes or 0 for each in seen),
        first_replays=median(each.first_replays_ns for each in seen) / operators_ns,
        planned_replays=median(each.planned_replays_ns for each in seen) / operators_ns,
        bound_replays=max(0.0, plan.bound_ns / operators_ns - 1),
        first_operators=int(median(each.first.replayed_operators for each in seen)),
        planned_operators=int(median(each.planned.replayed_operators for each in seen)),
        evicted_bytes=int(median(each.first.evicted_bytes for each in seen)),
        step_ratio=median(each.first.time_ns for each in seen) / median(each.time_ns for each in plain),
    )


if __name__ == "__main__":
    main()
