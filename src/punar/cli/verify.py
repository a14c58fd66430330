"""``punar verify``: proves on one step that a budget changes nothing but time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from punar.cli.options import (
    BUDGET_HELP,
    Compress,
    Json,
    Offload,
    Seed,
    Source,
    Threads,
    compress_by,
    offload_to,
    parse_budget,
    set_threads,
)
from punar.cli.output import Exit, emit, emit_json, working
from punar.cli.source import load_step


def verify(
    source: Source,
    budget: Annotated[str | None, typer.Option("--budget", help=BUDGET_HELP)] = None,
    plan: Annotated[Path | None, typer.Option("--plan", exists=True, dir_okay=False, help="A plan that `punar solve` wrote.")] = None,
    offload: Offload = None,
    compress: Compress = None,
    json: Json = False,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Compares a step under a budget or a plan with the plain step, bit for bit."""
    if (budget is None) == (plan is None):
        raise typer.BadParameter("give either --budget or --plan", param_hint="--budget / --plan")
    asked = None if budget is None else parse_budget(budget)
    set_threads(threads)
    import punar

    obeyed = None if plan is None else punar.Plan.load(plan)
    with offload_to(offload) as place, working("loading the model") as tell:
        model, batch, loss_fn = load_step(source, seed=seed)
        tell("comparing steps")
        found = punar.verify(model, batch, loss_fn, budget=asked, plan=obeyed, offload=place, compress=compress_by(compress))
    if json:
        emit_json(found.to_dict())
    else:
        emit(str(found))
    if not found.is_as_promised:
        raise typer.Exit(Exit.NOT_VERIFIED)
