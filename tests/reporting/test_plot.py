"""Do the static plots show the numbers that they are of, and do objects show themselves in a notebook?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

import punar
from punar.errors import MissingDependency, PlanError, UsageError
from punar.markup import html_table
from punar.reporting.timeline import Timeline
from punar.units import byte_unit, format_bytes
from tests.synthetic import transformer

STARTS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture(scope="module")
def profile() -> punar.Profile:
    return punar.Profile(trace=transformer(3))


def drawings(profile: punar.Profile) -> list[Any]:
    return [punar.frontier(profile), profile.timeline(), profile.timeline(punar.solve(profile, budget=0.5))]


@pytest.mark.parametrize("suffix", STARTS)
def test_files_are_of_the_kind_that_their_name_says(profile: punar.Profile, suffix: str, tmp_path: Path) -> None:
    for place, drawing in enumerate(drawings(profile)):
        path = tmp_path / f"{place}{suffix}"
        drawing.plot(path)
        assert path.read_bytes().startswith(STARTS[suffix])


def test_the_frontier_is_drawn_on_given_axes(profile: punar.Profile) -> None:
    axes = Figure().subplots()
    frontier = punar.frontier(profile)
    assert frontier.plot(axes) is axes
    scale = byte_unit(frontier.points[-1].peak_bytes)[1]
    curve, bound = axes.lines
    assert list(curve.get_xdata()) == [point.peak_bytes / scale for point in frontier.points]
    assert list(curve.get_ydata()) == [100 * point.overhead for point in frontier.points]
    assert all(low <= high for low, high in zip(bound.get_ydata(), curve.get_ydata(), strict=True))


def test_memory_reaches_the_peak_and_names_its_kinds(profile: punar.Profile) -> None:
    plan = punar.solve(profile, budget="min")
    axes = profile.timeline(plan).plot(Figure().subplots())
    top = max(path.vertices[:, 1].max() for part in axes.collections for path in part.get_paths())
    assert top == pytest.approx(plan.peak_bytes / byte_unit(plan.peak_bytes)[1])
    titles = [text.get_text() for text in axes.get_legend().get_texts()]
    assert any("recomputed" in title for title in titles)
    assert not any("recomputed" in text.get_text() for text in profile.timeline().plot(Figure().subplots()).get_legend().get_texts())


def test_memory_counts_what_is_resident_since() -> None:
    """An optimizer makes its state in its first step, after the step was recorded."""
    import torch

    from tests.torch.models import WIDTH, make_blocks

    model, remat = make_blocks(4), punar.Remat(budget=0.5)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        with remat:
            model(torch.randn(512, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert remat.plan is not None
    assert remat.trace is not None
    assert remat.plan.resident_bytes > remat.trace.resident_bytes
    assert remat.timeline().playback.peak.bytes == remat.plan.peak_bytes


def test_what_cannot_be_drawn_on_is_refused(profile: punar.Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline.of(profile.trace)
    with pytest.raises(UsageError, match=r"give a path that ends in one of \.png, \.svg, \.pdf"):
        timeline.plot(tmp_path / "memory.doc")
    with pytest.raises(UsageError, match="asked to draw on int"):
        timeline.plot(3)
    with pytest.raises(PlanError, match="which failed"):
        timeline.plot(tmp_path / "nowhere" / "memory.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"pip install matplotlib'.* its extra \[plot\]"):
        timeline.plot(tmp_path / "memory.png")


def test_objects_show_themselves_in_a_notebook(profile: punar.Profile) -> None:
    plan, frontier = punar.solve(profile, budget=0.5), punar.frontier(profile)
    verification = punar.Verification(
        is_identical=True, is_deterministic=True, differences=(), plan=plan, measured_peak_bytes=7, replayed_operators=1, recomputed_bytes=0
    )
    shown = [
        (plan, format_bytes(plan.peak_bytes)),
        (frontier, format_bytes(frontier.points[0].peak_bytes)),
        (verification, "identical: loss"),
        (punar.explain(profile, plan), "What is there at the peak"),
        (punar.Remat().report(), "no step has finished yet"),
    ]
    for thing, text in shown:
        html = thing._repr_html_()
        assert text in html
        assert html.count("<table>") == html.count("</table>")


def test_texts_are_no_markup() -> None:
    html = html_table("<a>", ["<b>"], [["<c>"]], notes=["<d>"])
    assert not any(f"<{tag}>" in html for tag in "abcd")
    assert html_table("title", ["one"], []).count("<table>") == 0
