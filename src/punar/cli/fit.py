"""``punar fit``: finds the largest batch or length that fits, or the batch and plan of most samples a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from punar.cli.complete import complete_device, complete_goal
from punar.cli.hf import Sizes
from punar.cli.options import (
    BUDGET_HELP,
    Batch,
    Compress,
    Dtype,
    Json,
    Length,
    Offload,
    Optimizer,
    Output,
    Seed,
    Shards,
    Threads,
    ZeroStage,
    check_output,
    compress_by,
    offload_to,
    optimizer_of,
    parse_budget,
    set_threads,
)
from punar.cli.output import WrongArgument, emit, emit_json, emit_table, say, working
from punar.cli.profile import check_device
from punar.cli.source import load_sized

if TYPE_CHECKING:
    from punar import Trial

SOURCE_HELP = (
    "A Python file with make() and make_batch(size), FILE.py:function or module:function that returns (model, make_batch, loss_fn), or hf: and the path of a "
    "transformers configuration."
)
MAXIMIZE_HELP = '"batch" or "length" for the largest that fits, "throughput" for the most samples a second.'


def fit(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)],
    budget: Annotated[str, typer.Option("--budget", help=BUDGET_HELP)] = "auto",
    maximize: Annotated[str, typer.Option("--maximize", help=MAXIMIZE_HELP, autocompletion=complete_goal)] = "batch",
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help="The device to fit for, which need not be here; else the one at hand.", autocompletion=complete_device
        ),
    ] = None,
    output: Output = None,
    optimizer: Optimizer = None,
    shards: Shards = 1,
    zero_stage: ZeroStage = 3,
    batch: Batch = None,
    length: Length = None,
    dtype: Dtype = None,
    start: Annotated[int | None, typer.Option("--start", min=1, help="The size to begin with: 1, or a length of 64.")] = None,
    multiple_of: Annotated[int, typer.Option("--multiple-of", min=1, help="What sizes are multiples of.")] = 1,
    most: Annotated[int, typer.Option("--most", min=1, help="The largest size that may be.")] = 1 << 20,
    total: Annotated[
        int | None, typer.Option("--total", min=1, help="Of throughput: samples of an optimizer's step, in batches that divide them.")
    ] = None,
    optimizer_ms: Annotated[
        float, typer.Option("--optimizer-ms", min=0, help="Of throughput: milliseconds of an optimizer's step, else not counted.")
    ] = 0.0,
    is_confirmed: Annotated[
        bool, typer.Option("--confirm/--no-confirm", help="Run real steps of what is found, where the device is here.")
    ] = True,
    offload: Offload = None,
    compress: Compress = None,
    json: Json = False,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Finds the largest batch or length whose step fits a budget, or the batch and plan of most samples a second."""
    asked = parse_budget(budget)
    check_output(output)
    check_device(device)
    set_threads(threads)
    import punar
    from punar.fitting import GOALS

    if maximize not in GOALS:
        raise WrongArgument(f"asked to maximize {maximize!r}; give one of {', '.join(GOALS)}")
    if most < multiple_of:
        raise WrongArgument(f"asked for multiples of {multiple_of}, found none up to --most {most}; make them agree")
    sizes = Sizes(batch=batch, length=length, dtype=dtype, has_weights=device is None)
    with offload_to(offload) as places, working("loading the model") as tell:
        model, make_batch, loss_fn = load_sized(source, seed=seed, sizes=sizes, is_length=maximize == "length")
        tell(f"fitting {maximize}")

        def on_trial(trial: Trial) -> None:
            tell(f"fitting {maximize}: size {trial.size} {'fits' if trial.is_feasible else 'does not fit'}")

        found = punar.fit(
            model,
            make_batch,
            loss_fn,
            budget=asked,
            maximize=maximize,
            device=device,
            optimizer=optimizer_of(optimizer),
            shards=shards,
            zero_stage=zero_stage,
            offload=places,
            compress=compress_by(compress),
            start=start,
            multiple_of=multiple_of,
            most=most,
            total=total,
            optimizer_ns=round(optimizer_ms * 1e6),
            confirm=is_confirmed,
            on_trial=on_trial,
        )
    if output is not None:
        found.plan.save(output)
        say(f"wrote {output}")
    if json:
        emit_json(found.to_dict())
        return
    emit(found.sentence)
    emit_table(found.header, found.rows())
