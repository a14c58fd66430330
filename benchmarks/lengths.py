"""What a step of a length that was not seen before costs, where the plans of other lengths are taken over, and where each length is solved for at once.

    python benchmarks/lengths.py [--json] [--models gpt2,llama,minilm] [--threads 1] [--lengths 6] [--share 0.5]

The longest step is planned for first, under a budget of bytes that is this share of its own activation peak; then shorter ones come, each ten times, a step of both
kinds and a plain one in turn. Times are whole ``with`` blocks, planning between two steps included, relative to the plain step of the same length; medians over
the lengths. ``first`` is the recorded step, ``next 3`` the mean of those after it, ``then`` the median of the last four; ``all`` the mean of all ten.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import mean, median

import torch

import punar
from punar.demo.models import make_task
from punar.demo.task import Task
from punar.ir import Trace
from punar.plan import Plan, plain_plan
from punar.reporting.table import format_columns
from punar.units import format_bytes

STEPS = 10
"""Of each length and each way."""


class Alone(punar.Remat):
    """Solves for each length at once."""

    def _make_plan(self, trace: Trace, extra_bytes: int = 0, outside_peak_bytes: int = 0, nearby: Iterable[Plan] = ()) -> Plan:
        return super()._make_plan(trace, extra_bytes, outside_peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model and one way; the times are relative to the plain step's. ``highest``: the highest peak, in bytes of the whole step."""

    model: str
    plans: str
    budget_bytes: int
    highest_bytes: int
    first: float
    next_3: float
    then: float
    all: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--models", default="gpt2,llama,minilm")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", type=int, default=6)
    parser.add_argument("--share", type=float, default=0.5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [row for name in options.models.split(",") for row in rows_of(make_task(name, steps=1, seed=0), options.lengths, options.share)]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    header = ("model", "plans", "budget", "highest peak", "first", "next 3", "then", "all")
    print(format_columns(header, [cells(row) for row in rows]))


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.model,
        row.plans,
        *(format_bytes(each) for each in (row.budget_bytes, row.highest_bytes)),
        *(f"{each:.2f}x" for each in (row.first, row.next_3, row.then, row.all)),
    )


def rows_of(task: Task, count: int, share: float) -> list[Row]:
    """A model both ways, length by length."""
    longest = min(tensor.shape[1] for tensor in task.batches[0].values())
    lengths = [longest - 2 - place * max(1, longest // (4 * count)) for place in range(count)]
    trace = recorded(task, longest)
    budget_bytes = trace.resident_bytes + int(share * (plain_plan(trace).peak_bytes - trace.resident_bytes))
    remats = {"taken over": punar.Remat(budget=budget_bytes), "solved at once": Alone(budget=budget_bytes)}
    steps = {name: stepping(task, remat) for name, remat in remats.items()}
    plain = stepping(task, None)
    for step in (*steps.values(), plain):
        for _ in range(4):
            step(longest)
    times: dict[str, list[list[float]]] = {name: [] for name in remats}
    for length in lengths:
        seen: dict[str, list[float]] = {name: [] for name in remats}
        plain_s = [plain(length)]
        for _ in range(STEPS):
            for name, step in steps.items():
                seen[name].append(step(length))
                settle(remats[name])
            plain_s.append(plain(length))
        for name, each in seen.items():
            times[name].append([taken / median(plain_s) for taken in each])
    return [row_of(task, name, remat, budget_bytes, times[name]) for name, remat in remats.items()]


def recorded(task: Task, length: int) -> Trace:
    remat = punar.Remat()
    stepping(task, remat)(length)
    assert remat.trace is not None
    return remat.trace


def stepping(task: Task, remat: punar.Remat | None) -> Callable[[int], float]:
    """Runs steps of a length on a model of its own; gives the seconds that each took."""
    model = copy.deepcopy(task.model)

    def step(length: int) -> float:
        batch = {key: tensor[:, :length] for key, tensor in task.batches[0].items()}
        model.zero_grad()
        start = time.perf_counter()
        if remat is None:
            task.loss_fn(model, batch).backward()
        else:
            with remat:
                task.loss_fn(model, batch).backward()
        return time.perf_counter() - start

    return step


def settle(remat: punar.Remat) -> None:
    """Waits for what is made beside training: here it would take a core from the other way."""
    while remat._session.drifts.planning is not None and not remat._session.drifts.planning.is_done:
        time.sleep(0.01)


def row_of(task: Task, name: str, remat: punar.Remat, budget_bytes: int, times: list[list[float]]) -> Row:
    first = median(each[0] for each in times)
    next_3, then, all_steps = (median(f(each) for each in times) for f in (lambda e: mean(e[1:4]), lambda e: median(e[-4:]), mean))
    highest = max(stats.measured_peak_bytes or 0 for stats in remat.stats)
    return Row(
        model=task.name, plans=name, budget_bytes=budget_bytes, highest_bytes=highest, first=first, next_3=next_3, then=then, all=all_steps
    )


if __name__ == "__main__":
    main()
