"""Which module an operator was called from, read off the Python stack: no hook is put on any module."""

from __future__ import annotations

import sys
from itertools import pairwise

import torch

_CALL = torch.nn.Module._call_impl.__code__


class ModulePaths:
    """Names the innermost module that is running, such as ``GPT.layers.3.mlp.0``."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, ...], str] = {}

    def current(self) -> str:
        modules = []
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code is _CALL:
                modules.append(frame.f_locals["self"])
            frame = frame.f_back  # type: ignore[assignment]
        key = tuple(map(id, modules))
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = ".".join(_steps(modules[::-1]))
        return name


def _steps(modules: list[torch.nn.Module]) -> list[str]:
    if not modules:
        return []
    steps = [type(modules[0]).__name__]
    for parent, child in pairwise(modules):
        steps.append(next((name for name, module in parent.named_modules() if module is child and name), type(child).__name__))
    return steps
