"""Descriptions of devices: what a step would take on one that is not here.

``devices.json`` beside this file holds those known by name, each figure with its source. ``punar calibrate`` writes one of the device at hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from punar.errors import PlanError, UsageError

FORMAT = "punar-device"
VERSION = 1

_TABLE = Path(__file__).with_name("devices.json")
_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What costs on a device are computed from.

    Units: ``memory_bytes`` bytes; the ``_per_second`` ones bytes, and of ``flops_per_second`` floating-point operations for each dtype, dense;
    ``launch_ns`` nanoseconds an operator takes however small it is. ``compute_efficiency`` and ``memory_efficiency``: the shares of the peaks that
    operators are taken to reach. ``kind``: torch's name for it (ROCm's devices are ``cuda`` too). ``sources``: where each figure is from.
    """

    name: str
    kind: str
    memory_bytes: int
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    host_bytes_per_second: float
    disk_bytes_per_second: float
    launch_ns: int
    compute_efficiency: float
    memory_efficiency: float
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def torch_name(self) -> str:
        """The device's name in a trace."""
        return "cuda:0" if self.kind == "cuda" else "cpu"

    def flops_of(self, dtype: str) -> float:
        """Peak operations a second in a dtype; a dtype without a figure is taken as float32."""
        return self.flops_per_second.get(dtype, self.flops_per_second["float32"])

    def to_json(self) -> str:
        """Writes the description as JSON; ``read_device`` reads it back equal."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=2)


FIGURES = tuple(f.name for f in fields(Device) if f.name not in ("name", "kind", "sources"))
"""What a description gives a source for."""


@lru_cache(maxsize=1)
def known_devices() -> Mapping[str, Device]:
    """The devices known by name."""
    rows = json.loads(_TABLE.read_text(encoding="utf-8"))["devices"]
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
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"asked to read a device description from {asked}, which cannot be read ({error}); calibrate again") from error


def read_device(text: str) -> Device:
    """Reads what ``Device.to_json`` wrote.

    Raises:
        PlanError: the text is no description of ours, or one of its figures is missing or no positive number.
    """
    try:
        body = json.loads(text)
    except ValueError as error:
        raise PlanError(f"asked to read a device description, found no JSON ({error}); calibrate again") from error
    if not isinstance(body, dict) or (body.get("format"), body.get("version")) != (FORMAT, VERSION):
        raise PlanError("asked to read a device description, found a file that is none, or of another version; calibrate again")
    return _device_from(body)


def _device_from(row: dict[str, Any]) -> Device:
    if row.get("kind") not in _KINDS or not isinstance(row.get("name"), str):
        raise PlanError(
            f"the device description is damaged: kind is {row.get('kind')!r}, it must be one of {', '.join(_KINDS)}; calibrate again"
        )
    rates = row.get("flops_per_second")
    if not isinstance(rates, dict) or "float32" not in rates:
        raise PlanError("the device description is damaged: flops_per_second must name a rate for float32; calibrate again")
    sources = row.get("sources", {})
    if not isinstance(sources, dict):
        raise PlanError("the device description is damaged: sources must name where each figure is from; calibrate again")
    numbers = {name: _positive(name, row.get(name)) for name in FIGURES if name != "flops_per_second"}
    whole = {name: int(numbers.pop(name)) for name in ("memory_bytes", "launch_ns")}
    flops_per_second = {dtype: _positive(f"flops_per_second of {dtype}", rate) for dtype, rate in rates.items()}
    return Device(name=row["name"], kind=row["kind"], flops_per_second=flops_per_second, sources=sources, **numbers, **whole)


def _positive(name: str, number: Any) -> Any:
    """A figure, which is a positive number."""
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < float("inf"):
        raise PlanError(f"the device description is damaged: {name} is {number!r}, it must be a positive number; calibrate again")
    return number
