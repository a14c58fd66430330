"""Static plots by matplotlib, for papers: the frontier, and memory over time. Nothing of matplotlib's state outside the figure is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from punar.errors import PlanError, UsageError
from punar.extras import imported
from punar.reporting.page.curve import Curve, CurvePoint, NamedPoint
from punar.reporting.page.figures import AWAY, BOUND, CHOSEN, KINDS, OURS, PEERS, kinds_shown
from punar.reporting.page.memory import Memory
from punar.units import byte_unit, second_unit

FORMATS = ("png", "svg", "pdf")


def plot_curve(curve: Curve, target: Any) -> Any:
    """Draws what memory costs in time, predicted; returns the axes.

    Args:
        target: the path of a file that ends in ``.png``, ``.svg`` or ``.pdf``, or axes of matplotlib's.

    Raises:
        UsageError: the target is neither.
        MissingDependency: matplotlib is not installed.
        PlanError: the file cannot be written.
    """
    axes = _axes(target)
    drawn: list[CurvePoint | NamedPoint] = [*curve.points, *curve.peers, *([curve.chosen] if curve.chosen else [])]
    unit, scale = byte_unit(max(point.peak_bytes for point in drawn))
    peaks = [point.peak_bytes / scale for point in curve.points]
    axes.step(peaks, [100 * point.overhead for point in curve.points], where="post", color=OURS, marker=".", label="least extra time known")
    axes.plot(peaks, [100 * point.bound for point in curve.points], color=BOUND, linestyle="--", label="no plan is below (proved)")
    for points, color, marker in ((curve.peers, PEERS, "^"), ([curve.chosen] if curve.chosen else [], CHOSEN, "*")):
        for point in points:
            spot = (point.peak_bytes / scale, 100 * point.overhead)
            axes.plot(*spot, color=color, marker=marker, markersize=8, linestyle="none")
            axes.annotate(point.name, spot, xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.set_xlabel(f"peak of the whole step, predicted, {unit}")
    axes.set_ylabel("extra time, predicted, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return _done(axes, target)


def plot_memory(memory: Memory, title: str, target: Any) -> Any:
    """Draws what is there when, by kind, predicted; returns the axes. ``target``, and what is raised: as in ``plot_curve``."""
    axes = _axes(target)
    unit, scale = byte_unit(memory.peak_bytes)
    time_unit, time_scale = second_unit(memory.end_ns)
    times = [moment.time_ns / time_scale for moment in memory.moments] + [memory.end_ns / time_scale]
    shown = kinds_shown(memory)
    kinds = [kind for kind in KINDS if kind in shown]
    sizes = [
        [(memory.resident_bytes if kind.field == "resident" else getattr(moment, kind.field)) / scale for moment in memory.moments]
        for kind in kinds
    ]
    axes.stackplot(
        times,
        [[*size, size[-1]] for size in sizes],
        step="post",
        colors=[kind.color for kind in kinds],
        labels=[kind.title for kind in kinds],
        linewidth=0,
    )
    if AWAY in shown:
        away = [moment.away / scale for moment in memory.moments]
        axes.step(times, [*away, away[-1]], where="post", color=AWAY.color, linestyle="--", label=AWAY.title)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(f"time, predicted, {time_unit}")
    axes.set_ylabel(f"whole step, predicted, {unit}")
    axes.margins(x=0)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _done(axes, target)


def _axes(target: Any) -> Any:
    """The axes to draw on: those that were given, or new ones for a file."""
    matplotlib = imported("matplotlib.figure", "matplotlib", "plot", asked="draw a plot")
    if not isinstance(target, (str, Path)):
        if not hasattr(target, "stackplot"):
            raise UsageError(f"asked to draw on {type(target).__name__}; give the path of a file, or axes of matplotlib's")
        return target
    if Path(target).suffix.lstrip(".").lower() not in FORMATS:
        raise UsageError(f"asked to draw into {target}; give a path that ends in one of {', '.join(f'.{name}' for name in FORMATS)}")
    return matplotlib.Figure(figsize=(7, 4), layout="tight").subplots()


def _done(axes: Any, target: Any) -> Any:
    if isinstance(target, (str, Path)):
        try:
            axes.figure.savefig(target, dpi=150, bbox_inches="tight")
        except OSError as error:
            raise PlanError(f"asked to write {target}, which failed: {error}; give a path that can be written") from error
    return axes
