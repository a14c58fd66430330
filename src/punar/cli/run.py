"""``punar run``: runs a training script as it is, its steps under a budget."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from punar.cli.options import BUDGET_HELP, Compress, Offload, Solver, check_output, compress_by, offload_to, parse_budget
from punar.cli.output import WrongArgument, emit_table, say
from punar.cli.solve import check_solver, emit_plan, summary
from punar.errors import InfeasibleBudget, UsageError
from punar.plan.plan import write_text
from punar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from punar import Plan, Remat

NO_STEP = (
    "asked to run training steps under a budget, saw none: a step begins with a call of a torch.nn.Module that records gradients, in the main thread, and ends "
    "where an optimizer of torch.optim steps. Put `with punar.Remat(...)` around the step yourself"
)


class _FirstStepDone(BaseException):
    """Ends a script of which only the first step is asked for; no ``except Exception`` of the script's catches it."""


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module's name.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="The script's own.")] = None,
    budget: Annotated[str, typer.Option("--budget", help=BUDGET_HELP)] = "auto",
    offload: Offload = None,
    compress: Compress = None,
    solver: Solver = "auto",
    is_module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as `python -m` takes it.")] = False,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Run the first step alone, and print what would be done.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", dir_okay=False, help="Write the report, or what is planned, as JSON.")
    ] = None,
) -> None:
    """Runs an unmodified training script, each of its steps under a budget. Options stand before SCRIPT; what follows it is the script's."""
    asked = parse_budget(budget)
    check_solver(solver)
    ways = compress_by(compress)
    check_output(output)
    if is_module and not _is_module(script):
        raise WrongArgument(f"asked to run the module {script}, which is not found from {os.getcwd()}; check its name and the folder")
    if not is_module and not Path(script).exists():
        raise WrongArgument(f"asked to run {script}, which does not exist; give a Python file, or -m and a module's name")
    from punar import Remat
    from punar.torch.boundaries import Boundaries

    refused: list[InfeasibleBudget] = []

    class Telling(Remat):
        """Keeps why there was no plan, which the script may catch."""

        def _make_plan(self, *asked: Any) -> Plan:
            try:
                return super()._make_plan(*asked)
            except InfeasibleBudget as error:
                refused.append(error)
                raise

    with offload_to(offload) as place:
        remat = Telling(budget=asked, solver=solver, offload=place, compress=ways)
        steps = Boundaries(remat, on_end=_end if is_dry else lambda: None)
        try:
            with steps, _as_main(script, arguments or [], is_module=is_module):
                _run(script, is_module=is_module)
        except _FirstStepDone:
            _tell_plan(remat, steps.optimizer, output)
            return
        finally:
            if steps.steps and not is_dry:
                _report(remat, output)
    if not steps.steps:
        raise refused[0] if refused else UsageError(NO_STEP)
    if is_dry:
        _tell_plan(remat, steps.optimizer, output)  # the script has caught what was to end it


def _end() -> None:
    raise _FirstStepDone


def _run(script: str, *, is_module: bool) -> None:
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(script), run_name="__main__")  # as `python` has it in __file__ and in tracebacks


@contextmanager
def _as_main(script: str, arguments: list[str], *, is_module: bool) -> Iterator[None]:
    """Within, the script finds what ``python SCRIPT ARGUMENTS`` would give it."""
    path = Path(script)
    own = os.getcwd() if is_module else str(path.resolve() if path.is_dir() else path.resolve().parent)
    before = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, own)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def _is_module(name: str) -> bool:
    """Whether ``python -m`` would find it."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False
    finally:
        sys.path.pop(0)


def _report(remat: Remat, output: Path | None) -> None:
    """What was planned and measured; stdout is the script's."""
    report = remat.report()
    say(str(report))
    _write(report.to_dict(), output)


def _write(body: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        write_text(output, json.dumps(body, indent=2))


def _tell_plan(remat: Remat, optimizer: Optimizer | None, output: Path | None) -> None:
    """What the steps after the first would do, beside the state that the optimizer has by then, and what other budgets would."""
    import punar
    from punar.fitting.steps import beside
    from punar.torch.optimizer_state import bytes_to_come

    with remat:
        pass  # what was recorded is planned for, even where its graph is alive
    trace, plan = remat.trace, remat.plan
    if trace is None or plan is None:
        raise UsageError(NO_STEP)
    coming_bytes = 0 if optimizer is None else bytes_to_come(optimizer)
    if coming_bytes:
        plan = remat._make_plan(trace, coming_bytes)
        trace = beside(trace, coming_bytes)
    _write(summary(plan), output)
    emit_plan(plan)
    if coming_bytes:
        say(f"counted with it: {format_bytes(coming_bytes)} of state that {type(optimizer).__name__} makes in its first step")
    elif coming_bytes is None:
        say(
            f"not counted: the state that {type(optimizer).__name__} makes in its first step, which cannot be told beforehand; leave room for it"
        )
    points = punar.frontier(punar.Profile(trace=trace), compress=remat.compress).points
    shown = points[:: -max(1, len(points) // 8)][::-1]  # with the last one, which keeps all
    say("without offloading, other budgets would cost:")
    emit_table(
        ("peak of the whole step", "time, predicted", "above plain"),
        [(format_bytes(p.peak_bytes), format_seconds(p.time_ns), f"{p.overhead:+.1%}") for p in shown],
    )
