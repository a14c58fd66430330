"""``punar explain``: says why a recorded step needs the memory it does, and why a plan does what it does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from punar.cli.options import BUDGET_HELP, Compress, Json, Offload, budget_beside, check_output
from punar.cli.output import emit, emit_json, emit_table, say
from punar.cli.solve import plan_asked_for

if TYPE_CHECKING:
    from punar import Explanation


def explain(
    profile: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `punar profile` wrote.")],
    budget: Annotated[str | None, typer.Option("--budget", help=BUDGET_HELP)] = None,
    plan: Annotated[Path | None, typer.Option("--plan", exists=True, dir_okay=False, help="A plan that `punar solve` wrote.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", dir_okay=False, help="Where to write the step's timeline, for Perfetto.")] = None,
    offload: Offload = None,
    compress: Compress = None,
    json: Json = False,
) -> None:
    """Says what sets the peak of a recorded step, what a plan does about it and why, and what would lower it."""
    asked = budget_beside(plan, budget)
    check_output(trace)
    import punar

    found = punar.Profile.load(profile)
    obeyed = plan_asked_for(found, asked, plan, offload, compress)
    explanation = punar.explain(found, obeyed)
    if trace is not None:
        found.timeline(obeyed).save(trace)
        say(f"wrote {trace}")
    if json:
        emit_json(explanation.to_dict())
    else:
        _print(explanation)


def _print(explanation: Explanation) -> None:
    for place, section in enumerate(explanation.sections()):
        emit(("\n" if place else "") + section.title)
        if section.table is not None:
            emit_table(section.table.header, section.table.rows, left=section.table.left)
        for note in section.notes:
            emit(note)
