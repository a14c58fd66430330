"""The commands under one name."""

from __future__ import annotations

from typing import Annotated

import typer

from punar import __version__
from punar.cli import calibrate, check, compare, demo, explain, fit, frontier, profile, report, run, solve, verify
from punar.cli.output import emit

HELP = "Makes a PyTorch training step fit a memory budget by recomputing activations; gradients stay bit-identical."

app = typer.Typer(
    name="punar",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(is_asked: bool) -> None:
    """Prints the version and ends."""
    if is_asked:
        emit(f"punar {__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def options(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Takes what stands before a command's name."""


app.command("calibrate")(calibrate.calibrate)
app.command("check")(check.check)
app.command("compare")(compare.compare)
app.command("demo")(demo.demo)
app.command("explain")(explain.explain)
app.command("fit")(fit.fit)
app.command("frontier")(frontier.frontier)
app.command("plan", help="Another name of `punar solve`.")(solve.solve)
app.command("profile")(profile.profile)
app.command("report")(report.report)
app.command("run", context_settings={"allow_interspersed_args": False})(run.run)
app.command("solve")(solve.solve)
app.command("verify")(verify.verify)
