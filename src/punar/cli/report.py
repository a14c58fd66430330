"""``punar report``: writes a recorded step as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from punar.cli.explain import solved
from punar.cli.options import BUDGET_HELP, Compress, Offload, check_output, parse_budget
from punar.cli.output import say


def report(
    profile: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `punar profile` wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="Where to write the page.")],
    budget: Annotated[str | None, typer.Option("--budget", help=BUDGET_HELP)] = None,
    plan: Annotated[Path | None, typer.Option("--plan", exists=True, dir_okay=False, help="A plan that `punar solve` wrote.")] = None,
    offload: Offload = None,
    compress: Compress = None,
) -> None:
    """Writes one page of HTML on a recorded step: what memory costs in time, what is there when, and what a plan does about it."""
    if budget is not None and plan is not None:
        raise typer.BadParameter("give --budget or --plan, not both", param_hint="--budget / --plan")
    asked = None if budget is None else parse_budget(budget)
    check_output(output)
    import punar
    from punar.pages import page_of

    found = punar.Profile.load(profile)
    obeyed = punar.Plan.load(plan) if plan is not None else solved(found, asked, offload, compress)
    page_of(found, obeyed).save(output)
    say(f"wrote {output}")
