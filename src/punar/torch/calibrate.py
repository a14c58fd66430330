"""Measures the device at hand, as a description that steps can be profiled for where it is not."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from punar.costs import Device
from punar.errors import UsageError
from punar.tiers import Spool, measure
from punar.torch.host import measured
from punar.torch.places import physical_bytes
from punar.torch.session import describe
from punar.torch.streams import CudaStreams

_DTYPES = ("float32", "bfloat16", "float16")
_SMALLEST, _LARGEST = 512, 8192
_LONG_ENOUGH_NS = 20_000_000
"""A product that takes so long says how fast products are."""
_STREAM_BYTES = 64 << 20
_LAUNCHES = 2000
_REPEATS = 5


def calibrated(device: torch.device, folder: str, name: str | None = None) -> Device:
    """Measures products, streaming, small operators, and copies to the computer's memory and to a folder's disk; takes a few seconds.

    The rates are those that were reached, so that the description's efficiencies are 1.

    Raises:
        UsageError: the device is not here.
        OffloadError: the folder cannot be used.
    """
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"asked to measure {device}, which is not here; give cpu, or run this where it is")
    bandwidth = _bytes_per_second(device)
    with Spool(folder, None) as spool:
        disk = measure(spool)
    is_cuda = device.type == "cuda"
    host = measured(CudaStreams(device), physical_bytes()) if is_cuda else None
    note = f"measured, torch {torch.__version__}, {torch.get_num_threads()} threads"
    return Device(
        name=name or describe(device)["device_name"],
        kind=device.type,
        memory_bytes=torch.cuda.mem_get_info(device)[1] if is_cuda else physical_bytes(),
        flops_per_second={dtype: _flops_per_second(device, getattr(torch, dtype)) for dtype in _DTYPES},
        memory_bytes_per_second=bandwidth,
        host_bytes_per_second=bandwidth if host is None else min(host.write_bytes_per_s, host.read_bytes_per_s),
        disk_bytes_per_second=min(disk.write_bytes_per_s, disk.read_bytes_per_s),
        launch_ns=_launch_ns(device),
        compute_efficiency=1.0,
        memory_efficiency=1.0,
        sources={
            "memory_bytes": "what the system says",
            "flops_per_second": f"{note}: products of square matrices",
            "memory_bytes_per_second": f"{note}: an addition, read and written",
            "host_bytes_per_second": "its memory is the host's"
            if host is None
            else f"{note}: copies to and from pinned memory, the slower of the two",
            "disk_bytes_per_second": f"{note}: blocks written and read back in {folder}, the slower of the two",
            "launch_ns": f"{note}: additions of a few numbers",
            "compute_efficiency": "1: the rates are those that were reached",
            "memory_efficiency": "1: the rates are those that were reached",
        },
    )


def _flops_per_second(device: torch.device, dtype: torch.dtype) -> int:
    """Of the smallest square product that takes long enough."""
    size = _SMALLEST
    while True:
        left = torch.ones(size, size, dtype=dtype, device=device)
        time_ns = _time_ns(device, lambda left=left: torch.mm(left, left))  # type: ignore[misc]
        if time_ns >= _LONG_ENOUGH_NS or size == _LARGEST:
            return _rate(2 * size**3, time_ns)
        size *= 2


def _bytes_per_second(device: torch.device) -> int:
    source = torch.ones(_STREAM_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return _rate(2 * _STREAM_BYTES, _time_ns(device, lambda: torch.add(source, 1, out=target)))


def _launch_ns(device: torch.device) -> int:
    few = torch.ones(8, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            few.add(1)

    return max(1, _time_ns(device, launch) // _LAUNCHES)


def _time_ns(device: torch.device, run: Callable[[], object]) -> int:
    """Nanoseconds until all that is asked for is done: the least of some runs, since others' work only adds; the first one, which warms up, is left out."""
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter_ns()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter_ns() - start)
    return min(times[1:])


def _rate(amount: int, time_ns: int) -> int:
    """A second's."""
    return max(1, amount * 1_000_000_000 // max(time_ns, 1))
