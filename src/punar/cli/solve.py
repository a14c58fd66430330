"""``punar solve``: makes a plan from a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from punar.cli.options import BUDGET_HELP, Compress, Json, Offload, Output, Solver, check_output, compress_by, offload_to, parse_budget
from punar.cli.output import WrongArgument, emit, emit_json, say, working
from punar.errors import UsageError
from punar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from punar import Plan, Profile


def solve(
    trace: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `punar profile` wrote.")],
    budget: Annotated[str, typer.Option("--budget", help=BUDGET_HELP)],
    output: Output = None,
    solver: Solver = "auto",
    offload: Offload = None,
    compress: Compress = None,
    json: Json = False,
) -> None:
    """Makes a plan that fits a budget, from a trace that `punar profile` wrote."""
    asked = parse_budget(budget)
    check_output(output)
    check_solver(solver)
    import punar

    with offload_to(offload) as place, working("looking for a plan"):
        plan = punar.solve(punar.Profile.load(trace), budget=asked, solver=solver, offload=place, compress=compress_by(compress))
    if output is not None:
        plan.save(output)
        say(f"wrote {output}")
    if json:
        emit_json(summary(plan))
        return
    emit_plan(plan)


def plan_asked_for(
    profile: Profile, budget: str | float | int | None, plan: Path | None, offload: list[str] | None, compress: list[str] | None
) -> Plan | None:
    """The plan in a file, or the one for a budget; None where neither was asked for."""
    import punar

    if plan is not None:
        return punar.Plan.load(plan)
    if budget is None:
        return None
    with offload_to(offload) as place:
        return punar.solve(profile, budget=budget, offload=place, compress=compress_by(compress))


def emit_plan(plan: Plan) -> None:
    """What a plan predicts, for people."""
    emit(f"solver      {plan.solver}")
    emit(f"budget      {format_bytes(plan.budget_bytes)} of the whole step")
    emit(f"peak        {format_bytes(plan.peak_bytes)} predicted, plain {format_bytes(plan.plain_peak_bytes)}")
    emit(f"time        {format_seconds(plan.time_ns)} predicted, plain {format_seconds(plan.plain_time_ns)} ({plan.overhead:+.1%})")
    emit(f"kept        {format_bytes(plan.kept_bytes)}")
    emit(f"recomputed  {format_bytes(plan.recomputed_bytes)} by {plan.replayed_ops} operators")
    if plan.moved_bytes:
        emit(f"moved       {format_bytes(plan.moved_bytes)}, out and back, waiting {format_seconds(plan.stall_ns)}")
    if plan.coded_bytes:
        emit(f"compressed  {format_bytes(plan.coded_bytes)} in {format_seconds(plan.coding_ns)}")


def check_solver(spelling: str) -> None:
    """Raises ``WrongArgument`` where no solver is spelled so, or none can have these options."""
    from punar.solvers import find

    try:
        find(spelling)
    except UsageError as error:
        raise WrongArgument(str(error)) from error


def summary(plan: Plan) -> dict[str, Any]:
    """What a plan predicts, as JSON-able data."""
    sizes = ("budget_bytes", "peak_bytes", "plain_peak_bytes", "kept_bytes", "recomputed_bytes", "resident_bytes")
    names = (
        "solver",
        "fingerprint",
        *sizes,
        "time_ns",
        "plain_time_ns",
        "bound_ns",
        "replayed_ops",
        "overhead",
        "moved_bytes",
        "stall_ns",
        "coded_bytes",
        "coding_ns",
    )
    return {name: getattr(plan, name) for name in names}
