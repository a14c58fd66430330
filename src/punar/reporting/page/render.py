"""From a page's data to HTML: jinja2 writes what bokeh draws into the template, with styles and scripts inside."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from punar.extras import imported
from punar.reporting.page import figures
from punar.reporting.page.page import Page
from punar.units import format_bytes, format_seconds


def render(page: Page) -> str:
    """Writes the page as HTML.

    Raises:
        MissingDependency: bokeh or jinja2 is not installed.
    """
    jinja = imported("jinja2", "jinja2", "report", asked="write a report as a page")
    drawings = _drawings(page)
    script, divs = figures.bokeh("embed").components(drawings)
    environment = jinja.Environment(autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds, "percent": _percent}
    markup = imported("markupsafe", "jinja2", "report", asked="write a report as a page").Markup
    return str(
        environment.from_string(_part("template.html")).render(
            page=page,
            step=page.explanation,
            sections=page.explanation.sections(),
            report_rows=() if page.report is None else page.report.rows(),
            report_notes=() if page.report is None else page.report.notes(),
            too_slow=figures.peers_drawn(page.curve)[1],
            kinds=figures.kinds_shown(page.plain, page.planned),
            fates=() if page.block is None else figures.fates_shown(page.block),
            colors={"ours": figures.OURS, "bound": figures.BOUND, "peers": figures.PEERS, "chosen": figures.CHOSEN},
            drawings={name: markup(div) for name, div in divs.items()},
            bokeh=markup(figures.bokeh("resources").Resources(mode="inline", components=["bokeh"]).render_js()),
            script=markup(script),
            style=markup(_part("page.css")),
            controls=markup(_part("page.js")),
        )
    )


def _drawings(page: Page) -> dict[str, Any]:
    """Figures by the name that the template puts them at; plain and planned share their axes."""
    most_bytes = max(page.plain.peak_bytes, page.planned.peak_bytes)
    longest = max(page.plain, page.planned, key=lambda memory: memory.end_ns)
    drawings = {"curve": figures.draw_curve(page.curve)}
    drawings["planned"] = figures.draw_memory(page.planned, "planned", most_bytes=most_bytes, end_ns=longest.end_ns)
    if page.has_plan:
        drawings["plain"] = figures.draw_memory(page.plain, "plain", most_bytes=most_bytes, end_ns=longest.end_ns)
    if page.block is not None:
        drawings["block"] = figures.draw_block(page.block)
    if page.steps:
        drawings["steps"] = figures.draw_steps(page.steps)
    return drawings


def _part(name: str) -> str:
    return files("punar.reporting.page").joinpath(name).read_text(encoding="utf-8")


def _percent(ratio: float) -> str:
    return f"{ratio:+.1%}"
