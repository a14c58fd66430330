"""Do the commands plan for a device that is not here, and say what is wrong with what they are given?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from punar.costs.devices import read_device
from tests.cli.test_commands import SCRIPT, run

CONFIG = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
PARAMETERS = 2 * 128 * 64 + 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64) + 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("step.py").write_text(SCRIPT + "\nother = make\n\ndef wrong():\n    return 5\n", encoding="utf-8")
    Path("needy.py").write_text("import punar_no_such_module\n", encoding="utf-8")
    Path("config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def profile(*arguments: str) -> int:
    return run("profile", *arguments, "-o", "trace.json")


def test_from_a_configuration_to_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--batch",
        "2",
        "--length",
        "256",
        "--device",
        "h100-80gb",
        "--optimizer",
        "12",
        "--shards",
        "2",
        "--zero-stage",
        "1",
        "--json",
    )
    assert profile("hf:config.json", *options) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["device"], summary["parameters"]) == ("h100-80gb", PARAMETERS)
    loss, batch, frequencies = 512, 2 * 256 * 8, 512
    assert summary["resident_bytes"] == pytest.approx(PARAMETERS * (2 + 12 // 2) + loss + batch + frequencies, abs=512 * 25)
    assert summary["plain_peak_bytes"] > summary["resident_bytes"]

    assert run("frontier", "trace.json", "--json") == 0
    captured = capsys.readouterr()
    points = json.loads(captured.out)["points"]
    assert points[-1]["peak_bytes"] == summary["plain_peak_bytes"]
    assert points[-1]["time_ns"] == summary["time_ns"]
    assert points[-1]["overhead"] == 0
    assert f"{len(points)} of {len(points)} plans fit h100-80gb, which has 74.5 GiB" in captured.err

    assert run("solve", "trace.json", "--budget", "auto", "--offload", "cpu", "--json") == 0
    assert json.loads(capsys.readouterr().out)["budget_bytes"] == int(80e9 * 0.9)
    assert run("solve", "trace.json", "--budget", "100 GiB") == 2
    assert "above what h100-80gb has, 74.5 GiB" in capsys.readouterr().err


def numbers(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, int]:
    assert profile("hf:config.json", "--length", "256", "--device", "h100-80gb", "--json", *arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert run("solve", "trace.json", "--budget", "1.0", "--json") == 0
    return found | {"kept_bytes": json.loads(capsys.readouterr().out)["kept_bytes"]}


def test_layers_split_over_devices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What each layer has inside is divided, norms and what goes from layer to layer are whole."""
    whole, half = (numbers(capsys, "--tensor", parts) for parts in ("1", "2"))
    norms = (2 * 2 + 1) * 64
    assert whole["parameters"] == PARAMETERS
    assert half["parameters"] == (PARAMETERS - norms) // 2 + norms
    inside = (
        256 * 2 * (64 + 32 + 32 + 64) + 256 * 2 * 96 * 3
    )  # at least: the rotated heads and their results, and the three of the feed-forward part
    assert whole["kept_bytes"] - half["kept_bytes"] >= 2 * inside // 2


def test_stages_of_a_pipeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = numbers(capsys, "--stage", "1/2"), numbers(capsys, "--stage", "2/2")
    assert first["parameters"] + last["parameters"] == PARAMETERS + 64  # both have a last norm
    alone = numbers(capsys, "--stage", "1/2", "--in-flight", "1")
    assert first["kept_bytes"] == 2 * alone["kept_bytes"]
    assert numbers(capsys, "--stage", "2/2", "--in-flight", "1") == last


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tensor", "3"), "num_attention_heads = 4, which that does not divide"),
        (("--stage", "1/3"), "over 3 stages, found num_hidden_layers = 2"),
        (("--stage", "3/2"), "asked for the stage '3/2' of a pipeline"),
        (("--stage", "half"), "asked for the stage 'half' of a pipeline"),
    ],
)
def test_what_cannot_be_split(folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str) -> None:
    assert profile("hf:config.json", "--length", "8", "--device", "h100-80gb", *options) == 2
    assert said in capsys.readouterr().err
    assert profile("step.py", *options, "--device", "cpu") == 2


