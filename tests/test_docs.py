"""Does what README and docs show run as written, and do they name all there is?"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import punar
from punar.cli import main
from punar.cli.app import app
from punar.cli.output import Exit
from punar.fitting import Trial
from punar.reporting.report import Measured, Report
from punar.torch.session import StepStats
from tests.torch.models import WIDTH, make_blocks

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

# What the pages take to be there: the reader's own model and data.
STEP = """
import torch
from tests.torch.models import WIDTH, make_blocks


def make():
    return make_blocks(8), torch.randn(512, WIDTH), lambda model, batch: model(batch).square().mean()
"""

SIZED = (
    STEP
    + """

def make_batch(size):
    return torch.randn(size, WIDTH)
"""
)

TRAIN = """
from step import make

import torch

model, batch, loss_fn = make()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss_fn(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def reader() -> dict[str, Any]:
    """The names that the pages use and do not define."""
    model = make_blocks(8)
    loader = [torch.randn(512, WIDTH) for _ in range(3)]

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    return {
        "punar": punar,
        "model": model,
        "loader": loader,
        "batch": loader[0],
        "loss_fn": loss_fn,
        "optimizer": torch.optim.AdamW(model.parameters()),
    }


@pytest.fixture(autouse=True)
def quiet_again() -> Iterator[None]:
    """A page shows how to have steps logged."""
    yield
    logging.getLogger("punar").setLevel(logging.NOTSET)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_runs_as_written(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = reader()
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if "\npunar " in "".join(blocks(page, ""))], ids=lambda page: page.name)
def test_commands_run_as_written(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("step.py").write_text(STEP, encoding="utf-8")
    Path("sized.py").write_text(SIZED, encoding="utf-8")
    Path("train.py").write_text(TRAIN, encoding="utf-8")
    for line in "".join(blocks(page, "")).splitlines():
        if line.startswith("punar "):
            with pytest.raises(SystemExit) as caught:
                main(line.split()[1:])
            assert caught.value.code == 0, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if target.suffix != ".md":
            continue
        titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert not anchor or anchor in [title.lower().replace(" ", "-") for title in titles], link


def test_the_reference_names_all_there_is() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    attributes = [name for name, item in vars(punar.Remat).items() if isinstance(item, property)]
    names = [
        *punar.__all__,
        *attributes,
        *(field.name for record in (StepStats, Report, Measured, punar.Verification, punar.Fit, Trial) for field in fields(record)),
    ]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if page.name != "README.md" and f"docs/{page.name}" not in readme] == []


def test_the_command_line_page_names_all_there_is() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    import typer.main

    commands = typer.main.get_command(app).commands
    rows = {name: next(line for line in text.splitlines() if line.startswith(f"| `punar {name}")) for name in commands}
    for name, command in commands.items():
        options = [option for parameter in command.params for option in parameter.opts[:1] if option.startswith("-")]
        assert [option for option in options if option not in rows[name] and option != "--help"] == [], name
    assert [code for code in Exit if f"| {code.value} | " not in text] == []
