"""Do the commands print data on stdout, talk on stderr, and end with the right code?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import punar
from punar.cli import main

SCRIPT = """
import torch
from torch import nn


def make():
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))])
    return model, torch.randn(512, 64), lambda model, batch: model(batch).square().mean()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "step.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def run(*arguments: str | Path) -> int:
    """Runs a command and returns its exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_profile_then_solve_then_verify(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, plan = tmp_path / "trace.json", tmp_path / "plan.json"

    assert run("profile", script, "-o", trace, "--json") == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert summary["operators"] > 0
    assert f"wrote {trace}" in captured.err

    assert run("solve", trace, "--budget", "0.5", "-o", plan, "--json") == 0
    solved = json.loads(capsys.readouterr().out)
    assert solved["fingerprint"] == summary["fingerprint"]
    assert solved["peak_bytes"] <= solved["budget_bytes"] < solved["plain_peak_bytes"]

    assert run("verify", script, "--plan", plan, "--json") == 0
    verified = json.loads(capsys.readouterr().out)
    assert (verified["is_identical"], verified["is_deterministic"], verified["differences"]) == (True, True, [])
    assert verified["predicted_peak_bytes"] == solved["peak_bytes"]
    assert abs(verified["measured_peak_bytes"] - solved["peak_bytes"]) <= 4  # the loss, which the user may hold
    assert verified["budget_bytes"] == solved["budget_bytes"]
    assert verified["replayed_operators"] == solved["replayed_ops"] > 0
    assert verified["recomputed_bytes"] == solved["recomputed_bytes"] > 0
    assert "identical" in verified["text"]


def test_texts_for_people(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert run("profile", script, "-o", trace) == 0
    assert "saved values" in capsys.readouterr().out
    assert run("solve", trace, "--budget", "min") == 0
    assert "of the whole step" in capsys.readouterr().out
    assert run("verify", script, "--budget", "min") == 0
    assert capsys.readouterr().out


def test_explain_says_why(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, plan, step = tmp_path / "trace.json", tmp_path / "plan.json", tmp_path / "step.json"
    assert run("profile", script, "-o", trace) == 0
    assert run("solve", trace, "--budget", "0.5", "-o", plan, "--json") == 0
    capsys.readouterr()

    assert run("explain", trace) == 0
    text = capsys.readouterr().out
    assert text.startswith("The peak of the plain step, cpu\n")
    assert "step.py:8" in text  # the line of the script that calls the model

    assert run("explain", trace, "--plan", plan, "--trace", step, "--json") == 0
    captured = capsys.readouterr()
    body = json.loads(captured.out)
    assert body["peak"]["bytes"] == punar.Plan.load(plan).peak_bytes
    assert body["totals"]["recomputed"] > 0
    assert f"wrote {step}" in captured.err
    assert json.loads(step.read_text(encoding="utf-8"))["otherData"]["peak_bytes"] == body["peak"]["bytes"]

    assert run("explain", trace, "--budget", "0.5", "--json") == 0
    assert json.loads(capsys.readouterr().out)["peak"]["bytes"] == body["peak"]["bytes"]
    assert run("explain", trace, "--budget", "0.5", "--plan", plan) == 2


def test_infeasible_budget_ends_with_3(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert run("profile", script, "-o", trace) == 0
    capsys.readouterr()
    assert run("solve", trace, "--budget", "1 KiB") == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("punar: ")


def test_failed_verification_ends_with_4(tmp_path: Path) -> None:
    path = tmp_path / "step.py"
    path.write_text(NONDETERMINISTIC, encoding="utf-8")
    assert run("verify", path, "--budget", "min") == 4


# The operator draws from a state of its own, which nobody can rewind.
NONDETERMINISTIC = """
import itertools
import torch
from torch import nn

COUNT = itertools.count()
LIBRARY = torch.library.Library("punar_cli_test", "FRAGMENT")
LIBRARY.define("drift(Tensor x) -> Tensor")
LIBRARY.impl("drift", lambda x: x * (1 + next(COUNT)), "CompositeExplicitAutograd")


