"""The libraries that exporters write with: each an optional extra."""

from __future__ import annotations

from typing import Any

from punar import extras


def imported(module: str, package: str, extra: str) -> Any:
    """Imports what an exporter needs.

    Raises:
        MissingDependency: it is not installed.
    """
    return extras.imported(module, package, extra, asked=f"export to {extra}")
