"""Options that several commands share."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from punar.cli.complete import complete_model, complete_solver
from punar.cli.output import WrongArgument
from punar.errors import BudgetError
from punar.plan.codecs import OPTIONS
from punar.units import parse_bytes

MOST_THREADS = 1024
"""With very many, such as 100 000, torch ends with a segmentation fault."""

BUDGET_HELP = 'Bytes of the whole step ("600 MiB"), a fraction of the activation peak (0.4), "min" or "auto".'
SOURCE_HELP = (
    "A Python file with make() -> (model, batch, loss_fn), FILE.py:function or module:function for another, hf: and the path of a transformers "
    "configuration, or the name of a demo model."
)

Source = Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP, autocompletion=complete_model)]
Solver = Annotated[str, typer.Option("--solver", help="Which solver makes the plan.", autocompletion=complete_solver)]
OFFLOAD_HELP = (
    'Where activations may be moved: from a CUDA device to "cpu" or "cpu:32 GiB"; from any to "disk" (the folder for temporary files), '
    '"disk:/path" or "disk:/path:500 GiB". Repeatable.'
)

COMPRESS_HELP = (
    'How values may be held in fewer bytes: "mask" (exact; the default), "bf16", "int8", "int4" (they round), "none". Repeatable.'
)

Compress = Annotated[list[str] | None, typer.Option("--compress", help=COMPRESS_HELP)]
Offload = Annotated[list[str] | None, typer.Option("--offload", help=OFFLOAD_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=(1 << 63) - 1, help="Seed of weights, batches and dropout.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, max=MOST_THREADS, help="Threads that torch computes with.")]
OPTIMIZER_HELP = (
    'With --device: whose state is resident, "sgd", "momentum", "adam" or "adamw", or its bytes for each trained number, such as 12.'
)
Optimizer = Annotated[str | None, typer.Option("--optimizer", help=OPTIMIZER_HELP)]
Shards = Annotated[int, typer.Option("--shards", min=1, help="With --device: over how many devices the step's state is spread.")]
ZeroStage = Annotated[
    int, typer.Option("--zero-stage", min=1, max=3, help="What is spread: 1 optimizer state, 2 gradients too, 3 parameters too.")
]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Of hf:CONFIG.json: texts in the batch.")]
Length = Annotated[int | None, typer.Option("--length", min=2, help="Of hf:CONFIG.json: tokens of each text.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Of hf:CONFIG.json: the weights', else the configuration's.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", dir_okay=False, help="Where to write it.")]


def parse_budget(text: str) -> str | float | int:
    """Reads a budget from the command line as ``punar.Remat`` takes it.

    ``"min"`` and ``"auto"`` stay text, and so does a number with a unit. A bare number up to 1 is a fraction, a whole one above it bytes.

    Raises:
        BudgetError: the text is none of these.
    """
    if text in ("min", "auto"):
        return text
    try:
        fraction = float(text)
    except ValueError:
        parse_bytes(text)
        return text
    if text.isdecimal() and 1 < fraction < math.inf:
        return int(text)
    if not 0 < fraction <= 1:
        raise BudgetError(
            f"budget {text!r} is the number {fraction:g}: a fraction of the activation peak must be above 0 and at most 1; "
            'for bytes give a unit, for example "600 MiB"'
        )
    return fraction


@contextmanager
def offload_to(offload: list[str] | None) -> Iterator[list[str] | None]:
    """Within, the places that were asked for are there: a folder of its own for a bare ``"disk"``."""
    if not offload or "disk" not in offload:
        yield offload or None
        return
    with tempfile.TemporaryDirectory(prefix="punar-") as folder:
        yield [f"disk:{folder}" if place == "disk" else place for place in offload]


def budget_beside(plan: Path | None, budget: str | None) -> str | float | int | None:
    """Reads a budget that may be left out, and must be where a plan is given.

    Raises:
        typer.BadParameter: both were given.
        BudgetError: the budget is none.
    """
    if budget is not None and plan is not None:
        raise typer.BadParameter("give --budget or --plan, not both", param_hint="--budget / --plan")
    return None if budget is None else parse_budget(budget)


def compress_by(names: list[str] | None) -> tuple[str, ...]:
    """Reads how to compress as ``punar.Remat`` takes it: exactly, besides what was asked for, unless that is nothing.

    Raises:
        WrongArgument: one of them is no way to compress.
    """
    if names == ["none"]:
        return ()
    if unknown := [name for name in names or () if name not in OPTIONS]:
        raise WrongArgument(f"asked to compress by {unknown[0]!r}; give some of {', '.join(OPTIONS)}, or none alone")
    return ("mask", *(names or ()))


def set_threads(threads: int | None) -> None:
    """Has torch compute with this many threads."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def optimizer_of(text: str | None) -> str | float | None:
    """Reads whose state is resident: a number is bytes; the rest names an optimizer.

    Raises:
        WrongArgument: it is neither.
    """
    from punar.described import OPTIMIZERS

    if text is None or text in OPTIMIZERS:
        return text
    try:
        nbytes = float(text)
    except ValueError:
        nbytes = -1
    if not 0 <= nbytes < math.inf:
        raise WrongArgument(
            f"asked for the optimizer {text!r}; give one of {', '.join(OPTIMIZERS)}, or the bytes it keeps for each trained number, such as 12"
        )
    return nbytes


def check_output(path: Path | None) -> None:
    """Raises ``WrongArgument`` where a file cannot be written: to be known before the work, not after it."""
    if path is None:
        return
    parent = path.absolute().parent
    if not parent.is_dir():
        raise WrongArgument(f"asked to write {path}, found no directory {parent}; make it, or give another path")
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise WrongArgument(f"asked to write {path}, which this user may not; give another path")
