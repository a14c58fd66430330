"""Do `punar fit`, `compare` and `plan`, progress and completion do what the page on the command line says?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from punar.cli import complete, output
from punar.cli.output import working
from punar.demo.models import MODELS
from punar.fitting import GOALS
from punar.plan import Plan
from tests.cli.test_commands import SCRIPT, run
from tests.cli.test_without_the_hardware import CONFIG

SIZED = (
    SCRIPT + "\n\ndef make_batch(size):\n    return torch.randn(size, 64)\n\n\ndef sized():\n    return make()[0], make_batch, make()[2]\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("step.py").write_text(SCRIPT, encoding="utf-8")
    Path("sized.py").write_text(SIZED, encoding="utf-8")
    Path("config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("source", ["sized.py", "sized.py:sized"])
def test_the_largest_batch_of_a_script(source: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fit", source, "--budget", "2 MiB", "--multiple-of", "256", "--device", "cpu", "-o", "plan.json", "--json") == 0
    captured = capsys.readouterr()
    body = json.loads(captured.out)
    assert body["size"] % 256 == 0
    assert body["peak_bytes"] <= 2 << 20 < body["next_peak_bytes"]
    assert Plan.load("plan.json").peak_bytes == body["peak_bytes"]
    assert "wrote plan.json" in captured.err


def test_it_is_confirmed_here_and_printed_as_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fit", "sized.py", "--budget", "2 MiB", "--multiple-of", "512") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("largest batch: ")
    assert " measured, of 2.0 MiB on cpu" in lines[0]
    assert lines[1].split()[0] == "size"


@pytest.mark.parametrize(
    "options",
    [("--length", "64"), ("--maximize", "length", "--start", "16"), ("--maximize", "throughput", "--length", "64", "--total", "16")],
)
def test_sizes_of_a_configuration(options: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--multiple-of", "8", "--most", "32", "--budget", "8 MiB", "--device", "h100-80gb", "--optimizer", "adamw", "--json")
    assert run("fit", "hf:config.json", *options, *arguments) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["size"] % 8 == 0
    assert len(body["trials"]) > 1


WRONG: dict[str, tuple[tuple[str, ...], int, str]] = {
    "no make_batch": (("step.py",), 1, "no make_batch(size) beside make()"),
    "a demo model": (("vit",), 2, "batches of any size"),
    "no length": (("hf:config.json",), 2, "give --length"),
    "the size that is asked for": (("hf:config.json", "--length", "8", "--batch", "2"), 2, "give --length alone"),
    "a goal that is none": (("sized.py", "--maximize", "speed"), 2, "give one of batch"),
    "a budget that grows": (("sized.py", "--budget", "0.5"), 2, "which grows with the step"),
    "too little": (("sized.py", "--budget", "1 KiB"), 3, "size 1 needs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, code, message = WRONG[name]
    assert run("fit", *arguments, "--device", "cpu") == code
    assert message in capsys.readouterr().err


def test_two_plans_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", "step.py", "--device", "cpu", "-o", "trace.json") == 0
    assert run("plan", "trace.json", "--budget", "1.0", "-o", "a.json") == 0
    assert run("plan", "trace.json", "--budget", "min", "-o", "b.json", "--compress", "none") == 0
    capsys.readouterr()
    assert run("compare", "a.json", "b.json", "--trace", "trace.json", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    first, second = (Plan.load(name) for name in ("a.json", "b.json"))
    assert body["differing"] == sum(a != b for a, b in zip(map(bool, first.hold_from), map(bool, second.hold_from), strict=True)) > 0
    assert (body["changes"][0]["before"], body["changes"][0]["after"]) == ("kept", "recomputed")
    assert sum(change["values"] for change in body["changes"]) == body["differing"]
    assert [plan["peak_bytes"] for plan in body["plans"]] == [first.peak_bytes, second.peak_bytes]
    sizes = [place["bytes"] for place in body["places"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) >= first.kept_bytes - second.kept_bytes > 0
    assert {place["module"] for place in body["places"]} == {"Sequential.*"}

    assert run("compare", "a.json", "b.json", "--trace", "trace.json") == 0
    out = capsys.readouterr().out
    assert f"{body['differing']} of {body['values']} values are treated differently" in out
    assert "kept -> recomputed" in out
    assert run("compare", "a.json", "a.json", "--json") == 0
    assert json.loads(capsys.readouterr().out)["differing"] == 0


def test_plans_for_different_steps_are_not_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", "step.py", "--device", "cpu", "-o", "trace.json") == 0
    assert run("solve", "trace.json", "--budget", "1.0", "-o", "a.json") == 0
    assert run("fit", "sized.py", "--budget", "2 MiB", "--most", "8", "--device", "cpu", "-o", "b.json") == 0
    assert run("compare", "a.json", "b.json") == 1
    assert "made for different steps" in capsys.readouterr().err
    assert run("compare", "b.json", "b.json", "--trace", "trace.json") == 1
    assert run("compare", "a.json", "gone.json") == 2


def test_progress_is_shown_from_the_first_second_on_and_only_to_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "talk", lambda: Console(stderr=True, force_terminal=True, width=60))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(output, "PATIENCE_SECONDS", 0.05)
    with working("reading") as tell:
        tell("fitting")
        time.sleep(0.5)
    assert "fitting" in capsys.readouterr().err
    monkeypatch.setattr(output, "PATIENCE_SECONDS", 60)
    with working("quick"):
        pass
    assert "quick" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    monkeypatch.setattr(output, "PATIENCE_SECONDS", 0.01)
    with working("silent"):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


def asked_by_shell(words: str) -> list[str]:
    """What bash is told to offer after these words."""
    environment = {**os.environ, "_PUNAR_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    code = "import sys; sys.argv[0] = 'punar'; from punar.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout.split()


def test_a_shell_is_told_what_to_offer() -> None:
    assert asked_by_shell("punar comp") == ["compare"]
    assert asked_by_shell("punar profile --device h1") == ["h100-80gb"]
    assert asked_by_shell("punar fit x.py --maximize thr") == ["throughput"]


def test_the_names_offered_are_those_there_are() -> None:
    assert tuple(sorted(MODELS)) == complete.DEMO_MODELS
    assert complete.GOALS == GOALS
    assert complete.complete_model("v") == ["vit"]
    assert complete.complete_solver("gre") == ["greedy"]


def test_a_completion_script_is_printed() -> None:
    environment = {**os.environ, "_PUNAR_COMPLETE": "source_bash"}
    code = "import sys; sys.argv[0] = 'punar'; from punar.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert "complete -o default -F _punar_completion punar" in done.stdout


def test_help_names_both_and_loads_no_torch() -> None:
    code = """
import contextlib, io, sys
from punar.cli import main
out = io.StringIO()
with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
    main(["--help"])
assert "Another name of `punar solve`" in out.getvalue()
assert "--install-completion" in out.getvalue()
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"
