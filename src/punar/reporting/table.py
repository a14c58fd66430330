"""Tables: plain text of aligned columns, or rich on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def format_columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> str:
    """Aligns columns with two spaces between them; the first ``left`` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(_align(row, widths, left) for row in (header, *rows))


def make_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0, title: str = "") -> Table:
    """The same as a rich table."""
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for place, name in enumerate(header):
        table.add_column(name, justify="left" if place < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def format_markdown(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> str:
    """The same as a Markdown table."""
    rule = ["---" if place < left else "--:" for place in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def _align(row: Sequence[str], widths: Sequence[int], left: int) -> str:
    cells = (cell.ljust(width) if place < left else cell.rjust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True)))
    return "  ".join(cells).rstrip()
