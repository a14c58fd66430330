"""Operators' times on a described device, by the roofline: each is bound by arithmetic or by memory.

Source:
    Williams, Waterman and Patterson, 2009, Roofline: an insightful visual performance model for multicore architectures,
    DOI 10.1145/1498765.1498785. Deviation: a launch is added to each operator, and the roofs are lowered by an assumed efficiency.
"""

from __future__ import annotations

import re
from dataclasses import replace

from punar.costs.devices import Device
from punar.costs.work import work_of
from punar.ir import Op, Trace

_DTYPE = re.compile(r"\b(b?float\d+)\[")

_FREE = frozenset({"view", "prelude"})
"""Kinds of operators that run nothing on the device."""


def timed_on(trace: Trace, device: Device) -> Trace:
    """The trace with each operator's time as it would be on a device. Units: nanoseconds."""
    known: dict[tuple[str, bool], int] = {}
    for op in trace.ops:
        key = op.signature, op.is_backward
        if key not in known:
            known[key] = roofline_ns(trace, op, device)
    return replace(trace, ops=tuple(replace(op, time_ns=known[op.signature, op.is_backward]) for op in trace.ops))


def roofline_ns(trace: Trace, op: Op, device: Device) -> int:
    """launch + max(operations / rate, bytes / bandwidth); nothing for views. Units: nanoseconds."""
    if op.kind in _FREE:
        return 0
    work = work_of(trace, op)
    compute_s = work.flops / (device.flops_of(_dtype_of(op)) * device.compute_efficiency)
    memory_s = work.bytes / (device.memory_bytes_per_second * device.memory_efficiency)
    return device.launch_ns + round(max(compute_s, memory_s) * 1e9)


def _dtype_of(op: Op) -> str:
    """The dtype that an operator computes in: that of its first floating-point tensor."""
    found = _DTYPE.search(op.signature)
    return found[1] if found else "float32"
