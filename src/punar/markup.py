"""Small tables of HTML, by which objects show themselves in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, notes: Sequence[str] = ()) -> str:
    """A table with a title above and sentences below; the first ``left`` columns are aligned to the left. All texts are escaped."""
    head = "".join(_cell("th", text, place < left) for place, text in enumerate(header))
    body = "".join(f"<tr>{''.join(_cell('td', text, place < left) for place, text in enumerate(row))}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    return f"<div><p><strong>{escape(title)}</strong></p>{table}{''.join(f'<p>{escape(note)}</p>' for note in notes)}</div>"


def _cell(tag: str, text: str, is_left: bool) -> str:
    return f'<{tag} style="text-align: {"left" if is_left else "right"}">{escape(text)}</{tag}>'
