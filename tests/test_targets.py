"""Is what a step reaches compared with what it should, and does a miss show in the exit code?"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import punar
from punar.errors import TargetError
from punar.targets import Found, find, percentile
from punar.units import parse_seconds
from tests.cli.test_commands import NONDETERMINISTIC, run
from tests.torch.models import WIDTH, make_blocks, plain_step

SCRIPT = """
import torch
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
    return model, torch.randn(512, 32), lambda model, batch: model(batch).square().mean()
"""

GENEROUS = 'peak = "1 TiB"\noverhead = 1000.0\ngradient_error = 0.0\nstep_p95 = "1000 s"\n'


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("step.py").write_text(SCRIPT, encoding="utf-8")
    return Path("step.py")


def write(text: str, name: str = "targets.toml") -> Path:
    Path(name).write_text(text, encoding="utf-8")
    return Path(name)


def test_targets_are_read_with_their_units(step: Path) -> None:
    targets = punar.Targets.load(write('peak = "600 MiB"\noverhead = 0.25\ngradient_error = 1e-3\nstep_p95 = "1.5 s"'))
    assert (targets.peak_bytes, targets.overhead, targets.gradient_error, targets.step_p95_ns) == (600 << 20, 0.25, 1e-3, 1_500_000_000)
    assert punar.Targets(peak=5, step_p95=0.25).step_p95_ns == 250_000_000
    table = write('[project]\nname = "x"\n[tool.punar.targets]\noverhead = 1', "pyproject.toml")
    assert punar.Targets.load(table) == punar.Targets(overhead=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed = 3", "found the key 'speed', which is no target; known are peak, overhead, gradient_error, step_p95"),
        ('peak = "6 seconds"', "target peak is '6 seconds'; give bytes with a unit"),
        ("peak = 0.5", "target peak is 0.5; give a whole number of bytes"),
        ("peak = true", "target peak is True"),
        ("peak = -1", "target peak is -1"),
        ('step_p95 = "300"', "target step_p95 is '300'; give seconds above 0"),
        ('step_p95 = "300 MiB"', "target step_p95 is '300 MiB'"),
        ("step_p95 = 0", "target step_p95 is 0"),
        ("step_p95 = inf", "target step_p95 is inf"),
        ("overhead = -0.1", "target overhead is -0.1; give a number from 0 on"),
        ('overhead = "20%"', "target overhead is '20%'"),
        ("gradient_error = nan", "target gradient_error is nan"),
        ("", "asked to check targets, found none; give some of peak"),
        ("peak = ", "cannot be: Invalid value"),
    ],
)
def test_what_is_no_target_says_what_is(text: str, message: str, step: Path) -> None:
    with pytest.raises(TargetError, match=re.escape(message)):
        punar.Targets.load(write(text))
    assert run("check", step, "--targets", "targets.toml") == 2


def test_files_without_targets(step: Path) -> None:
    with pytest.raises(TargetError, match=r"found no table \[tool.punar.targets\]"):
        punar.Targets.load(write("[tool.ruff]\nline-length = 140", "pyproject.toml"))
    with pytest.raises(TargetError, match="No such file"):
        punar.Targets.load("gone.toml")
    with pytest.raises(TargetError, match="against something of type int"):
        punar.Targets(peak=1).check(3)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained() -> punar.Remat:
    torch.manual_seed(0)
    model, x, remat = make_blocks(2), torch.randn(512, WIDTH), punar.Remat(budget=0.6)
    for _ in range(4):
        model.zero_grad()
        with remat:
            plain_step(model, x)
    return remat


def test_numbers_of_other_libraries_are_numbers() -> None:
    targets = punar.Targets(overhead=np.float32(0.5), step_p95=np.float64(0.25))  # type: ignore[arg-type]
    assert (targets.overhead, targets.step_p95_ns) == (0.5, 250_000_000)


def test_a_run_is_checked_by_what_it_measured(trained: punar.Remat) -> None:
    obeyed = trained.stats[1:]
    peak = max(stats.measured_peak_bytes for stats in obeyed)
    assert peak < trained.stats[0].measured_peak_bytes  # the recorded step ran plain, and does not count
    overhead = max(stats.plan.overhead for stats in obeyed)
    slowest = max(stats.time_ns for stats in obeyed)
    met = punar.Targets(peak=peak, overhead=overhead, gradient_error=0.0, step_p95=slowest / 1e9).check(trained)
    assert met.is_met
    assert [outcome.origin for outcome in met.outcomes] == ["measured", "predicted", "by construction", "measured"]
    missed = punar.Targets(peak=peak - 1, overhead=overhead / 2, step_p95=slowest / 2e9).check(trained)
    assert missed.missed == ("peak", "overhead", "step_p95")
    assert str(missed).count("MISSED") == 3
    assert f"at most {peak - 1} B  {peak} B" in str(missed)  # rounded, they would read the same
    assert missed.to_dict()["outcomes"][0] == {"name": "peak", "target": peak - 1, "found": peak, "is_met": False, "origin": "measured"}


def test_what_is_not_known_meets_nothing() -> None:
    checked = punar.Targets(peak=1 << 60, overhead=9.0, gradient_error=9.0, step_p95=9.0).check(punar.Remat())
    assert checked.missed == ("peak", "overhead", "gradient_error", "step_p95")
    assert {outcome.origin for outcome in checked.outcomes} == {"not known"}


def test_a_step_is_measured_and_put_back() -> None:
    model, x = make_blocks(2), torch.randn(256, WIDTH)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found, verified = find(model, x, lambda m, b: m(b).square().mean(), budget="min", steps=3)
    assert verified.is_identical
    assert found.peak_bytes == verified.measured_peak_bytes <= verified.plan.budget_bytes
    assert (found.gradient_error, found.is_overhead_measured) == (0.0, True)
    assert found.step_p95_ns > 0
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    with pytest.raises(TargetError, match="asked to measure 0 steps"):
        find(model, x, lambda m, b: m(b).sum(), steps=0)


def test_rounded_gradients_have_an_error() -> None:
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(2)])
    found, verified = find(model, torch.randn(1024, 64), lambda m, b: m(b).square().mean(), steps=1, compress=("mask", "int8"))
    assert bool(verified.plan.lossy_codecs) == (found.gradient_error > 0)
    assert punar.Targets(gradient_error=found.gradient_error).check(found).is_met


def test_the_exit_code_says_what_is_missed(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", step, "--targets", write(GENEROUS), "--budget", "min", "--steps", "2", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["is_met"], body["missed"], len(body["outcomes"])) == (True, [], 4)
    assert body["verification"]["is_identical"]
    reached = body["outcomes"][0]["found"]
    assert run("check", step, "--targets", write(f"peak = {reached - 1}"), "--budget", "min", "--steps", "2") == 5
    assert "MISSED" in capsys.readouterr().out


def test_the_target_for_the_peak_is_the_budget(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", step, "--targets", write("peak = 1024")) == 3
    assert capsys.readouterr().out == ""


def test_a_step_that_is_not_the_plain_one_ends_with_4(step: Path) -> None:
    step.write_text(NONDETERMINISTIC.replace("punar_cli_test", "punar_targets_test"), encoding="utf-8")
    assert run("check", step, "--targets", write(GENEROUS), "--budget", "min", "--steps", "1") == 4


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200))
def test_the_percentile_is_the_least_that_so_many_do_not_exceed(times: list[int]) -> None:
    found = percentile(times, 95)
    assert found in times
    assert sum(time <= found for time in times) >= math.ceil(0.95 * len(times))
    assert sum(time < found for time in times) < 0.95 * len(times)


@given(st.integers(1, 10**6), st.sampled_from([("ns", 1), ("us", 10**3), ("µs", 10**3), ("ms", 10**6), ("s", 10**9), ("min", 60 * 10**9)]))
def test_seconds_are_read_in_any_unit(number: int, unit: tuple[str, int]) -> None:
    assert parse_seconds(f"{number} {unit[0]}") == parse_seconds(f" {number}{unit[0]} ") == number * unit[1]


@given(st.builds(Found, peak_bytes=st.none() | st.integers(0, 100), step_p95_ns=st.none() | st.integers(0, 100)), st.integers(1, 100))
def test_at_most_means_at_most(found: Found, asked: int) -> None:
    checked = punar.Targets(peak=asked, step_p95=asked / 1e9).check(found)
    assert [outcome.is_met for outcome in checked.outcomes] == [
        reached is not None and reached <= asked for reached in (found.peak_bytes, found.step_p95_ns)
    ]
