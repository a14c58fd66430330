"""Which module and which line an operator was called from, read off the Python stack: no hook is put on any module."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import PurePath
from types import FrameType
from typing import Any

import torch

_CALL = torch.nn.Module._call_impl.__code__

_NOT_THE_USERS = ("torch.", "punar.torch.")
"""Modules by the names they begin with, whose lines say nothing of the model."""

_NOBODYS = ("punar.api.", "punar.described.", "punar.verification.")
"""Those that run a step by themselves."""


class ModulePaths:
    """Names the innermost module that is running, such as ``GPT.layers.3.mlp.0``."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, ...], str] = {}

    def current(self) -> str:
        modules = _running(sys._getframe(2))
        key = tuple(map(id, modules))
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = ".".join(_steps(modules[::-1]))
        return name


def running_root() -> torch.nn.Module | None:
    """The outermost module that is running."""
    modules = _running(sys._getframe(1))
    return modules[-1] if modules else None


def called_with() -> list[Any]:
    """What the outermost module that is running was called with; nothing where none is."""
    calls = _calls(sys._getframe(1))
    return [*calls[-1].f_locals["args"], *calls[-1].f_locals["kwargs"].values()] if calls else []


def _running(frame: FrameType | None) -> list[torch.nn.Module]:
    """The modules that are running at a frame, the innermost first."""
    return [call.f_locals["self"] for call in _calls(frame)]


def _calls(frame: FrameType | None) -> list[FrameType]:
    """The frames of modules' calls, from a frame outwards."""
    calls = []
    while frame is not None:
        if frame.f_code is _CALL:
            calls.append(frame)
        frame = frame.f_back
    return calls


class SourceLines:
    """Names the innermost line that is neither torch's nor ours, such as ``model.py:12`` or ``package/model.py:12``: no folder of the machine's."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}

    def current(self) -> str:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(_NOT_THE_USERS):
            frame = frame.f_back
        if frame is None or f"{frame.f_globals.get('__name__')}.".startswith(_NOBODYS):
            return ""
        path = frame.f_code.co_filename
        name = self._files.get(path)
        if name is None:
            name = self._files[path] = _below_import_root(path, str(frame.f_globals.get("__name__", "")))
        return f"{name}:{frame.f_lineno}"


def _below_import_root(path: str, module: str) -> str:
    """The end of a file's path that its module's name stands for."""
    parts = PurePath(path).parts
    depth = module.count(".") + 1 + (parts[-1:] == ("__init__.py",))
    return "/".join(parts[-depth:])


def _steps(modules: list[torch.nn.Module]) -> list[str]:
    if not modules:
        return []
    steps = [type(modules[0]).__name__]
    for parent, child in pairwise(modules):
        steps.append(next((name for name, module in parent.named_modules() if module is child and name), type(child).__name__))
    return steps
