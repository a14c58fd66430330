"""The page's drawings, by bokeh: its script is a quarter of plotly's (1.3 MB), which makes out most of a page's size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from punar.extras import imported
from punar.reporting.page.block import FATES, Block, Fate
from punar.reporting.page.curve import Curve, CurvePoint, NamedPoint
from punar.reporting.page.memory import Memory
from punar.reporting.page.page import StepRow
from punar.units import byte_unit, format_bytes, format_seconds, second_unit

LAYER_PX = 38
"""How high a layer of a block's graph is drawn."""

FARTHEST = 3
"""How many times the frontier's most extra time a plan may take and still be drawn."""

_TOOLS = "pan,box_zoom,wheel_zoom,reset"


class Kind(NamedTuple):
    """What bytes are there as: the field of a stratum, or ``resident``; how it is called and drawn."""

    field: str
    title: str
    color: str
    hatch: str


KINDS = (
    Kind("resident", "parameters, optimizer's state, batch", "#8c8c8c", " "),
    Kind("gradients", "parameters' gradients", "#e69f00", " "),
    Kind("kept", "kept from forward", "#3a86c8", " "),
    Kind("compressed", "compressed", "#cc79a7", "/"),
    Kind("recomputed", "recomputed, or read back", "#0a9e73", "\\"),
    Kind("passing", "temporaries, and gradients of activations", "#d9603b", "."),
)
"""From the bottom up. Colours are those of Okabe and Ito (2008, Color Universal Design) or near, and hatches tell them apart as well."""

AWAY = Kind("away", "moved off the device (no part of the sum)", "#8b5cf6", " ")

FATE_COLORS: dict[Fate, str] = {
    "kept": "#3a86c8",
    "recomputed": "#0a9e73",
    "moved": "#8b5cf6",
    "compressed": "#cc79a7",
    "not needed": "#8c8c8c",
    "made before the block": "#6b7280",
}

OURS, BOUND, PEERS, CHOSEN = "#3a86c8", "#8c8c8c", "#e69f00", "#d9603b"


def bokeh(part: str) -> Any:
    """A module of bokeh's.

    Raises:
        MissingDependency: it is not installed.
    """
    return imported(f"bokeh.{part}", "bokeh", "report", asked="draw a report as a page")


# -- the frontier ----------------------------------------------------------------------------------------------------------


def draw_curve(curve: Curve) -> Any:
    """Extra time over peak bytes: the frontier, the bound under it, what the literature's solvers do, and what was chosen."""
    drawn, _ = peers_drawn(curve)
    shown: list[CurvePoint | NamedPoint] = [*curve.points, *drawn, *([curve.chosen] if curve.chosen else [])]
    unit, scale = byte_unit(max(point.peak_bytes for point in shown))
    low, high = (of(point.peak_bytes for point in shown) / scale for of in (min, max))
    room = 0.05 * (high - low) or 0.05 * high
    span = max(1.0, 100 * max(point.overhead for point in shown))
    figure = _figure(
        340,
        x_axis_label=f"peak of the whole step, {unit}",
        y_axis_label="extra time, %",
        x_range=(low - room, high + 3 * room),  # the names stand on the right
        y_range=(-0.08 * span, 1.12 * span),
    )
    about = [("", "@name"), ("peak", "@size"), ("extra time", "@overhead{0.0}%")]
    ours = _points(curve.points, scale)
    figure.line("x", "bound", source=ours, color=BOUND, line_dash="dashed", width=2)
    figure.step("x", "overhead", source=ours, color=OURS, mode="after", width=2)
    figure.scatter("x", "overhead", source=ours, color=OURS, size=6, name="frontier")
    peers = _points(drawn, scale)
    figure.scatter("x", "overhead", source=peers, color=PEERS, marker="triangle", size=11)
    figure.text("x", "overhead", text="name", source=peers, x_offset=8, y_offset=-4, text_font_size="11px", name="themed")
    if curve.chosen:
        chosen = _points([curve.chosen], scale)
        figure.scatter("x", "overhead", source=chosen, color=CHOSEN, marker="star", size=20, name="chosen")
    _hover(figure, [glyph for glyph in figure.renderers if glyph.glyph.__class__.__name__ == "Scatter"], about)
    return figure


def peers_drawn(curve: Curve) -> tuple[list[NamedPoint], list[NamedPoint]]:
    """The peers that are drawn, and those that take so much longer than the frontier that nothing could be told apart beside them."""
    highest = FARTHEST * max(0.1, *(point.overhead for point in curve.points))
    return [peer for peer in curve.peers if peer.overhead <= highest], [peer for peer in curve.peers if peer.overhead > highest]


