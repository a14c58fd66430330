"""``punar demo``: trains a real model plain and under several budgets, and shows that the weights come out the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from punar.cli.complete import complete_model
from punar.cli.options import BUDGET_HELP, Compress, Json, Offload, Seed, Threads, compress_by, offload_to, parse_budget, set_threads
from punar.cli.output import Exit, emit, emit_table, say, talk
from punar.cli.source import load_task
from punar.plan.codecs import LOSSY
from punar.reporting import Comparison
from punar.reporting.comparison import header, table_rows
from punar.units import format_bytes

if TYPE_CHECKING:
    from punar.demo.task import Task

DEFAULT_BUDGETS = ("0.8", "0.6", "0.45", "min")


def demo(
    model: Annotated[
        str, typer.Option("--model", help="minilm (real weights), gpt2, llama, vit, moe or unet.", autocompletion=complete_model)
    ] = "minilm",
    steps: Annotated[int, typer.Option("--steps", min=2, help="Training steps of each run.")] = 20,
    budget: Annotated[list[str] | None, typer.Option("--budget", help=BUDGET_HELP + " Repeatable.")] = None,
    offload: Offload = None,
    compress: Compress = None,
    json: Json = False,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Trains a real model plain and under several budgets, and compares time, memory and the final weights."""
    budgets = [parse_budget(text) for text in budget or DEFAULT_BUDGETS]
    ways = compress_by(compress)
    set_threads(threads)
    task = load_task(model, steps=steps, seed=seed)
    with offload_to(offload) as place:
        comparison = _compare(task, budgets, seed=seed, offload=place, compress=ways, is_infeasible_skipped=budget is None)
    if json:
        emit(comparison.to_json())
    else:
        emit_table(header(comparison), table_rows(comparison), left=1)
    _conclude(comparison, steps, may_round=any(way in LOSSY for way in ways))


def _compare(
    task: Task,
    budgets: list[str | float | int],
    *,
    seed: int,
    offload: list[str] | None,
    compress: tuple[str, ...],
    is_infeasible_skipped: bool,
) -> Comparison:
    from punar.demo.compare import compare

    steps = len(task.batches)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn())
    say(f"{task.name}: {task.description}")
    with Progress(*columns, console=talk(), transient=True) as progress:
        bar = progress.add_task("training", total=steps * (1 + len(budgets)))

        def on_step(runs: int) -> None:
            progress.update(bar, advance=1, description=f"training {runs} runs in turn")

        return compare(
            task,
            budgets,
            seed=seed,
            offload=offload,
            compress=compress,
            is_infeasible_skipped=is_infeasible_skipped,
            on_step=on_step,
            on_note=progress.console.print,
        )


def _conclude(comparison: Comparison, steps: int, *, may_round: bool) -> None:
    say(f"{comparison.device}; peaks are of the whole step; time is of forward and backward, relative to plain")
    for row in comparison.over_budget():
        excess = format_bytes(row.measured_peak_bytes - row.budget_bytes)
        say(f"budget {row.budget} ({format_bytes(row.budget_bytes)}) was exceeded by {excess}")
    if may_round and not comparison.is_identical:
        say(f"values were rounded, as asked: weights after {steps} steps differ from the plain run's")
        return
    if not comparison.is_identical:
        say(f"weights after {steps} steps differ from the plain run's")
        raise typer.Exit(Exit.NOT_VERIFIED)
    say(f"weights, optimizer state and losses of all {steps} steps are bit-identical in every run")
