"""Is the page whole: is all there that it promises, does it add up, is nothing asked of the network, and can it be used?"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import punar
from punar.cli import main
from punar.errors import MissingDependency, PlanMismatch, UsageError
from punar.pages import page_of
from punar.plan.strata import Stratum
from punar.reporting.page import Page, step_rows
from punar.reporting.page.memory import STRETCHES, thinned
from punar.units import format_bytes
from tests.synthetic import Step, trace_of, transformer

SECTIONS = ("frontier", "memory", "modules", "block", "why", "measured")


@pytest.fixture(scope="module")
def profile() -> punar.Profile:
    return punar.Profile(trace=transformer(4))


@pytest.fixture(scope="module")
def planned(profile: punar.Profile) -> Page:
    return page_of(profile, punar.solve(profile, budget=0.4))


@pytest.fixture(scope="module")
def remat() -> punar.Remat:
    import torch

    from tests.torch.models import WIDTH, make_blocks

    model, found = make_blocks(6), punar.Remat(budget=0.5)
    for _ in range(3):
        with found:
            model(torch.randn(256, WIDTH)).square().mean().backward()
        model.zero_grad()
    return found


@pytest.fixture(scope="module")
def written(remat: punar.Remat, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    remat.report(html=path)
    return path


class Reader(HTMLParser):
    """What a page refers to, its ids, and the rows of each section's tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.section = ""
        self.rows: dict[str, list[list[str]]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
        if tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.rows[self.section][-1].append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("td", "th") and self.rows.get(self.section):
            self.rows[self.section][-1][-1] += data.strip()
        if not self.tags or self.tags[-1] not in ("script", "style"):
            self.text.append(data)


# -- the data --------------------------------------------------------------------------------------------------------------

levels = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1000)), min_size=1, max_size=200)


