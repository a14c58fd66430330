"""Do tables line up, and does the demo's JSON have the promised fields?"""

from __future__ import annotations

import io
import json
import subprocess
import sys

from rich.console import Console

from punar.reporting import Comparison, Row
from punar.reporting.comparison import HEADER, table_rows
from punar.reporting.table import format_columns, format_markdown, make_table

FIELDS = [
    "budget",
    "budget_bytes",
    "predicted_peak_bytes",
    "measured_peak_bytes",
    "time_ratio",
    "kept_bytes",
    "recomputed_bytes",
    "replayed_operators",
    "loss",
    "identical",
    "moved_bytes",
]


def make_row(*, budget: str = "0.5", measured: int = 90, identical: bool = True) -> Row:
    return Row(
        budget=budget,
        budget_bytes=100,
        predicted_peak_bytes=89,
        measured_peak_bytes=measured,
        time_ratio=1.125,
        kept_bytes=40,
        recomputed_bytes=30,
        replayed_operators=12,
        loss=0.25,
        identical=identical,
    )


def test_columns_are_aligned() -> None:
    assert format_columns(("name", "size"), [("a", "1"), ("long name", "123")], left=1) == (
        "name       size\n"
        "a             1\n"
        "long name   123"
    )  # fmt: skip


def test_markdown() -> None:
    assert format_markdown(("name", "size"), [("a", "1")], left=1) == "| name | size |\n| --- | --: |\n| a | 1 |"


def test_rich_table_holds_every_cell() -> None:
    stream = io.StringIO()
    Console(file=stream, width=200).print(make_table(HEADER, table_rows(Comparison(device="cpu", rows=(make_row(),))), left=1))
    for cell in table_rows(Comparison(device="cpu", rows=(make_row(),)))[0]:
        assert cell in stream.getvalue()


def test_json_has_the_promised_fields_in_order() -> None:
    body = json.loads(Comparison(device="cpu", rows=(make_row(),)).to_json())
    assert list(body) == ["device", "rows"]
    assert list(body["rows"][0]) == FIELDS


def test_a_different_run_is_not_identical() -> None:
    rows = (make_row(), make_row(identical=False))
    assert not Comparison(device="cpu", rows=rows).is_identical
    assert Comparison(device="cpu", rows=rows[:1]).is_identical
    assert table_rows(Comparison(device="cpu", rows=rows))[1][-1] == "NO"


def test_over_budget_names_the_rows_above() -> None:
    rows = (make_row(measured=100), make_row(budget="0.2", measured=101))
    assert [row.budget for row in Comparison(device="cpu", rows=rows).over_budget()] == ["0.2"]


def test_reporting_imports_no_framework() -> None:
    modules = ", ".join(f"punar.reporting.{name}" for name in ("comparison", "report", "table"))
    code = f"import sys, {modules}; print('torch' in sys.modules, 'jax' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout
    assert found.strip() == "False False"
