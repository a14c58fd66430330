"""Trains one task plain and under several budgets, side by side, and compares what comes out.

The runs take turns, a step each, in an order that rotates: whatever else the machine is doing then slows all of them alike. Each has
its own copy of the model and the optimizer, and its own random state, so that it trains as if it were alone.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from punar.arguments import EXACT, Offloading
from punar.errors import InfeasibleBudget
from punar.remat import Remat
from punar.reporting import Comparison, Row
from punar.reporting.report import count

if TYPE_CHECKING:
    from punar.demo.task import Batch, Task

Budget = str | float | int
MEASURED_STEPS = 2  # of the plain run: its peak is taken in these, its time in the others
MAX_GRAD_NORM = 1.0


@dataclass(slots=True, kw_only=True)
class Run:
    """One copy of the task in training. ``budget`` is None for the plain run."""

    label: str
    budget: Budget | None
    model: nn.Module
    optimizer: torch.optim.Optimizer
    remat: Remat
    random_state: Tensor
    losses: list[float] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        return self.budget is None


def compare(
    task: Task,
    budgets: Sequence[Budget],
    *,
    seed: int,
    offload: Offloading = None,
    compress: Sequence[str] = EXACT,
    is_infeasible_skipped: bool = False,
    on_step: Callable[[int], None] = lambda runs: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Trains ``task`` for one step a batch, plain and under each budget.

    Args:
        task: the model, its batches and its loss; left as it is.
        budgets: as ``punar.Remat`` takes them.
        seed: of the random state that every run starts from.
        offload, compress: as ``punar.Remat`` takes them.
        is_infeasible_skipped: whether a budget below the least feasible one is noted and left out, instead of raised.
        on_step: called after each step of each run with the number of runs that are left.
        on_note: called with a sentence for people.

    Raises:
        InfeasibleBudget: no plan fits a budget.
    """
    runs = [_make_run(task, "plain", None, seed), *(_make_run(task, str(budget), budget, seed, offload, compress) for budget in budgets)]
    for step, batch in enumerate(task.batches):
        for run in _rotated(runs, step):
            try:
                _train_step(run, task, batch, step)
            except InfeasibleBudget as error:
                if not is_infeasible_skipped:
                    raise
                on_note(f"budget {run.label} is left out: {error}")
                runs.remove(run)
            on_step(len(runs))
    plain = runs[0]
    return Comparison(device=_device_name(), rows=(_plain_row(plain, runs[1:]), *(_row(run, plain) for run in runs[1:])))


def _make_run(task: Task, label: str, budget: Budget | None, seed: int, offload: Offloading = None, compress: Sequence[str] = EXACT) -> Run:
    model = copy.deepcopy(task.model)
    return Run(
        label=label,
        budget=budget,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=task.learning_rate, fused=True),
        remat=Remat(budget=budget, offload=offload, compress=compress),
        random_state=torch.Generator().manual_seed(seed).get_state(),
    )


def _rotated(runs: Sequence[Run], step: int) -> list[Run]:
    start = step % len(runs)
    return [*runs[start:], *runs[:start]]


def _train_step(run: Run, task: Task, data: Batch, step: int) -> None:
    batch = {name: tensor.clone() for name, tensor in data.items()}  # gone after the step, as a loader's batches are
    torch.set_rng_state(run.random_state)
    start = time.perf_counter_ns()
    if run.is_plain and step >= MEASURED_STEPS:
        loss = _forward_backward(run, task, batch)
    else:
        with run.remat:
            loss = _forward_backward(run, task, batch)
    run.times_ns.append(time.perf_counter_ns() - start)
    nn.utils.clip_grad_norm_(run.model.parameters(), MAX_GRAD_NORM)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.losses.append(loss.item())
    run.random_state = torch.get_rng_state()


def _forward_backward(run: Run, task: Task, batch: Batch) -> Tensor:
    loss = task.loss_fn(run.model, batch)
    loss.backward()
    return loss


def _plain_row(plain: Run, others: Sequence[Run]) -> Row:
    stats = list(plain.remat.stats)
    measured = max(step.measured_peak_bytes or 0 for step in stats)
    plan = next((run.remat.plan for run in others if run.remat.plan is not None), None)
    return Row(
        budget=plain.label,
        budget_bytes=measured,
        predicted_peak_bytes=measured if plan is None else plan.plain_peak_bytes,
        measured_peak_bytes=measured,
        time_ratio=1.0,
        kept_bytes=stats[-1].kept_bytes,
        recomputed_bytes=0,
        replayed_operators=0,
        loss=plain.losses[-1],
        identical=True,
    )


def _row(run: Run, plain: Run) -> Row:
    """``plan`` is the one obeyed last: one made by the last step's times has not been tried."""
    report = run.remat.report()
    plan, seen = report.plan, report.obeyed or report.traced
    assert seen is not None
    measured = seen.peak_bytes
    assert measured is not None
    return Row(
        budget=run.label,
        budget_bytes=measured if plan is None else plan.budget_bytes,
        predicted_peak_bytes=measured if plan is None else plan.peak_bytes,
        measured_peak_bytes=measured,
        time_ratio=_time_ratio(run, plain),
        kept_bytes=seen.kept_bytes,
        recomputed_bytes=seen.recomputed_bytes,
        replayed_operators=seen.replayed_operators,
        loss=run.losses[-1],
        identical=is_same_run(run, plain),
        moved_bytes=run.remat.stats[-1].moved_bytes,
    )


def _time_ratio(run: Run, plain: Run) -> float:
    """Median over the steps that only obey a plan, each relative to the plain run's same step."""
    stats = list(run.remat.stats)
    steps = [step for step in range(len(stats)) if not stats[step].is_traced and step >= MEASURED_STEPS] or range(len(stats))
    return median(run.times_ns[step] / plain.times_ns[step] for step in steps)


def is_same_run(run: Run, other: Run) -> bool:
    """Whether two runs came out the same bit for bit: losses, weights, buffers, optimizer state and random state."""
    if run.losses != other.losses or not torch.equal(run.random_state, other.random_state):
        return False
    return _is_same_tree(run.model.state_dict(), other.model.state_dict()) and _is_same_tree(
        run.optimizer.state_dict(), other.optimizer.state_dict()
    )


def _is_same_tree(left: object, right: object) -> bool:
    match left, right:
        case Tensor(), Tensor():
            return _is_same_bits(left, right)
        case dict(), dict():
            return left.keys() == right.keys() and all(_is_same_tree(left[key], right[key]) for key in left)
        case list() | tuple(), list() | tuple():
            return len(left) == len(right) and all(map(_is_same_tree, left, right))
        case _:
            return bool(left == right)


def _is_same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(_as_bytes(left), _as_bytes(right))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _device_name() -> str:
    return f"cpu, {count(torch.get_num_threads(), 'thread')}, torch {torch.__version__}"
