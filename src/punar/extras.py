"""Packages that only some requests need: each belongs to an optional extra of punar."""

from __future__ import annotations

import importlib
from typing import Any

from punar.errors import MissingDependency


def imported(module: str, package: str, extra: str, *, asked: str) -> Any:
    """Imports what a request needs. ``asked``: the request, as in "asked to export to prometheus".

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(
            f"asked to {asked}, which needs the package {package}; it is not installed here ({error}): "
            f"run 'pip install {package}', or install punar with its extra [{extra}]"
        ) from error
