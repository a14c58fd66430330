"""Does what a step did reach each exporter's format, as its own reader reads it?"""

from __future__ import annotations

import json
import sys
import urllib.request
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import punar
from punar.errors import MissingDependency, UsageError
from punar.export import METRICS, JsonLines, OpenTelemetry, Prometheus, TensorBoard
from punar.torch.session import StepStats
from tests.test_package import run_python
from tests.torch.models import WIDTH, make_blocks


@pytest.fixture(scope="module")
def steps() -> tuple[StepStats, ...]:
    """A recorded step, and one that obeys a plan."""
    model, batch = make_blocks(4), torch.randn(256, WIDTH)
    remat = punar.Remat(budget=0.6)
    for _ in range(2):
        with remat:
            model(batch).square().mean().backward()
        model.zero_grad()
    assert remat.stats[1].replayed_operators > 0
    return tuple(remat.stats)


def numbers(path: Path) -> dict[str, float]:
    """The samples of a file in Prometheus' text format."""
    families = text_string_to_metric_families(path.read_text(encoding="utf-8"))
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.name.endswith("_created")}


def test_every_number_of_a_step_is_a_metric(steps: tuple[StepStats, ...]) -> None:
    """Each field of its own: change it, and a metric changes."""
    before = [metric.read(steps[1]) for metric in METRICS]
    for field in fields(StepStats):
        content = getattr(steps[1], field.name)
        changed = None if field.name == "plan" else (not content if isinstance(content, bool) else content + 7)
        after = [metric.read(replace(steps[1], **{field.name: changed})) for metric in METRICS]
        assert before != after, field.name
    assert len({metric.full_name for metric in METRICS}) == len(METRICS)


def test_json_lines_hold_all_fields(steps: tuple[StepStats, ...], tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    export = JsonLines(path)
    for stats in steps:
        export(stats)
    recorded, obeyed = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    plan = steps[1].plan
    assert plan is not None
    for line, stats in ((recorded, steps[0]), (obeyed, steps[1])):
        assert all(line[field.name] == getattr(stats, field.name) for field in fields(stats) if field.name != "plan")
    assert (recorded["step"], recorded["budget_bytes"], obeyed["step"]) == (1, None, 2)
    asked = {name: getattr(plan, name) for name in ("solver", "budget_bytes", "fingerprint", "overhead")}
    assert {name: obeyed[name] for name in asked} == asked

    JsonLines(path)(steps[0])  # a second run goes on in it
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3


def test_a_line_cannot_be_written_where_no_folder_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"asked to write a line for each step to .*No such file"):
        JsonLines(tmp_path / "none" / "steps.jsonl")


def test_prometheus_reads_what_is_written(steps: tuple[StepStats, ...], tmp_path: Path) -> None:
    path = tmp_path / "punar.prom"
    export = Prometheus(path=path)
    for stats in steps:
        export(stats)
    found = numbers(path)
    assert found["punar_measured_peak_bytes"] == steps[1].measured_peak_bytes
    assert found["punar_step_seconds_count"] == 2
    assert found["punar_step_seconds_sum"] == pytest.approx(sum(stats.time_ns for stats in steps) / 1e9)
    assert found["punar_recomputed_bytes_total"] == sum(stats.recomputed_bytes for stats in steps)
    assert found["punar_traced_steps_total"] == 1
    assert len(found) == len(METRICS) + 1  # the spread one has a sum and a count


def test_what_was_not_measured_leaves_the_last_number(steps: tuple[StepStats, ...], tmp_path: Path) -> None:
    export = Prometheus(path=tmp_path / "punar.prom")
    export(steps[1])
    export(replace(steps[1], measured_peak_bytes=None))
    assert numbers(tmp_path / "punar.prom")["punar_measured_peak_bytes"] == steps[1].measured_peak_bytes


def test_prometheus_is_served(steps: tuple[StepStats, ...]) -> None:
    export = Prometheus(port=0)
    export(steps[1])
    with urllib.request.urlopen(f"http://127.0.0.1:{export.port}/metrics", timeout=10) as answer:
        assert f"punar_kept_bytes {float(steps[1].kept_bytes)}" in answer.read().decode()
    with pytest.raises(UsageError, match=f"port {export.port}: .*in use"):
        Prometheus(port=export.port)
    export.close()
    export(steps[1])  # no more served, and no error


