"""Measures the tables of the README and writes them into it, between its markers.

    python benchmarks/readme_tables.py [README.md]

Takes about five minutes on two cores that have nothing else to do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import overhead
import torch

from punar.demo.compare import compare
from punar.demo.models import MODELS, make_task
from punar.reporting.comparison import HEADER, table_rows
from punar.reporting.table import format_markdown

STEPS = 20
BUDGETS = (0.8, 0.6, 0.45, "min")


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "README.md")
    text = path.read_text(encoding="utf-8")
    text = replace_between(text, "demo table", demo_table())
    text = replace_between(text, "overhead table", overhead_table())
    path.write_text(text, encoding="utf-8")


def replace_between(text: str, name: str, body: str) -> str:
    """Puts ``body`` between the two markers of ``name``.

    Raises:
        ValueError: the text has no such markers.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"no markers for {name!r}")
    return f"{before}{begin}{body}\n{end}{after}"


def demo_table() -> str:
    task = make_task("minilm", steps=STEPS, seed=0)
    comparison = compare(task, BUDGETS, seed=0)
    rows = format_markdown(HEADER, table_rows(comparison), left=1)
    return (
        f"{task.description}; {STEPS} steps; {comparison.device}. Peaks are of the whole step, time is of forward and backward relative "
        f"to plain (median of the steps, measured in turn), the other numbers are of the last step.\n\n{rows}"
    )


def overhead_table() -> str:
    torch.set_num_threads(1)
    operators, costs = overhead.measure_operators(rounds=60)
    tiny = [(cost.variant, f"{cost.extra_us_per_operator:+.1f}") for cost in costs if cost.variant != "eager"]
    models = [overhead.model_cells(overhead.measure_model(name, rounds=15)) for name in sorted(MODELS)]
    return (
        f"Nothing recomputed, {operators} operators on 8 numbers each; one thread, torch {torch.__version__}; measured.\n\n"
        + format_markdown(("variant", "µs an operator above eager"), tiny, left=1)
        + "\n\nThe demo's models, nothing recomputed, forward and backward relative to plain; measured.\n\n"
        + format_markdown(overhead.MODEL_HEADER, models, left=1)
    )


if __name__ == "__main__":
    main()