@given(levels, st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_thinning_hides_no_peak_of_any_stretch(steps: list[tuple[int, int]], stretches: int) -> None:
    times = list(itertools.accumulate(wait for wait, _ in steps))
    strata = [Stratum(time, 0, False, size, 0, 0, 0, 0, 0) for time, (_, size) in zip(times, steps, strict=True)]
    shown = list(thinned(strata, times[-1], stretches))
    assert len(shown) <= max(2 * (stretches + 1), min(len(strata), 2 * stretches))
    assert max(moment.bytes for moment in shown) == max(moment.bytes for moment in strata)
    assert shown[-1] == strata[-1]
    assert [moment.time_ns for moment in shown] == sorted(moment.time_ns for moment in shown)
    where = iter(strata)
    assert all(moment in where for moment in shown)  # in order, and none made up


def test_a_step_of_many_changes_makes_a_page_of_few_megabytes(planned: Page) -> None:
    strata = [Stratum(place * 1000, 0, False, place * 7919 % 10**6, 10**6, 10**5, 0, 10**4, 0) for place in range(100_000)]
    moments = tuple(thinned(strata, 10**8, STRETCHES))
    assert len(moments) > STRETCHES
    names = tuple(f"aten.some_operator_{place % 40}.default" for place in range(len(moments)))
    modules = tuple(f"Model.transformer.layers.{place % 96}.attention.projection" for place in range(len(moments)))
    phases = ("forward",) * len(moments)
    long = replace(planned.plain, moments=moments, changes=len(strata), end_ns=10**8, operators=names, modules=modules, phases=phases)
    html = replace(planned, plain=long, planned=long).to_html()
    assert len(html) < 3 << 20
    assert "Memory changes 100000 times" in html


def test_modules_hold_the_peak_between_them(planned: Page) -> None:
    assert sum(row.planned_bytes for row in planned.modules) == planned.planned.peak_bytes == planned.explanation.peak.bytes
    assert sum(row.plain_bytes for row in planned.modules) == planned.plain.peak_bytes == planned.explanation.plain_peak_bytes
    assert any(row.replay_ns for row in planned.modules)
    assert sum(row.recomputed_bytes for row in planned.modules) > 0


def test_the_curve_has_the_frontier_the_plan_and_the_literature(profile: punar.Profile, planned: Page) -> None:
    points = punar.frontier(profile).points
    assert [point.peak_bytes for point in planned.curve.points] == [point.peak_bytes for point in points]
    assert all(point.bound <= point.overhead for point in planned.curve.points)
    assert {"none", "full", "every:2", "selective"} <= {peer.name for peer in planned.curve.peers}
    rotor = [peer for peer in planned.curve.peers if peer.name == "rotor"]
    assert rotor
    assert all(a.peak_bytes < b.peak_bytes and a.overhead > b.overhead for a, b in itertools.pairwise(rotor))
    for peer in rotor:
        plan = punar.solve(profile, budget=peer.peak_bytes, solver="rotor")
        assert plan.peak_bytes <= peer.peak_bytes
        assert plan.overhead <= peer.overhead
    plan = punar.solve(profile, budget=1.0, solver="full")
    full = next(peer for peer in planned.curve.peers if peer.name == "full")
    assert (full.peak_bytes, full.overhead) == (plan.peak_bytes, plan.overhead)
    chosen = punar.solve(profile, budget=0.4)
    assert planned.curve.chosen is not None
    assert (planned.curve.chosen.peak_bytes, planned.curve.chosen.overhead) == (chosen.peak_bytes, chosen.overhead)


def test_a_block_is_drawn_from_the_top_down(planned: Page) -> None:
    block = planned.block
    assert block is not None
    assert block.count >= 3
    names = sorted(node.name for node in block.nodes if node.fate != "made before the block")
    assert names == ["add", "add", "attention", "down", "gelu", "norm", "norm", "project", "qkv", "up"]
    assert all(block.nodes[reads].layer < block.nodes[reader].layer for reads, reader in block.edges)
    spots = [(node.layer, node.place) for node in block.nodes]
    assert len(set(spots)) == len(spots)
    assert {"kept", "recomputed"} <= {node.fate for node in block.nodes}


def test_a_plain_step_recomputes_nothing(profile: punar.Profile) -> None:
    page = page_of(profile)
    assert not page.has_plan
    assert page.plain == page.planned
    assert page.curve.chosen is None
    assert {node.fate for node in page.block.nodes} <= {"kept", "not needed", "made before the block"} if page.block else False


def test_a_step_without_repeated_blocks_has_a_block_all_the_same() -> None:
    trace = trace_of([Step(name=f"op{i}", reads=(i - 1,), bytes=1000 + i, saves_inputs=True) for i in range(6)])
    page = page_of(punar.Profile(trace=trace))
    assert page.block is not None
    assert page.block.count == 1
    assert "The plan of one block" in page.to_html()


@given(st.lists(st.tuples(st.none() | st.integers(1, 100), st.integers(1, 100)), max_size=60), st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_rows_of_steps_hide_no_peak(steps: list[tuple[int | None, int]], most: int) -> None:
    stats = [stats_of(peak, time) for peak, time in steps]
    rows = step_rows(stats, most)
    assert len(rows) <= most
    assert max((peak for peak, _ in steps if peak is not None), default=None) == max(
        (row.measured_peak_bytes for row in rows if row.measured_peak_bytes is not None), default=None
    )
    assert max((time for _, time in steps), default=0) == max((row.time_ns for row in rows), default=0)
    assert [row.first for row in rows] == sorted({row.first for row in rows})


class Finished:
    """The record of a step."""

    predicted_peak_bytes = None
    kept_bytes = recomputed_bytes = replayed_operators = moved_bytes = coded_bytes = 0
    is_traced = False
    plan = None

    def __init__(self, measured_peak_bytes: int | None, time_ns: int) -> None:
        self.measured_peak_bytes, self.time_ns = measured_peak_bytes, time_ns


def stats_of(peak: int | None, time_ns: int) -> Any:
    return Finished(peak, time_ns)


def test_what_is_no_step_or_no_plan_of_it_is_refused(profile: punar.Profile) -> None:
    with pytest.raises(UsageError, match="asked for a profiled step, found"):
        page_of("trace.json")  # type: ignore[arg-type]
    other = punar.Profile(trace=transformer(3))
    with pytest.raises(PlanMismatch, match="asked to show a plan for the step"):
        page_of(profile, punar.solve(other, budget=0.5))


# -- the page --------------------------------------------------------------------------------------------------------------


def test_a_remat_writes_all_sections_and_asks_the_network_for_nothing(remat: punar.Remat, written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    seen = Reader(text)
    assert set(SECTIONS) <= set(seen.ids)
    assert len(seen.ids) == len(set(seen.ids))
    assert all(link.startswith("#") and link[1:] in seen.ids for link in seen.links)
    assert "default-src 'none'" in text
    assert not {"iframe", "img", "object", "embed"} & set(seen.tags)
    measured = {row[0]: row[1:] for row in seen.rows["measured"]}
    for name, predicted, found in remat.report().rows():
        assert measured[name] == [predicted, found]
    assert len(text) < 3 << 20


def test_tables_have_the_numbers_that_are_drawn(planned: Page) -> None:
    seen = Reader(planned.to_html())
    curve = planned.curve
    assert len(seen.rows["frontier"]) == 1 + len(curve.points) + len(curve.peers) + 1
    assert [row[0] for row in seen.rows["modules"][1:]] == [row.module for row in planned.modules]
    assert planned.block is not None
    assert len(seen.rows["block"]) == 1 + len(planned.block.nodes)
    assert "measured" not in seen.rows  # nothing was run


def test_names_are_no_markup() -> None:
    name = "</script><b id='x'>&'\""
    trace = trace_of([Step(name=name, module=name, reads=(i - 1,), bytes=1000, saves_inputs=True) for i in range(8)])
    profile = punar.Profile(trace=trace)
    html = page_of(profile, punar.solve(profile, budget="min")).to_html()
    assert "</script><b" not in html
    seen = Reader(html)
    assert "x" not in seen.ids
    assert "b" not in seen.tags
    assert name in "".join(seen.text)


@pytest.mark.parametrize(("library", "package"), [("bokeh.plotting", "bokeh"), ("jinja2", "jinja2")])
def test_a_missing_library_is_named_with_its_extra(library: str, package: str, planned: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDependency, match=rf"asked to .* a report as a page, .*pip install {package}'.* its extra \[report\]"):
        planned.to_html()


def test_nothing_has_run_yet(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="asked to report on a step, none has been recorded"):
        punar.Remat().report(html=tmp_path / "report.html")


def test_the_command_writes_a_page(profile: punar.Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, plan, page = (tmp_path / name for name in ("trace.json", "plan.json", "report.html"))
    profile.save(trace)
    punar.solve(profile, budget=0.5).save(plan)
    for ways in (["--plan", str(plan)], ["--budget", "0.5"], []):
        with pytest.raises(SystemExit, match="0"):
            main(["report", str(trace), *ways, "-o", str(page)])
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", f"wrote {page}\n")
        assert ("A step within" in "".join(Reader(page.read_text(encoding="utf-8")).text)) == bool(ways)
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(trace), "--budget", "0.5", "--plan", str(plan), "-o", str(page)])
    assert "not both" in capsys.readouterr().err


# -- in a browser ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("there is no Chromium here")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def shown(browser: Any, path: Path, *, width: int = 1200, scheme: str = "light") -> Any:
    """Opens a page and waits until all is drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    browser.get_log("browser")
    browser.get(path.as_uri())
    WebDriverWait(browser, 60).until(lambda driver: driver.execute_script("return document.documentElement.dataset.ready") == "yes")
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    return browser


def test_it_is_drawn_without_errors_or_requests(browser: Any, written: Path) -> None:
    page = shown(browser, written)
    drawn = "return [...document.querySelectorAll('.drawing')].map(part => part.getBoundingClientRect().height > 200)"
    assert page.execute_script(drawn) == [True] * 5
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_color_scheme(browser: Any, written: Path, scheme: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    page = shown(browser, written, scheme=scheme)
    paper = page.execute_script("return getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()")
    assert (paper == "#14171c") == (scheme == "dark")
    painted = page.execute_script("return Bokeh.documents[0].roots().map(root => root.background_fill_color)")
    assert set(painted) == {paper}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    later = "return Bokeh.documents[0].roots().every(root => root.background_fill_color === '#14171c')"
    WebDriverWait(page, 10).until(lambda driver: driver.execute_script(later))


def test_it_is_no_wider_than_a_phone(browser: Any, written: Path) -> None:
    page = shown(browser, written, width=390)
    assert page.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


def test_moments_are_read_with_the_keyboard(browser: Any, remat: punar.Remat, written: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    page = shown(browser, written)
    slider = page.find_element("id", "planned-moment")
    output = page.find_element("css selector", ".moment[data-drawing=planned] output")
    for _ in range(3):
        slider.send_keys(Keys.ARROW_RIGHT)
    assert "forward, aten." in output.text
    assert "whole step" in output.text
    assert slider.get_attribute("aria-valuetext") == output.text
    peak, zoom, whole = page.find_elements("css selector", ".moment[data-drawing=planned] button")
    peak.send_keys(Keys.ENTER)
    plan = remat.plan
    assert plan is not None
    assert f"whole step {format_bytes(plan.peak_bytes)}" in output.text
    width = (
        "const found = Bokeh.documents[0].get_model_by_name('planned');"
        "const root = Bokeh.documents[0].roots().find(root => root.renderers.includes(found));"
        "return root.x_range.end - root.x_range.start"
    )
    before = page.execute_script(width)
    zoom.send_keys(Keys.ENTER)
    assert page.execute_script(width) == pytest.approx(before / 2)
    whole.send_keys(Keys.ENTER)
    assert page.execute_script(width) == pytest.approx(before)


def test_tables_are_sorted_and_filtered(browser: Any, written: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    page = shown(browser, written)
    heads = page.find_elements("css selector", "#modules-table thead button")
    column = "return [...document.querySelectorAll('#modules-table tbody tr')].map(row => Number(row.cells[7].dataset.value))"
    heads[7].send_keys(Keys.ENTER)
    falling = page.execute_script(column)
    assert falling == sorted(falling, reverse=True) != sorted(falling)
    heads[7].send_keys(Keys.ENTER)
    assert page.execute_script(column) == sorted(falling)
    page.find_element("id", "modules-filter").send_keys("norm")
    visible = (
        "return [...document.querySelectorAll('#modules-table tbody tr')].filter(row => !row.hidden).map(row => row.cells[0].textContent)"
    )
    names = page.execute_script(visible)
    assert names
    assert all("norm" in name for name in names)
    assert page.find_element("id", "modules-count").text == f"{len(names)} of {len(falling)}"


def test_hovering_tells_operator_and_module(browser: Any, written: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    page = shown(browser, written)
    drawing = page.find_elements("css selector", "#memory .drawing")[0]
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", drawing)
    ActionChains(page).move_to_element_with_offset(drawing, 0, 90).perform()
    told = """
        const texts = [];
        const visit = (node) => { if (node.shadowRoot) visit(node.shadowRoot); for (const child of node.children ?? []) visit(child);
            if (node.classList?.contains("bk-tooltip-row-value") || node.classList?.contains("bk-Tooltip")) texts.push(node.textContent); };
        visit(document.body);
        return texts.join(" ");
    """
    from selenium.webdriver.support.ui import WebDriverWait

    text = WebDriverWait(page, 10).until(lambda driver: driver.execute_script(told))
    assert "aten." in text
    assert "Sequential." in text
    assert re.search(r"\d [KM]iB", text)