def test_prometheus_is_told_where(steps: tuple[StepStats, ...]) -> None:
    with pytest.raises(UsageError, match="not told where"):
        Prometheus()
    registry = CollectorRegistry()
    Prometheus(registry=registry)(steps[1])
    assert registry.get_sample_value("punar_replayed_operators_total") == steps[1].replayed_operators
    with pytest.raises(UsageError, match="has them already"):
        Prometheus(registry=registry)


def test_what_makes_no_instruments_is_no_meter() -> None:
    with pytest.raises(UsageError, match="asked to record on 3, which makes no instruments"):
        OpenTelemetry(3)  # type: ignore[arg-type]


def test_opentelemetry_collects_what_was_recorded(steps: tuple[StepStats, ...]) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    export = OpenTelemetry(provider.get_meter("test"), attributes={"rank": "0"})
    for stats in steps:
        export(stats)
    data = reader.get_metrics_data()
    assert data is not None
    found = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    provider.shutdown()
    points: dict[str, Any] = {name: next(iter(metric.data.data_points)) for name, metric in found.items()}
    assert found.keys() == {f"punar.{metric.name}" for metric in METRICS}
    assert (points["punar.measured_peak"].value, found["punar.measured_peak"].unit) == (steps[1].measured_peak_bytes, "By")
    assert points["punar.recomputed"].value == sum(stats.recomputed_bytes for stats in steps)
    assert (points["punar.step"].count, found["punar.step"].unit) == (2, "s")
    assert points["punar.kept"].attributes == {"rank": "0"}


def test_opentelemetry_needs_no_provider(steps: tuple[StepStats, ...]) -> None:
    OpenTelemetry()(steps[0])


def test_tensorboard_reads_what_is_written(steps: tuple[StepStats, ...], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    export = TensorBoard(tmp_path / "run", first_step=10)
    for stats in steps:
        export(stats)
    export.close()
    found = EventAccumulator(str(tmp_path / "run")).Reload()
    assert set(found.Tags()["scalars"]) == {f"punar/{metric.full_name}" for metric in METRICS}
    peaks = found.Scalars("punar/measured_peak_bytes")
    assert [(event.step, event.value) for event in peaks] == [
        (10 + place, pytest.approx(stats.measured_peak_bytes)) for place, stats in enumerate(steps)
    ]


def test_scalars_go_to_a_folder_or_a_writer(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"asked to write scalars to .*file: File exists"):
        TensorBoard(tmp_path / "file")
    with pytest.raises(UsageError, match="with a NoneType; give a folder"):
        TensorBoard(None)  # type: ignore[arg-type]


def test_a_writer_that_the_program_has_stays_open(steps: tuple[StepStats, ...], tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        export = TensorBoard(writer)
        export(steps[0])
        export.close()
        writer.add_scalar("loss", 1.0, 0)
        assert writer.file_writer is not None


@pytest.mark.parametrize(
    ("library", "make", "package"),
    [
        ("prometheus_client", lambda: Prometheus(port=0), "prometheus-client"),
        ("opentelemetry.metrics", OpenTelemetry, "opentelemetry-api"),
        ("torch.utils.tensorboard", lambda: TensorBoard("runs"), "tensorboard"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(library: str, make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDependency, match=rf"pip install {package}'.* its extra \[{package.split('-')[0]}\]"):
        make()


def test_nothing_is_imported_unless_asked_for() -> None:
    code = "import sys, punar.export; print([n for n in ('prometheus_client', 'opentelemetry', 'tensorboard') if n in sys.modules])"
    assert run_python(code) == "[]\n"


def test_no_contents_are_written(steps: tuple[StepStats, ...], tmp_path: Path) -> None:
    """Nor a name of the model's parts."""
    JsonLines(tmp_path / "steps.jsonl")(steps[1])
    line = json.loads((tmp_path / "steps.jsonl").read_text(encoding="utf-8"))
    assert all(item is None or type(item) in (int, float, bool, str) for item in line.values())
    assert [name for name, item in line.items() if isinstance(item, str)] == ["solver", "fingerprint"]


def test_wrong_places_are_refused_at_once(tmp_path: Path) -> None:
    for path in (None, 5, tmp_path / "no folder" / "steps.jsonl"):
        with pytest.raises(UsageError, match="asked to write a line for each step"):
            JsonLines(path)  # type: ignore[arg-type]
    for path in (5, tmp_path / "no folder" / "punar.prom"):
        with pytest.raises(UsageError, match="asked to write metrics to"):
            Prometheus(path=path)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="asked to record attributes with each number, found 5"):
        OpenTelemetry(attributes=5)  # type: ignore[arg-type]
