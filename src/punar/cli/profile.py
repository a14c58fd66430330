"""``punar profile``: records one step as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from punar.cli.options import Json, Seed, Source, Threads, check_output, set_threads
from punar.cli.output import emit, emit_json, say
from punar.cli.source import load_step
from punar.units import format_bytes, format_seconds


def profile(
    source: Source,
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="Where to write the trace.")],
    json: Json = False,
    seed: Seed = 0,
    threads: Threads = None,
) -> None:
    """Records one step of a model as a trace, from which `punar solve` makes plans."""
    check_output(output)
    set_threads(threads)
    model, batch, loss_fn = load_step(source, seed=seed)
    import punar

    found = punar.profile(model, batch, loss_fn)
    found.save(output)
    trace = found.trace
    summary = {
        "path": str(output),
        "device": trace.device,
        "fingerprint": trace.fingerprint,
        "operators": len(trace.ops),
        "saved_values": len(trace.saved_values()),
        "resident_bytes": trace.resident_bytes,
        "time_ns": trace.plain_time_ns,
    }
    say(f"wrote {output}")
    if json:
        emit_json(summary)
        return
    emit(f"device          {trace.device}")
    emit(f"operators       {len(trace.ops)}, of which {len(trace.forward_ops)} in forward")
    emit(f"saved values    {len(trace.saved_values())}")
    emit(f"resident        {format_bytes(trace.resident_bytes)}")
    emit(f"time, measured  {format_seconds(trace.plain_time_ns)}")
