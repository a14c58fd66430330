"""The frontier with the peers' points on it, one panel a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

MARKERS = {"eager": "o", "rotor": "s", "compile": "^"}


def draw(results: list[dict[str, Any]], path: Path) -> bool:
    """Writes one panel for each model; says so and writes nothing where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("skipping the figure: matplotlib is not installed; pip install '.[bench]' installs it", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(len(results), 2)
    lines = -(-len(results) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(9 * columns, 5.5 * lines), squeeze=False)
    for axis in axes.flat[len(results) :]:
        axis.axis("off")
    for axis, result in zip(axes.flat, results, strict=False):
        draw_model(axis, result)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def draw_model(axis: Any, result: dict[str, Any]) -> None:
    """Our measured and predicted frontier, the peers' points with their middle half, hollow ones that were measured once elsewhere."""
    predicted = result["predicted_frontier"]
    axis.plot(*zip(*predicted, strict=True), color="tab:blue", linewidth=0.8, linestyle=":", label="punar, predicted (without watching)")
    ours = sorted((run["memory_ratio"], run["time_ratio"]["median"]) for run in result["runs"] if run.get("solver") == "auto")
    axis.plot(*zip(*ours, strict=True), color="tab:blue", marker=".", label="punar, measured")
    for place, point in enumerate(result["points"]):
        time = point["time_ratio"]
        bars = [[time["median"] - time["low"]], [time["high"] - time["median"]]]
        style = {"marker": MARKERS[point["family"]], "color": f"C{1 + place % 9}", "linestyle": "none", "capsize": 2}
        axis.errorbar(point["memory_ratio"], time["median"], yerr=bars, label=point["peer"], **style)
    for place, (name, points) in enumerate(result["known"].items()):
        style = {"marker": "DPX"[place % 3], "markerfacecolor": "none", "color": "gray", "linestyle": "none"}
        axis.plot(*zip(*points, strict=True), label=f"{name}, measured once", **style)
    axis.set_title(f"{result['model']}, scale {result['scale']}, {result['threads']} thread(s), torch {result['torch']}, CPU")
    axis.set_xlabel("activations' peak relative to plain, measured")
    axis.set_ylabel("CPU time relative to plain, measured")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
