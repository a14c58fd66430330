"""``punar frontier``: prints all that memory costs in time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from punar.cli.options import Compress, Json, Offload, compress_by, offload_to
from punar.cli.output import emit, emit_json, say, working
from punar.units import format_bytes

if TYPE_CHECKING:
    from punar import Frontier


def frontier(
    trace: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What `punar profile` wrote.")],
    offload: Offload = None,
    compress: Compress = None,
    json: Json = False,
) -> None:
    """Prints the least time known at each peak, for a trace that `punar profile` wrote; with --offload beside what it is without."""
    import punar

    ways = compress_by(compress)
    with offload_to(offload) as place, working("looking for plans"):
        profile = punar.Profile.load(trace)
        found = punar.frontier(profile, offload=place, compress=ways)
    if "described_device" in profile.trace.meta:
        memory_bytes = int(profile.trace.meta["memory_bytes"])
        fits = sum(point.peak_bytes <= memory_bytes for point in found.points)
        say(f"{fits} of {len(found.points)} plans fit {profile.trace.meta['described_device']}, which has {format_bytes(memory_bytes)}")
    if not json:
        emit(str(found))
        return
    emit_json({"points": _points(found), "alone": None if found.alone is None else _points(found.alone)})


def _points(found: Frontier) -> list[dict[str, float]]:
    names = ("peak_bytes", "time_ns", "bound_ns", "overhead")
    return [{name: getattr(point, name) for name in names} for point in found.points]
