"""Measured times kept between runs, a file for each device and its versions, so that a first plan is made with times that are known already.

The environment variable ``PUNAR_CACHE`` names the directory, or is ``off``. A file that cannot be read or written is as none: times are measured anyway.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from punar.costs.ledger import REMEMBERED, Ledger

FORMAT = "punar-costs"
VERSION = 1

_MOST = 20_000
"""Signatures kept in a file; beyond, those measured longest ago are forgotten."""


_PAUSE_S = 60.0
"""For so long samples wait to be written by ``save_soon``, unless the program ends before."""


@dataclass(slots=True)
class _Waiting:
    """Samples that are to be written. ``since_s``: by the clock, when the first of them came."""

    cache: CostCache
    since_s: float
    samples: dict[str, list[int]] = field(default_factory=dict)


_waiting: dict[Path, _Waiting] = {}
_lock = threading.Lock()


class CostCache:
    """The file of one device. ``device``: whatever its times depend on, such as its name and versions."""

    def __init__(self, device: Mapping[str, str]) -> None:
        self.device = dict(sorted(device.items()))

    @property
    def path(self) -> Path | None:
        """Where the file is; None where there is to be none."""
        asked = os.environ.get("PUNAR_CACHE", "")
        if asked == "off":
            return None
        folder = Path(asked) if asked else user_cache_path("punar")
        return folder / f"costs-{hashlib.sha256(json.dumps(self.device).encode()).hexdigest()[:16]}.json"

    def load(self) -> Ledger:
        """What was measured in earlier runs, and in this one; empty where there is no file that can be read."""
        path = self.path
        if path is None:
            return Ledger()
        samples: dict[str, list[int]] = {}
        with suppress(OSError, ValueError):
            samples = _samples_from(json.loads(path.read_text(encoding="utf-8")))
        with _lock:
            return Ledger(samples | (_waiting[path].samples if path in _waiting else {}))

    def save(self, ledger: Ledger) -> None:
        """Writes the file anew, whole or not at all; what another process wrote meanwhile about other operators is kept."""
        if self.path is not None:
            self._write(self.path, ledger.samples)

    def save_soon(self, ledger: Ledger) -> None:
        """Writes what the ledger was told since the last time, with what came meanwhile, after a while or when the program ends: reading and writing a long file
        takes longer than many a step."""
        path, fresh = self.path, ledger.take_fresh()
        if path is None or not fresh:
            return
        with _lock:
            waiting = _waiting.setdefault(path, _Waiting(self, time.monotonic()))
            waiting.samples.update(fresh)
            if time.monotonic() - waiting.since_s < _PAUSE_S:
                return
            del _waiting[path]
        self._write(path, waiting.samples)

    def _write(self, path: Path, found: Mapping[str, Iterable[int]]) -> None:
        samples: dict[str, Iterable[int]] = {**self.load().samples}
        for key, times in found.items():
            samples.pop(key, None)
            samples[key] = times
        kept = {key: list(samples[key]) for key in list(samples)[-_MOST:]}
        text = json.dumps({"format": FORMAT, "version": VERSION, "device": self.device, "samples": kept})
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, text)


@atexit.register
def write_waiting() -> None:
    """Writes all that waits for it."""
    with _lock:
        waiting = dict(_waiting)
        _waiting.clear()
    for path, each in waiting.items():
        each.cache._write(path, each.samples)


def remembered(device: Mapping[str, str], needed: Collection[str], measure: Callable[[], dict[str, int]]) -> dict[str, int]:
    """Figures of a device that a run before measured, if all ``needed`` ones are there; else measures them, and keeps those above zero for the next run."""
    cache = CostCache(device)
    known = {name: times[-1] for name, times in cache.load().samples.items()}
    if known.keys() >= set(needed):
        return known
    found = measure()
    cache.save(Ledger({name: [figure] for name, figure in found.items() if figure > 0}))
    return found


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def _samples_from(body: Any) -> dict[str, list[int]]:
    if not isinstance(body, dict) or body.get("format") != FORMAT or body.get("version") != VERSION:
        raise ValueError("no file of ours, or of another version")
    samples = body.get("samples")
    if not isinstance(samples, dict):
        raise ValueError("no samples")
    return {
        str(key): [int(time) for time in times][-REMEMBERED:]
        for key, times in samples.items()
        if isinstance(times, list) and times and all(type(time) is int and time > 0 for time in times)
    }
