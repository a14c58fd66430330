"""Bytes and seconds, to and from text: the only place where units convert."""

from __future__ import annotations

import math
import re

from punar.errors import BudgetError

_BINARY = {"b": 0, "kib": 1, "mib": 2, "gib": 3, "tib": 4, "k": 1, "m": 2, "g": 3, "t": 4}
_DECIMAL = {"kb": 1, "mb": 2, "gb": 3, "tb": 4}
_PATTERN = re.compile(r"^\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]+)\s*$", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Reads ``"6 GiB"``, ``"600MB"`` or ``"1024 B"`` as a number of bytes.

    Binary units (KiB, MiB, GiB, TiB, or a bare K, M, G, T) count in 1024s, decimal ones (KB, MB, GB, TB) in 1000s.

    Raises:
        BudgetError: the text is no positive number with a unit of bytes.
    """
    match = _PATTERN.match(text)
    unit = match[2].lower() if match else ""
    if match is None or (unit not in _BINARY and unit not in _DECIMAL):
        raise BudgetError(
            f"budget {text!r} cannot be read as bytes: it must be a number and a unit (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB), "
            f'for example "6 GiB"; or a fraction such as 0.4, "min", or "auto"'
        )
    scale = 1024 ** _BINARY[unit] if unit in _BINARY else 1000 ** _DECIMAL[unit]
    size = math.floor(float(match[1]) * float(scale))
    if size <= 0:
        raise BudgetError(f"budget {text!r} is {size} B: a budget must be at least 1 B")
    return size


def format_bytes(size: int) -> str:
    """Writes a number of bytes with the binary unit that keeps it short: ``"437.2 MiB"``."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if abs(size) >= 1024**power:
            return f"{size / 1024**power:.1f} {unit}"
    return f"{size} B"


def format_seconds(time_ns: float) -> str:
    """Writes nanoseconds as seconds, milliseconds or microseconds: ``"1.24 s"``."""
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(time_ns) >= scale:
            return f"{time_ns / scale:.2f} {unit}"
    return f"{time_ns:.0f} ns"