def _points(points: Sequence[CurvePoint | NamedPoint], scale: int) -> Any:
    columns: dict[str, list[Any]] = {
        "x": [point.peak_bytes / scale for point in points],
        "overhead": [100 * point.overhead for point in points],
        "bound": [100 * (point.bound if isinstance(point, CurvePoint) else point.overhead) for point in points],
        "size": [format_bytes(point.peak_bytes) for point in points],
        "name": [point.name if isinstance(point, NamedPoint) else "auto" for point in points],
    }
    return bokeh("models").ColumnDataSource(columns)


# -- memory over time ------------------------------------------------------------------------------------------------------


def draw_memory(memory: Memory, name: str, *, most_bytes: int, end_ns: int) -> Any:
    """What is there when, one kind on the other. ``most_bytes``, ``end_ns``: the ends of the axes, which several figures may share."""
    import numpy

    unit, scale = byte_unit(most_bytes)
    time_unit, time_scale = second_unit(end_ns)
    models = bokeh("models")
    figure = _figure(
        300,
        x_axis_label=f"time, {time_unit}",
        y_axis_label=f"whole step, {unit}",
        x_range=(0, end_ns / time_scale),
        y_range=(0, 1.05 * most_bytes / scale),
    )
    left = numpy.array([moment.time_ns for moment in memory.moments]) / time_scale
    right = numpy.append(left[1:], memory.end_ns / time_scale)
    shown = [kind for kind in KINDS if kind.field == "resident" or any(getattr(moment, kind.field) for moment in memory.moments)]
    sizes = [numpy.array([_size(memory, moment, kind) for moment in memory.moments]) for kind in shown]
    tops = list(accumulate(sizes))
    source = models.ColumnDataSource(
        {
            "left": left,
            "right": right,
            "top": tops[-1] / scale,
            "operator": list(memory.operators),
            "module": list(memory.modules),
            "phase": list(memory.phases),
            **{kind.field: _texts(size) for kind, size in zip(shown, sizes, strict=True)},
            "whole": _texts(tops[-1]),
        }
    )
    edges = numpy.append(left, right[-1])
    for kind, bottom, top in zip(shown, [0 * tops[0], *tops], tops, strict=False):
        y1, y2 = (numpy.append(side, side[-1]) / scale for side in (bottom, top))
        hatch = {} if kind.hatch == " " else {"hatch_pattern": kind.hatch, "hatch_alpha": 0.35, "hatch_color": "#ffffff"}
        figure.varea_step(edges, y1, y2, step_mode="after", color=kind.color, alpha=0.9, **hatch)
    if any(moment.away for moment in memory.moments):
        away = numpy.array([moment.away for moment in memory.moments])
        figure.step(edges, numpy.append(away, away[-1]) / scale, mode="after", color=AWAY.color, width=2, line_dash="dashed")
    over = figure.quad(
        "left", "right", "top", 0, source=source, fill_alpha=0, line_alpha=0, hover_fill_color="#ffffff", hover_fill_alpha=0.35, name=name
    )
    rows = [("whole step", "@whole"), *((kind.title, f"@{kind.field}") for kind in reversed(shown))]
    _hover(figure, [over], [("", "@phase"), ("operator", "@operator"), ("module", "@module"), *rows])
    figure.add_layout(models.Span(dimension="height", location=0, line_width=2, visible=False, name=f"{name}-cursor"))
    return figure


def _size(memory: Memory, moment: Any, kind: Kind) -> int:
    return memory.resident_bytes if kind.field == "resident" else int(getattr(moment, kind.field))


def _texts(sizes: Any) -> list[str]:
    return [format_bytes(int(size)) for size in sizes]


# -- one block -------------------------------------------------------------------------------------------------------------


def draw_block(block: Block) -> Any:
    """The graph from the top down; what reads from further up than the layer above is joined by a curve at the side."""
    layers = 1 + max(node.layer for node in block.nodes)
    widest = max(abs(node.place) for node in block.nodes) + 0.5
    figure = _figure(
        60 + LAYER_PX * layers,
        x_range=(-widest - 0.1, widest + 0.35 * (widest + 1)),
        y_range=(layers - 0.4, -0.6),
        tools="reset",
        axes=False,
    )
    _draw_edges(figure, block)
    models = bokeh("models")
    source = models.ColumnDataSource(
        {
            "x": [node.place for node in block.nodes],
            "y": [node.layer for node in block.nodes],
            "color": [FATE_COLORS[node.fate] for node in block.nodes],
            "label": [short(node.name) for node in block.nodes],
            "operator": [node.name for node in block.nodes],
            "module": [node.module for node in block.nodes],
            "source": [node.source or "-" for node in block.nodes],
            "fate": [node.fate for node in block.nodes],
            "size": [format_bytes(node.bytes) for node in block.nodes],
            "time": [format_seconds(node.time_ns) for node in block.nodes],
        }
    )
    boxes = figure.rect("x", "y", 0.94, 0.62, source=source, fill_color="color", line_color="color", border_radius=6, name="block")
    figure.text(
        "x", "y", text="label", source=source, text_align="center", text_baseline="middle", text_font_size="12px", text_color="#ffffff"
    )
    about = [("operator", "@operator"), ("module", "@module"), ("line", "@source"), ("what it makes", "@fate, @size"), ("takes", "@time")]
    _hover(figure, [boxes], about)
    return figure


