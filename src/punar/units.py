"""Bytes and seconds, to and from text: the only place where units convert."""

from __future__ import annotations

import math
import re

from punar.errors import BudgetError

_BINARY = {"b": 0, "kib": 1, "mib": 2, "gib": 3, "tib": 4, "k": 1, "m": 2, "g": 3, "t": 4}
_DECIMAL = {"kb": 1, "mb": 2, "gb": 3, "tb": 4}
_PATTERN = re.compile(r"^\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zµ]+)\s*$", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Reads ``"6 GiB"``, ``"600MB"`` or ``"1024 B"`` as a number of bytes.

    Binary units (KiB, MiB, GiB, TiB, or a bare K, M, G, T) count in 1024s, decimal ones (KB, MB, GB, TB) in 1000s.

    Raises:
        BudgetError: the text is no positive number with a unit of bytes.
    """
    match = _PATTERN.match(text)
    unit = match[2].lower() if match else ""
    if (number := _number_in(text)) is not None:
        raise BudgetError(f"budget {text!r} is a text of a number without a unit of bytes; {_meant(number)}")
    if match is None or (unit not in _BINARY and unit not in _DECIMAL):
        raise BudgetError(
            f"budget {text!r} cannot be read as bytes: it must be a number and a unit (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB), "
            f'for example "6 GiB"; or a fraction such as 0.4, "min", or "auto"'
        )
    scale = 1024 ** _BINARY[unit] if unit in _BINARY else 1000 ** _DECIMAL[unit]
    size = float(match[1]) * float(scale)
    if not 1 <= size < math.inf:
        raise BudgetError(f"budget {text!r} is {size:.6g} B: a budget must be at least 1 B, and a number that a computer can hold")
    return math.floor(size)


def _number_in(text: str) -> float | None:
    """The number that a text is, in per cent or plain; None where it is none."""
    plain = text.strip()
    try:
        return float(plain.removesuffix("%")) / (100 if plain.endswith("%") else 1)
    except ValueError:
        return None


def _meant(number: float) -> str:
    """What to give for a number that was given as a text."""
    if 0 < number <= 1:
        return f"for that share of the activation peak give the float {number:g}, not a text"
    if number > 1 and number.is_integer():
        return f'for bytes give the int {number:.0f} or the text "{number:.0f} B"'
    return 'give bytes such as "6 GiB", or a float in (0, 1] for a share of the activation peak'


_SECONDS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9}


def parse_seconds(text: str) -> int | None:
    """Reads ``"300 ms"``, ``"1.5 s"`` or ``"2 min"`` as nanoseconds; None where it is no number with such a unit."""
    match = _PATTERN.match(text.replace("μ", "µ"))
    if match is None or match[2] not in _SECONDS:
        return None
    return round(float(match[1]) * _SECONDS[match[2]])


def format_bytes(size: int) -> str:
    """Writes a number of bytes with the binary unit that keeps it short: ``"437.2 MiB"``."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if abs(size) >= 1024**power:
            return f"{size / 1024**power:.1f} {unit}"
    return f"{size} B"


def format_apart(*sizes: int) -> tuple[str, ...]:
    """Writes sizes that are compared as ``format_bytes`` does; to the byte where different ones would read the same."""
    texts = tuple(map(format_bytes, sizes))
    return texts if len(set(texts)) == len(set(sizes)) else tuple(f"{size} B" for size in sizes)


def format_seconds(time_ns: float) -> str:
    """Writes nanoseconds as seconds, milliseconds or microseconds: ``"1.24 s"``."""
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(time_ns) >= scale:
            return f"{time_ns / scale:.2f} {unit}"
    return f"{time_ns:.0f} ns"


def byte_unit(size: int) -> tuple[str, int]:
    """The binary unit that ``format_bytes`` would write a size in, and its bytes: for axes, whose numbers share one unit."""
    units = (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1))
    return next(((unit, 1024**power) for unit, power in units if abs(size) >= 1024**power), ("B", 1))


def second_unit(time_ns: float) -> tuple[str, int]:
    """The unit that ``format_seconds`` would write a time in, and its nanoseconds."""
    units = (("s", 10**9), ("ms", 10**6), ("µs", 10**3))
    return next(((unit, scale) for unit, scale in units if abs(time_ns) >= scale), ("ns", 1))