def test_a_configuration_whose_heads_have_no_size_of_their_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128}), encoding="utf-8"
    )
    assert profile("hf:config.json", "--length", "8", "--device", "h100-80gb", "--tensor", "2") == 2
    assert "a gpt2 configuration has no head_dim of its own" in capsys.readouterr().err


@pytest.mark.parametrize("config", [CONFIG | {"hidden_size": 130, "num_attention_heads": 4}, CONFIG | {"num_hidden_layers": "two"}])
def test_a_configuration_that_transformers_refuses(folder: Path, capsys: pytest.CaptureFixture[str], config: dict[str, object]) -> None:
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    assert profile("hf:config.json", "--length", "8", "--device", "h100-80gb") == 1
    assert "which transformers refuses" in capsys.readouterr().err


@pytest.mark.parametrize("optimizer", ["-5", "nan", "inf", "adamx"])
def test_an_optimizer_that_is_none(folder: Path, capsys: pytest.CaptureFixture[str], optimizer: str) -> None:
    assert profile("step.py", "--device", "cpu", f"--optimizer={optimizer}") == 2
    assert f"asked for the optimizer '{optimizer}'" in capsys.readouterr().err


def test_texts_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile("step.py", "--device", "rtx4090-24gb") == 0
    assert "time, computed" in capsys.readouterr().out
    assert run("frontier", "trace.json") == 0
    assert capsys.readouterr().out.startswith("predicted peak")


@pytest.mark.parametrize("source", ["step:make", "step:other", "step.py:other", "step.py"])
def test_functions_by_name(folder: Path, source: str) -> None:
    assert profile(source, "--device", "cpu") == 0


def test_a_configuration_also_runs_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "step:make", "--budget", "min") == 0
    assert profile("hf:config.json", "--length", "8", "--dtype", "float32") == 0
    assert "time, measured" in capsys.readouterr().out


def test_this_machine_is_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("calibrate", "-o", "mine.json", "--name", "mine", "--folder", folder, "--json") == 0
    assert read_device(Path("mine.json").read_text(encoding="utf-8")) == read_device(capsys.readouterr().out)
    assert profile("step.py", "--device", "mine.json", "--json") == 0
    assert json.loads(capsys.readouterr().out)["device"] == "mine"


WRONG: dict[str, tuple[tuple[str, ...], int, str]] = {
    "no such device": (("step.py", "--device", "h100"), 2, "give one of v100-32gb"),
    "no such optimizer": (("step.py", "--device", "cpu", "--optimizer", "lion"), 2, "give one of sgd"),
    "an optimizer of negative size": (("step.py", "--device", "cpu", "--optimizer", "-1"), 2, "the optimizer '-1'"),
    "an optimizer for a step that runs": (("step.py", "--optimizer", "adamw"), 2, "give --device too"),
    "shards for a step that runs": (("step.py", "--shards", "2"), 2, "give --device too"),
    "no length": (("hf:config.json",), 2, "give --length"),
    "a length for a script": (("step.py", "--length", "8"), 2, "which makes its own"),
    "a dtype that is none": (("hf:config.json", "--length", "8", "--dtype", "int8"), 2, "give bfloat16, float16 or float32"),
    "no such configuration": (("hf:nowhere.json", "--length", "8"), 2, "give the config.json"),
    "a configuration that is none": (("hf:empty.json", "--length", "8"), 1, "names no model_type"),
    "an unknown model": (("hf:unknown.json", "--length", "8"), 1, "check its model_type"),
    "a model of another kind": (("hf:vit.json", "--length", "8"), 1, "for other models give a Python function"),
    "no such module": (("nowhere.at:all",), 2, "the module nowhere.at, which is not found"),
    "no such function": (("step:nothing",), 1, "must define nothing()"),
    "no function": (("step.py:SCRIPT",), 1, "must define SCRIPT()"),
    "a function that returns another thing": (("step:wrong",), 1, "step:wrong() returned int"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, body in {"empty.json": {}, "unknown.json": {"model_type": "mystery"}, "vit.json": {"model_type": "vit"}}.items():
        Path(path).write_text(json.dumps(body), encoding="utf-8")
    arguments, code, message = WRONG[name]
    assert profile(*arguments) == code
    assert message in capsys.readouterr().err


def test_a_module_that_misses_another_says_so(folder: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="punar_no_such_module"):
        profile("needy:make")