def _draw_edges(figure: Any, block: Block) -> None:
    """A straight line to the layer below, a curve beside what is between to those further down."""
    straight: list[tuple[float, ...]] = []
    curved: list[tuple[float, ...]] = []
    for start, end in ((block.nodes[reads], block.nodes[reader]) for reads, reader in block.edges):
        span = end.layer - start.layer
        if span == 1:
            straight.append((start.place, start.layer + 0.31, end.place, end.layer - 0.31))
            continue
        aside = max(start.place, end.place) + 0.55 + 0.03 * min(span, 12)
        curved.append((start.place + 0.47, start.layer, end.place + 0.47, end.layer, aside, start.layer, aside, end.layer))
    style = {"line_color": "#8c8c8c", "line_width": 1.5}
    for draw, lines in ((figure.segment, straight), (figure.bezier, curved)):
        if lines:
            draw(*map(list, zip(*lines, strict=True)), **style)


def short(name: str) -> str:
    """``aten.addmm.default`` as ``addmm``."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "aten" else parts[0]


# -- predicted against measured --------------------------------------------------------------------------------------------


def draw_steps(steps: Sequence[StepRow]) -> Any:
    """Predicted and measured peaks, step by step."""
    sizes = [size for row in steps for size in (row.measured_peak_bytes, row.predicted_peak_bytes) if size is not None]
    unit, scale = byte_unit(max(sizes, default=1))
    figure = _figure(260, x_axis_label="step", y_axis_label=f"peak, {unit}", y_range=(0, 1.1 * max(sizes, default=1) / scale))
    models = bokeh("models")
    measured = [row for row in steps if row.measured_peak_bytes is not None]
    predicted = [row for row in steps if row.predicted_peak_bytes is not None]
    for rows, field, style in (
        (predicted, "predicted_peak_bytes", {"marker": "dash", "size": 14, "color": PEERS, "line_width": 3}),
        (measured, "measured_peak_bytes", {"marker": "circle", "size": 7, "color": OURS}),
    ):
        source = models.ColumnDataSource(
            {
                "x": [row.first for row in rows],
                "y": [getattr(row, field) / scale for row in rows],
                "what": [field.split("_")[0] + (", recorded" if row.is_traced else "") for row in rows],
                "size": [format_bytes(getattr(row, field)) for row in rows],
                "time": [format_seconds(row.time_ns) for row in rows],
            }
        )
        figure.scatter("x", "y", source=source, name=field, **style)
    _hover(figure, figure.renderers, [("step", "@x"), ("peak", "@size, @what"), ("time, measured", "@time")])
    return figure


# -- what they have in common ----------------------------------------------------------------------------------------------


def _figure(height: int, *, axes: bool = True, tools: str = _TOOLS, **options: Any) -> Any:
    """A figure as wide as the page, on which neither touch nor wheel does anything but scroll the page until a tool is chosen."""
    figure = bokeh("plotting").figure(
        height=height, sizing_mode="stretch_width", tools=tools, active_drag=None, active_scroll=None, toolbar_location="above", **options
    )
    figure.toolbar.logo = None
    figure.axis.visible = axes
    figure.grid.visible = axes
    return figure


def _hover(figure: Any, renderers: Sequence[Any], rows: Sequence[tuple[str, str]]) -> None:
    figure.add_tools(bokeh("models").HoverTool(renderers=list(renderers), tooltips=list(rows)))


def fates_shown(block: Block) -> list[tuple[Fate, str]]:
    """The fates that a block's graph shows, each with its colour."""
    return [(fate, FATE_COLORS[fate]) for fate in FATES if any(node.fate == fate for node in block.nodes)]


def kinds_shown(*memories: Memory) -> list[Kind]:
    """The kinds that memory over time shows."""
    moments = [moment for memory in memories for moment in memory.moments]
    return [kind for kind in (*KINDS, AWAY) if kind.field == "resident" or any(getattr(moment, kind.field) for moment in moments)]
