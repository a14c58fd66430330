"""Does ``punar run`` run a script as Python would, with its steps under a budget?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from punar.torch.boundaries import Boundaries
from tests.cli.test_commands import run

SCRIPT = """
import sys
import torch
from torch import nn
import beside

torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    model(torch.randn(512, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
total = sum(p.detach().double().sum().item() for p in model.parameters())
print(__name__, __file__ == sys.argv[0], sys.argv[1:], beside.NAME, total.hex())
sys.exit(7 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("NAME = 'neighbour'", encoding="utf-8")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def python(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False, cwd=cwd)


def test_it_prints_and_computes_what_it_would(script: Path) -> None:
    own = ("--budget", "of the script", "-m", "--help")
    plain, found = python(script, *own), python("-m", "punar", "run", "--budget", "min", script, *own)
    assert plain.returncode == found.returncode == 0, found.stderr
    assert found.stdout == plain.stdout
    assert "punar report" in found.stderr
    assert "traced: 1 step" in found.stderr


def test_a_module(script: Path) -> None:
    found = python("-m", "punar", "run", "--budget", "0.5", "-m", "train", "x", cwd=script.parent)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("__main__ True ['x'] neighbour")


def test_its_exit_code_and_errors_are_its_own(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "--budget", "0.5", script, "fail") == 7
    assert "punar report" in capsys.readouterr().err
    script.write_text("raise ValueError('of the script')", encoding="utf-8")
    found = python("-m", "punar", "run", script)
    assert found.returncode == 1
    assert "ValueError: of the script" in found.stderr


def test_dry(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = script.parent / "plan.json"
    assert run("run", "--dry-run", "--budget", "min", "-o", output, script) == 0
    capsys.readouterr()
    plan = json.loads(output.read_text(encoding="utf-8"))
    assert plan["peak_bytes"] < plan["plain_peak_bytes"]
    assert run("run", "--dry-run", "--budget", "min", script) == 0
    found = capsys.readouterr()
    assert "neighbour" not in found.out
    assert "peak of the whole step" in found.out
    assert "+0.0%" in found.out


def test_what_the_optimizer_is_going_to_keep_counts_in_a_dry_run(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry, wet = script.parent / "plan.json", script.parent / "report.json"
    assert run("run", "--dry-run", "--budget", "min", "-o", dry, script) == 0
    assert "KiB of state that AdamW makes in its first step" in capsys.readouterr().err
    assert run("run", "--budget", "min", "-o", wet, script) == 0
    planned, obeyed = (json.loads(path.read_text(encoding="utf-8")) for path in (dry, wet))
    assert planned["resident_bytes"] == obeyed["plan"]["resident_bytes"]


def test_the_report_as_a_file(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = script.parent / "report.json"
    assert run("run", "--budget", "0.5", "-o", output, script) == 0
    assert "punar" not in capsys.readouterr().out
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["obeyed"]["steps"] + (report["others"] or {"steps": 0})["steps"] == 3


def test_infeasible(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "--budget", "1 KiB", script) == 3
    assert "the least peak it reaches" in capsys.readouterr().err


def test_nothing_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", tmp_path / "missing.py") == 2
    assert run("run", "-m", "punar_no_such_package.train") == 2
    assert "asked to run the module punar_no_such_package.train" in capsys.readouterr().err
    assert run("run", "-o", tmp_path / "no folder" / "report.json", tmp_path / "missing.py") == 2
    assert run("run", tmp_path / "missing.py") == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "none.py").write_text("print('nothing')", encoding="utf-8")
    assert run("run", tmp_path / "none.py") == 1
    assert "saw none" in capsys.readouterr().err
    assert run("run", "--dry-run", tmp_path / "none.py") == 1


def test_nothing_is_left_behind(script: Path) -> None:
    before = list(sys.path), sys.argv, sys.modules["__main__"]
    assert run("run", "--dry-run", script) == 0
    assert (list(sys.path), sys.argv, sys.modules["__main__"]) == before
    from torch.nn.modules import module
    from torch.optim import optimizer

    hooks = [*module._global_forward_pre_hooks.values(), *optimizer._global_optimizer_pre_hooks.values()]
    assert not any(isinstance(getattr(hook, "__self__", None), Boundaries) for hook in hooks)


TRAINER = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        tokens = torch.randint(0, 1000, (128,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1000, n_positions=128))
arguments = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6, report_to=[], save_strategy="no", disable_tqdm=True,
    eval_strategy="steps", eval_steps=3, use_cpu=True, bf16=True, max_grad_norm=1.0,
)
Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens()).train()
print(sum(p.detach().double().sum().item() for p in model.parameters()).hex())
"""


@pytest.mark.slow
def test_a_trainer_trains_the_same_within_the_budget(tmp_path: Path) -> None:
    """transformers' own training loop: it accumulates, clips, evaluates between steps, and runs in mixed precision."""
    pytest.importorskip("accelerate")
    script, report = tmp_path / "trainer.py", tmp_path / "report.json"
    script.write_text(TRAINER, encoding="utf-8")
    plain = python(script, tmp_path)
    found = python("-m", "punar", "run", "--budget", "0.4", "-o", report, script, tmp_path)
    assert plain.returncode == found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]
    told = json.loads(report.read_text(encoding="utf-8"))
    assert told["traced"]["steps"] == 1
    obeyed = [told[kind] for kind in ("obeyed", "others") if told[kind]]
    assert sum(each["steps"] for each in obeyed) == 5
    for each in obeyed:
        assert each["recomputed_bytes"] > 0
        assert each["peak_bytes"] <= told["plan"]["budget_bytes"]


CATCHING = """
import os
import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
os.chdir("/")
print(os.path.exists(__file__), os.path.isabs(__file__))
for _ in range(4):
    try:
        model(torch.randn(64, 8)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    except{}:
        pass
print("done")
"""


@pytest.mark.parametrize("kind", ["", " Exception"])
def test_a_script_that_catches_what_ends_a_step(tmp_path: Path, kind: str) -> None:
    (tmp_path / "train.py").write_text(CATCHING.format(kind), encoding="utf-8")
    found = python("-m", "punar", "run", "--budget", "600 B", "train.py", cwd=tmp_path)
    assert found.returncode == 3, found.stderr  # no step stayed within the budget, and that is what is said
    assert "AssertionError" not in found.stderr
    assert "asked for a step within 600 B" in found.stderr
    assert found.stdout.splitlines() == ["True True", "done"]
    dry = python("-m", "punar", "run", "--budget", "1.0", "--dry-run", "train.py", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    assert "budget" in dry.stdout
