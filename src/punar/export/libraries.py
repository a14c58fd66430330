"""The libraries that exporters write with: each an optional extra."""

from __future__ import annotations

import importlib
from typing import Any

from punar.errors import MissingDependency


def imported(module: str, package: str, extra: str) -> Any:
    """Imports what an exporter needs.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency(
            f"asked to export to {extra}, which needs the package {package}; it is not installed here ({error}): "
            f"run 'pip install {package}', or install punar with its extra [{extra}]"
        ) from error
