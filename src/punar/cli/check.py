"""``punar check``: runs a step plain and under a budget, and says by its exit code whether it reaches what it should."""

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
from punar.cli.output import Exit, emit, emit_json
from punar.cli.source import load_step


def check(
    source: Source,
    targets: Annotated[
        Path, typer.Option("--targets", exists=True, dir_okay=False, help="A TOML file of targets, or a pyproject.toml that has some.")
    ],
    budget: Annotated[
        str | None, typer.Option("--budget", help=f"{BUDGET_HELP} Where it is left out: the target for the peak, else min.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are measured, of either kind.")] = 20,
    offload: Offload = None,
    compress: Compress = None,
    json: Json = False,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Checks a step against targets: its peak, its extra time, its gradients, how long it takes."""
    asked = None if budget is None else parse_budget(budget)
    set_threads(threads)
    from punar.targets import Targets, find

    goals = Targets.load(targets)
    model, batch, loss_fn = load_step(source, seed=seed)
    given = asked if asked is not None else goals.peak_bytes or "min"
    with offload_to(offload) as place:
        found, verified = find(model, batch, loss_fn, budget=given, steps=steps, offload=place, compress=compress_by(compress))
    checked = goals.check(found)
    if json:
        emit_json({**checked.to_dict(), "steps": steps, "verification": verified.to_dict()})
    else:
        emit(f"{checked}\n{verified}")
    if not verified.is_as_promised:
        raise typer.Exit(Exit.NOT_VERIFIED)
    if not checked.is_met:
        raise typer.Exit(Exit.MISSED)
