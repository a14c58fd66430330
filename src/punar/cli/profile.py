"""``punar profile``: records one step as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from punar.cli.hf import Sizes, parse_stage
from punar.cli.options import Json, Seed, Source, Threads, check_output, set_threads
from punar.cli.output import WrongArgument, emit, emit_json, say
from punar.cli.source import load_step
from punar.errors import UsageError
from punar.units import format_bytes, format_seconds

DEVICE_HELP = 'The device to compute the step for, which need not be here: a name such as "h100-80gb", or what `punar calibrate` wrote.'
OPTIMIZER_HELP = (
    'With --device: whose state is resident, "sgd", "momentum", "adam" or "adamw", or its bytes for each trained number, such as 12.'
)


def profile(
    source: Source,
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="Where to write the trace.")],
    device: Annotated[str | None, typer.Option("--device", help=DEVICE_HELP)] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help=OPTIMIZER_HELP)] = None,
    shards: Annotated[int, typer.Option("--shards", min=1, help="With --device: over how many devices the step's state is spread.")] = 1,
    zero_stage: Annotated[
        int, typer.Option("--zero-stage", min=1, max=3, help="What is spread: 1 optimizer state, 2 gradients too, 3 parameters too.")
    ] = 3,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Of hf:CONFIG.json: texts in the batch.")] = None,
    length: Annotated[int | None, typer.Option("--length", min=2, help="Of hf:CONFIG.json: tokens of each text.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of hf:CONFIG.json: the weights', else the configuration's.")] = None,
    tensor: Annotated[int, typer.Option("--tensor", min=1, help="Of hf:CONFIG.json: over how many devices each layer is split.")] = 1,
    stage: Annotated[
        str | None, typer.Option("--stage", help="Of hf:CONFIG.json: the stage of a pipeline, such as 1/4 for the first of four.")
    ] = None,
    in_flight: Annotated[
        int | None,
        typer.Option(
            "--in-flight", min=1, help="With --device: micro-batches between forward and backward; of --stage I/P as many as it has."
        ),
    ] = None,
    json: Json = False,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Records one step of a model as a trace, from which `punar solve` makes plans; with --device without running it."""
    check_output(output)
    check_device(device)
    if device is None and (optimizer, shards, zero_stage, in_flight) != (None, 1, 3, None):
        raise WrongArgument(
            "asked for --optimizer, --shards, --zero-stage or --in-flight of a step that runs here, where they are as they are; give --device too"
        )
    set_threads(threads)
    import punar

    part = None if stage is None else parse_stage(stage)
    sizes = Sizes(batch=batch, length=length, dtype=dtype, tensor=tensor, stage=part, has_weights=device is None)
    model, inputs, loss_fn = load_step(source, seed=seed, sizes=sizes)
    if in_flight is None and part is not None and device is not None:
        in_flight = part.in_flight
    found = punar.profile(
        model, inputs, loss_fn, device=device, optimizer=_optimizer(optimizer), shards=shards, zero_stage=zero_stage, in_flight=in_flight
    )
    found.save(output)
    trace = found.trace
    plain = punar.solve(found, budget=None)
    summary = {
        "path": str(output),
        "device": trace.meta.get("described_device", trace.device),
        "fingerprint": trace.fingerprint,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "operators": len(trace.ops),
        "saved_values": len(trace.saved_values()),
        "resident_bytes": trace.resident_bytes,
        "plain_peak_bytes": plain.peak_bytes,
        "time_ns": trace.plain_time_ns,
    }
    say(f"wrote {output}")
    if json:
        emit_json(summary)
        return
    emit(f"device          {summary['device']}")
    emit(f"parameters      {summary['parameters']:,}")
    emit(f"operators       {len(trace.ops)}, of which {len(trace.forward_ops)} in forward")
    emit(f"saved values    {len(trace.saved_values())}")
    emit(f"resident        {format_bytes(trace.resident_bytes)}")
    emit(f"plain peak      {format_bytes(plain.peak_bytes)}")
    emit(f"time, {'measured' if device is None else 'computed'}  {format_seconds(trace.plain_time_ns)}")


def check_device(device: str | None) -> None:
    """Raises ``WrongArgument`` where there is no such device."""
    from punar.costs import find_device

    try:
        if device is not None:
            find_device(device)
    except UsageError as error:
        raise WrongArgument(str(error)) from error


def _optimizer(text: str | None) -> str | float | None:
    """A number is bytes; the rest names an optimizer."""
    from punar.described import OPTIMIZERS

    if text is None or text in OPTIMIZERS:
        return text
    try:
        return float(text)
    except ValueError as error:
        raise WrongArgument(
            f"asked for the optimizer {text!r}; give one of {', '.join(OPTIMIZERS)}, or the bytes it keeps for each trained number, such as 12"
        ) from error
