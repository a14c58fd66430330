"""Descriptions of devices: what a step would take on one that is not here.

``devices.json`` beside this file holds those known by name, each figure with its source. ``punar calibrate`` writes one of the device at hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from punar.errors import PlanError, UsageError
from punar.ir.fields import Field, FieldError
from punar.ir.trace import read_json

FORMAT = "punar-device"
VERSION = 1

KINDS = ("cpu", "cuda")

_TABLE = Path(__file__).with_name("devices.json")
_MOST = 10**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What costs on a device are computed from.

    Units: ``memory_bytes`` bytes; the ``_per_second`` ones bytes, and of ``flops_per_second`` floating-point operations for each dtype, dense, peak;
    ``launch_ns`` nanoseconds an operator takes however small it is. ``compute_efficiency`` and ``memory_efficiency``: the shares of the peaks that
    operators are taken to reach. ``kind``: torch's name for it (ROCm's devices are ``cuda`` too). ``sources``: where each figure is from.
    """

    name: str
    kind: str
    memory_bytes: int
    flops_per_second: Mapping[str, int]
    memory_bytes_per_second: int
    host_bytes_per_second: int
    disk_bytes_per_second: int
    launch_ns: int
    compute_efficiency: float
    memory_efficiency: float
    sources: Mapping[str, str]

    @property
    def torch_name(self) -> str:
        """The device's name in a trace."""
        return "cuda:0" if self.kind == "cuda" else "cpu"

    def flops_of(self, dtype: str) -> int:
        """Peak operations a second in a dtype; a dtype without a figure is taken as float32."""
        return self.flops_per_second.get(dtype, self.flops_per_second["float32"])

    def to_json(self) -> str:
        """Writes the description as JSON; ``read_device`` reads it back equal."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)


_NAMES = tuple(field.name for field in fields(Device))
_EFFICIENCIES = ("compute_efficiency", "memory_efficiency")
FIGURES = tuple(name for name in _NAMES if name not in ("name", "kind", "sources"))
"""What a description gives a source for."""


@lru_cache(maxsize=1)
def known_devices() -> Mapping[str, Device]:
    """The devices known by name."""
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    assumed = table["assumed_of_all"]
    rows = [{**assumed, **row, "sources": {**assumed["sources"], **row["sources"]}} for row in table["devices"]]
    return {row["name"]: _device_from(row) for row in rows}


def find_device(asked: str | Path) -> Device:
    """A device by its name, or by the path of a description.

    Raises:
        UsageError: it is neither a name we know nor a file.
        PlanError: the file holds no description of ours.
    """
    if isinstance(asked, str) and asked in known_devices():
        return known_devices()[asked]
    if not isinstance(asked, (str, Path)) or not Path(asked).is_file():
        raise UsageError(
            f"asked for the device {asked!r}, which is neither one known by name nor a file; give one of {', '.join(known_devices())}, "
            "or the path of what `punar calibrate` wrote"
        )
    try:
        return read_device(Path(asked).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, PlanError) as error:
        raise PlanError(f"asked to read a device's description from {asked}: {error}; calibrate again") from error


def read_device(text: str) -> Device:
    """Reads what ``Device.to_json`` wrote.

    Raises:
        PlanError: the text is no description of ours, or one of its figures is missing or no positive number.
    """
    body = read_json(text, FORMAT, VERSION)
    try:
        return _device_from({name: item for name, item in body.items() if name not in ("format", "version")})
    except FieldError as error:
        raise PlanError(f"the description is damaged: {error}") from error


def _device_from(row: dict[str, Any]) -> Device:
    part = Field("", row).members(_NAMES)
    if part["kind"].text() not in KINDS:
        raise part["kind"].is_wrong(f"one of {', '.join(KINDS)}")
    rates = {dtype: rate.number(1, _MOST) for dtype, rate in _entries(part["flops_per_second"]).items()}
    if "float32" not in rates:
        raise part["flops_per_second"].is_wrong("an object with a rate for float32")
    whole = {name: part[name].number(1, _MOST) for name in FIGURES if name not in ("flops_per_second", *_EFFICIENCIES)}
    return Device(
        name=part["name"].text(),
        kind=part["kind"].text(),
        flops_per_second=rates,
        compute_efficiency=_share(part["compute_efficiency"]),
        memory_efficiency=_share(part["memory_efficiency"]),
        sources={name: source.text() for name, source in _entries(part["sources"]).items()},
        **whole,
    )


def _entries(found: Field) -> dict[str, Field]:
    """The fields of an object of any names."""
    if type(found.content) is not dict:
        raise found.is_wrong("an object")
    return found.members(tuple(found.content))


def _share(found: Field) -> float:
    if type(found.content) not in (int, float) or not 0 < found.content <= 1:
        raise found.is_wrong("a number above 0 and at most 1")
    return float(found.content)
