"""``punar report``: writes a recorded step as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from punar.cli.options import BUDGET_HELP, Compress, Offload, budget_beside, check_output
from punar.cli.output import say
from punar.cli.solve import plan_asked_for


def report(
    profile: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `punar profile` wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="Where to write the page.")],
    budget: Annotated[str | None, typer.Option("--budget", help=BUDGET_HELP)] = None,
    plan: Annotated[Path | None, typer.Option("--plan", exists=True, dir_okay=False, help="A plan that `punar solve` wrote.")] = None,
    offload: Offload = None,
    compress: Compress = None,
) -> None:
    """Writes one page of HTML on a recorded step: what memory costs in time, what is there when, and what a plan does about it."""
    asked = budget_beside(plan, budget)
    check_output(output)
    import punar
    from punar.pages import page_of

    found = punar.Profile.load(profile)
    obeyed = plan_asked_for(found, asked, plan, offload, compress)
    page_of(found, obeyed).save(output)
    say(f"wrote {output}")
