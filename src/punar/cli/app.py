"""The commands under one name."""

from __future__ import annotations

import typer

from punar.cli import demo, profile, solve, verify

app = typer.Typer(
    name="punar",
    help="Makes a PyTorch training step fit a memory budget by recomputing activations; gradients stay bit-identical.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("profile")(profile.profile)
app.command("solve")(solve.solve)
app.command("verify")(verify.verify)
