"""``punar calibrate``: measures the device at hand, for profiles that are made elsewhere."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from punar.cli.options import Json, Threads, check_output, set_threads
from punar.cli.output import WrongArgument, emit, say
from punar.units import format_bytes


def calibrate(
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="Where to write the description.")],
    device: Annotated[str, typer.Option("--device", help='"cpu", "cuda" or "cuda:1".')] = "cpu",
    folder: Annotated[
        Path | None, typer.Option("--folder", file_okay=False, help="The folder whose disk is measured; else that of temporary files.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="What to call the device; else what the system calls it.")] = None,
    json: Json = False,
    threads: Threads = None,
) -> None:
    """Measures a device and writes a description of it, which `punar profile --device` takes; a few seconds."""
    check_output(output)
    set_threads(threads)
    import torch

    from punar.plan.plan import write_text
    from punar.torch.calibrate import calibrated

    try:
        asked = torch.device(device)
    except RuntimeError as error:
        raise WrongArgument(f"asked to measure {device!r}, which is no device; give cpu, cuda or cuda:1") from error
    found = calibrated(asked, str(folder or tempfile.gettempdir()), name)
    write_text(output, found.to_json())
    say(f"wrote {output}")
    if json:
        emit(found.to_json())
        return
    emit(f"device          {found.name}")
    emit(f"memory          {format_bytes(found.memory_bytes)}, {found.memory_bytes_per_second / 1e9:.3g} GB/s")
    for dtype, rate in found.flops_per_second.items():
        emit(f"{dtype:15} {rate / 1e12:.3g} TFLOP/s")
    emit(f"small operator  {found.launch_ns / 1e3:.3g} µs")
    emit(f"host, disk      {found.host_bytes_per_second / 1e9:.3g} GB/s, {found.disk_bytes_per_second / 1e9:.3g} GB/s")
