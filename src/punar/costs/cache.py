"""Measured times kept between runs, a file for each device and its versions, so that a first plan is made with times that are known already.

The environment variable ``PUNAR_CACHE`` names the directory, or is ``off``. A file that cannot be read or written is as none: times are measured anyway.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from punar.costs.ledger import REMEMBERED, Ledger

FORMAT = "punar-costs"
VERSION = 1

_MOST = 20_000
"""Signatures kept in a file; beyond, those measured longest ago are forgotten."""


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
        """What was measured in earlier runs; empty where there is no file that can be read."""
        path = self.path
        if path is None:
            return Ledger()
        try:
            return Ledger(_samples_from(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError):
            return Ledger()

    def save(self, ledger: Ledger) -> None:
        """Writes the file anew, whole or not at all; what another process wrote meanwhile about other operators is kept."""
        path = self.path
        if path is None:
            return
        samples = {**self.load().samples}
        for key, times in ledger.samples.items():
            samples.pop(key, None)
            samples[key] = times
        kept = {key: list(samples[key]) for key in list(samples)[-_MOST:]}
        text = json.dumps({"format": FORMAT, "version": VERSION, "device": self.device, "samples": kept})
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, text)


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
