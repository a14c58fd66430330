"""Where in the model an operator belongs."""

from __future__ import annotations

import re

from punar.ir.trace import Op, Trace

OUTSIDE = "(outside modules)"
"""Stands for the module of an operator that was called from none."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def origin_of(trace: Trace, op: int) -> Op:
    """The forward operator that an operator is of: itself, or the one whose backward it is part of where that is known."""
    found = trace.ops[op]
    return trace.ops[found.forward] if found.forward >= 0 else found


def module_of(trace: Trace, op: int) -> str:
    """The path of the module that an operator belongs to."""
    origin = origin_of(trace, op)
    return OUTSIDE if origin.is_backward else origin.module or OUTSIDE


def pattern_of(module: str) -> str:
    """A module's path with its numbers left open, ``GPT.h.*.mlp``: equal for the same part of repeated blocks."""
    return _NUMBER.sub("*", module)


def title_of(trace: Trace, op: int) -> str:
    """Names an operator and where it is: ``aten.mm.default (backward of aten.addmm.default, GPT.h.3.mlp, model.py:12)``."""
    found, origin = trace.ops[op], origin_of(trace, op)
    whose = f"backward of {origin.name}" if found.forward >= 0 else "backward" if found.is_backward else ""
    parts = [part for part in (whose, "" if origin.is_backward else origin.module, origin.source) if part]
    return found.name + (f" ({', '.join(parts)})" if parts else "")
