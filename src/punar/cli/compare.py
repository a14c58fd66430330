"""``punar compare``: two plans for one step, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from punar.cli.options import Json
from punar.cli.output import emit, emit_json, emit_table
from punar.cli.solve import summary
from punar.ir import Trace
from punar.plan import Plan
from punar.plan.plan import read_file
from punar.reporting.plans import HEADER, PLACES_HEADER, PlanComparison, place_rows

_MOST_ROWS = 20
"""Places shown to people; JSON has all."""


def compare(
    first: Annotated[Path, typer.Argument(metavar="PLAN", exists=True, dir_okay=False, help="A plan that `punar solve` wrote.")],
    second: Annotated[Path, typer.Argument(metavar="PLAN", exists=True, dir_okay=False, help="Another plan for the same step.")],
    trace: Annotated[
        Path | None,
        typer.Option("--trace", exists=True, dir_okay=False, help="The step's trace: says which modules and operators differ most."),
    ] = None,
    json: Json = False,
) -> None:
    """Shows two plans for one step side by side: what they cost, and which values they treat differently."""
    step = None if trace is None else read_file(trace, Trace.from_json)
    found = PlanComparison.of(Plan.load(first), Plan.load(second), step)
    if json:
        emit_json({"plans": [summary(found.first), summary(found.second)], **found.to_dict()})
        return
    emit_table(HEADER, found.rows(), left=1)
    emit(f"\n{found.differing} of {found.values} values are treated differently")
    for change in found.changes:
        emit(f"  {change.values} {change.before} -> {change.after}")
    if found.places:
        emit("\nof what is saved for backward, the most bytes first")
        emit_table(PLACES_HEADER, place_rows(found.places[:_MOST_ROWS]), left=4)
