"""The most bytes that a step allocates above what was there: from the allocator itself, or where that cannot be had from punar's meter."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import punar

SOURCE = Path(__file__).with_name("allocations.c")
VARIABLE = "PUNAR_BENCHMARK_ALLOCATIONS"
"""Where the preloaded library lies; set by the parent process, which also preloads it."""


class Witness(Protocol):
    """Who counts. ``name`` goes into the results; ``is_exact``: it sees every allocation, whoever makes it."""

    name: str
    is_exact: bool

    def live_bytes(self) -> int: ...

    def peak_bytes(self, step: Callable[[], object], remat: punar.Remat | None) -> int: ...


class Allocator:
    """The preloaded allocator: every ``malloc`` of a page or more."""

    name = "allocator"
    is_exact = True

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        for name in ("allocations_live", "allocations_peak"):
            getattr(self.library, name).restype = ctypes.c_long

    def live_bytes(self) -> int:
        gc.collect()
        return int(self.library.allocations_live())

    def peak_bytes(self, step: Callable[[], object], remat: punar.Remat | None) -> int:
        before = self.live_bytes()
        self.library.allocations_restart()
        step()
        return int(self.library.allocations_peak()) - before


class Meter:
    """punar's own meter, which sees storages: not what a peer keeps in other ways, and nothing between steps."""

    name = "punar's meter"
    is_exact = False

    def live_bytes(self) -> int:
        return 0

    def peak_bytes(self, step: Callable[[], object], remat: punar.Remat | None) -> int:
        if remat is not None:
            step()
            return remat._session.meter.peak
        watch = punar.Remat()
        for _ in range(2):  # the first is recorded, which allocates besides
            with watch:
                step()
        return watch._session.meter.peak


def find_witness() -> Witness:
    """The preloaded allocator where the parent process built one."""
    path = os.environ.get(VARIABLE, "")
    return Allocator(path) if path else Meter()


def preloaded(folder: Path) -> dict[str, str]:
    """The environment in which a child process counts its allocations; builds the library, says so where it cannot."""
    compiler = shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        found = "no gcc" if compiler is None else f"{sys.platform}, where the library would need another form"
        print(
            f"asked for peaks as the allocator sees them, found {found}: falling back to punar's meter, which sees storages only. "
            "Install gcc on Linux with glibc for exact ones",
            file=sys.stderr,
        )
        return {}
    library = folder / "allocations.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return {"LD_PRELOAD": str(library), VARIABLE: str(library)}
