"""``punar profile``: records one step as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from punar.cli.complete import complete_device
from punar.cli.hf import Sizes, parse_stage
from punar.cli.options import (
    Batch,
    Dtype,
    Json,
    Length,
    Optimizer,
    Seed,
    Shards,
    Source,
    Threads,
    ZeroStage,
    check_output,
    optimizer_of,
    set_threads,
)
from punar.cli.output import WrongArgument, emit, emit_json, say, working
from punar.cli.source import load_step
from punar.errors import UsageError
from punar.units import format_bytes, format_seconds

DEVICE_HELP = 'The device to compute the step for, which need not be here: a name such as "h100-80gb", or what `punar calibrate` wrote.'


def profile(
    source: Source,
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="Where to write the trace.")],
    device: Annotated[str | None, typer.Option("--device", help=DEVICE_HELP, autocompletion=complete_device)] = None,
    optimizer: Optimizer = None,
    shards: Shards = 1,
    zero_stage: ZeroStage = 3,
    batch: Batch = None,
    length: Length = None,
    dtype: Dtype = None,
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
    if in_flight is None and part is not None and device is not None:
        in_flight = part.in_flight
    sizes = Sizes(batch=batch, length=length, dtype=dtype, tensor=tensor, stage=part, has_weights=device is None)
    with working("loading the model") as tell:
        model, inputs, loss_fn = load_step(source, seed=seed, sizes=sizes)
        tell("running the step" if device is None else "tracing the step")
        found = punar.profile(
            model,
            inputs,
            loss_fn,
            device=device,
            optimizer=optimizer_of(optimizer),
            shards=shards,
            zero_stage=zero_stage,
            in_flight=in_flight,
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