class Drift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.ops.punar_cli_test.drift(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.last(Drift.apply(self.first(x)).sigmoid())


def make():
    return Model(), torch.randn(512, 64), lambda model, batch: model(batch).square().mean()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--budget", "6 gb/s"),
        ("demo", "--steps", "0"),
        ("demo", "--steps", "many"),
        ("verify", "step.py"),
        ("solve", "no-such-trace.json", "--budget", "0.5"),
        ("solve", ".", "--budget", "0.5"),
        ("solve", __file__, "--budget", "0.5", "--solver", "magic"),
        ("solve", __file__, "--budget", "0.5", "--solver", "every:0"),
        ("solve", __file__, "--budget", "0.5", "-o", "no-such-directory/plan.json"),
        ("verify", "gone.py", "--budget", "0.5"),
        ("verify", ".py", "--budget", "0.5"),
        ("verify", "bert", "--budget", "0.5"),
        ("verify", "moe", "--plan", "no-such-plan.json"),
        ("verify", "moe", "--budget", "40%"),
        ("verify", "moe", "--budget", "0.4", "--seed", "-1"),
        ("profile", "gone.py", "-o", "trace.json"),
        ("profile", "moe", "-o", "no-such-directory/trace.json"),
        ("profile", "moe"),
        ("demo", "--model", "bert"),
        ("demo", "--threads", "0"),
        ("demo", "--threads", "1000000"),
        ("no-such-command",),
    ],
    ids=" ".join,
)
def test_wrong_use_ends_with_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = 1", "defines none"),
        ("def make(): return 3", "returned int"),
        ("def make(): return 1, 2, 3", "returned tuple"),
    ],
)
def test_scripts_without_a_step(body: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.py"
    path.write_text(body, encoding="utf-8")
    assert run("verify", path, "--budget", "0.5") == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("source", "message"), [("gone.py", "is no file"), ("bert", "choose one of gpt2, llama, minilm, moe, unet, vit")])
def test_sources_that_do_not_exist(source: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", source, "--budget", "0.5") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["{}", "", "not json", '{"format": "punar-trace", "version": 1}', '{"format": "punar-plan", "version": 1}']
)
def test_a_damaged_file_ends_with_1_and_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text, encoding="utf-8")
    for command in (("solve", path, "--budget", "0.5"), ("verify", "moe", "--plan", path)):
        assert run(*command) == 1
        assert capsys.readouterr().err.startswith(f"punar: {path}: ")


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"punar {punar.__version__}\n"


def test_demo_prints_the_promised_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--model", "unet", "--steps", "4", "--budget", "0.6", "--budget", "min", "--json") == 0
    captured = capsys.readouterr()
    body = json.loads(captured.out)
    assert list(body) == ["device", "rows"]
    assert [row["budget"] for row in body["rows"]] == ["plain", "0.6", "min"]
    assert all(row["identical"] for row in body["rows"])
    assert "bit-identical" in captured.err


def test_demo_offloads(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--model", "vit", "--steps", "3", "--budget", "min", "--offload", "disk", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["identical"] for row in rows)
    assert 0 <= rows[1]["predicted_peak_bytes"] - rows[1]["measured_peak_bytes"] <= 4  # the loss of the step before
    assert rows[1]["moved_bytes"] > 0


def test_demo_rounds_where_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--model", "unet", "--steps", "2", "--budget", "1.0", "--compress", "int8") == 0
    assert "bit-identical" in capsys.readouterr().err  # nothing needs rounding
    assert run("demo", "--compress", "int9") == 2
    assert "asked to compress by 'int9'; give some of mask" in capsys.readouterr().err


def test_compressing_is_planned_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, trace = tmp_path / "dropping.py", str(tmp_path / "trace.json")
    script.write_text(DROPPING)
    assert run("profile", str(script), "-o", trace) == 0
    capsys.readouterr()
    for ways in ((), ("--compress", "none")):
        assert run("solve", trace, "--budget", "0.5", "--json", *ways) == 0
        body = json.loads(capsys.readouterr().out)
        assert (body["coded_bytes"] > 0) == (not ways)
    assert run("solve", trace, "--budget", "0.5") == 0
    assert "compressed " in capsys.readouterr().out
    assert run("verify", str(script), "--budget", "0.5", "--compress", "bf16", "--json") == 0
    assert json.loads(capsys.readouterr().out)["is_as_promised"]


DROPPING = """
import torch


def make():
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), *(torch.nn.Dropout(0.1) for _ in range(6))) for _ in range(8)]
    return torch.nn.Sequential(*layers), torch.randn(2000, 64), lambda model, batch: model(batch).square().mean()
"""


def test_demo_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--model", "unet", "--steps", "3", "--budget", "0.6") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("budget")
    assert [line.split()[0] for line in lines[1:]] == ["plain", "0.6"]


def test_demo_under_an_infeasible_budget_ends_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--model", "unet", "--steps", "2", "--budget", "1 KiB") == 3
    assert capsys.readouterr().out == ""


def test_help_is_quick_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "demo" in capsys.readouterr().out
