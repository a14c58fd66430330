"""Is every device's description whole, read back equal, and refused where it is damaged?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from punar.costs import Device, find_device, known_devices
from punar.costs.devices import FIGURES, read_device
from punar.errors import PlanError, UsageError


@pytest.mark.parametrize("device", known_devices().values(), ids=lambda device: device.name)
def test_each_figure_has_a_source_and_a_likely_size(device: Device) -> None:
    assert set(device.sources) == set(FIGURES)
    assert all(device.sources.values())
    assert 16 << 30 < device.memory_bytes < 1 << 39
    assert device.kind == "cpu" or f"-{device.memory_bytes // 10**9}gb" in device.name
    assert device.host_bytes_per_second <= device.memory_bytes_per_second < 10**14
    assert all(10**12 < rate < 10**16 for rate in device.flops_per_second.values())
    assert device.flops_of("float16") >= device.flops_of("float32")
    assert device.torch_name == ("cpu" if device.kind == "cpu" else "cuda:0")


@pytest.mark.parametrize("device", known_devices().values(), ids=lambda device: device.name)
def test_a_description_is_read_back_equal(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(device.to_json(), encoding="utf-8")
    assert find_device(path) == find_device(str(path)) == find_device(device.name) == device


def test_a_dtype_without_a_figure_is_taken_as_float32() -> None:
    v100 = find_device("v100-32gb")
    assert v100.flops_of("bfloat16") == v100.flops_of("float64") == v100.flops_per_second["float32"]


@pytest.mark.parametrize("asked", ["h100", "/nowhere/device.json", "", 5, None])
def test_unknown_devices_are_refused_with_the_known_ones(asked: Any) -> None:
    with pytest.raises(UsageError, match=r"give one of v100-32gb, .* or the path of what `punar calibrate` wrote"):
        find_device(asked)


DAMAGE: dict[str, Any] = {
    "memory_bytes is -1, it must be": {"memory_bytes": -1},
    "launch_ns is 2.5, it must be": {"launch_ns": 2.5},
    "disk_bytes_per_second is True, it must be": {"disk_bytes_per_second": True},
    "compute_efficiency is 1.5, it must be": {"compute_efficiency": 1.5},
    "memory_efficiency is NaN|memory_efficiency is nan": {"memory_efficiency": float("nan")},
    "kind is 'tpu', it must be one of cpu, cuda": {"kind": "tpu"},
    "flops_per_second is .* a rate for float32": {"flops_per_second": {"bfloat16": 1}},
    "flops_per_second.float32 is 0, it must be": {"flops_per_second": {"float32": 0}},
    "flops_per_second is .*, it must be an object": {"flops_per_second": [1]},
    "sources.launch_ns is 5, it must be a text": {"sources": {"launch_ns": 5}},
    "colour is no field": {"colour": "green"},
    "reads 1; make": {"version": 2},
    "found 'punar-trace'": {"format": "punar-trace"},
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_descriptions_are_refused(message: str, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(json.dumps(json.loads(find_device("cpu").to_json()) | DAMAGE[message]), encoding="utf-8")
    with pytest.raises(PlanError, match=f"device.json: .*({message}).*; calibrate again"):
        find_device(path)


@pytest.mark.parametrize("figure", FIGURES)
def test_a_missing_figure_is_named(figure: str) -> None:
    body = json.loads(find_device("cpu").to_json())
    del body[figure]
    with pytest.raises(PlanError, match=f"{figure} is missing"):
        read_device(json.dumps(body))


@pytest.mark.parametrize("text", ["", "[]", "no JSON", '"h100"'])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="asked to read a punar-device file"):
        read_device(text)
