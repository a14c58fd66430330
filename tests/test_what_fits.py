"""Do the commands of the page on what fits print what the page shows? They plan for models of up to 70 billion parameters."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
MOST_SECONDS, MOST_BYTES = 60, 2 << 30


def examples() -> dict[str, list[tuple[str, list[str]]]]:
    """Each example's commands with the lines of output that the page shows, by the example's title."""
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for section in re.split(r"^## ", (DOCS / "what-fits.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        for block in re.findall(r"^```console\n(.*?)^```$", section, re.DOTALL | re.MULTILINE):
            for command, shown in re.findall(r"^\$ punar (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
                lines = [line for line in shown.splitlines() if line != "..."]
                found.setdefault(title, []).append((command, lines))
    return found


EXAMPLES = examples()


def test_the_page_has_its_examples() -> None:
    assert sum(len(commands) for commands in EXAMPLES.values()) == 13


@pytest.mark.slow
@pytest.mark.parametrize("title", EXAMPLES)
def test_commands_print_what_the_page_shows(title: str, tmp_path: Path) -> None:
    folder = shutil.copytree(DOCS / "what-fits", tmp_path / "what-fits")
    for command, lines in EXAMPLES[title]:
        ran = subprocess.run([sys.executable, "-m", "punar", *command.split()], cwd=folder, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert [line for line in lines if line not in ran.stdout.splitlines()] == [], ran.stdout


@pytest.mark.slow
def test_70_billion_parameters_from_configuration_to_plan_in_a_minute_and_2_gib(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
import punar
from punar.cli.hf import Sizes
from punar.cli.source import load_step

sizes = Sizes(length=4096, has_weights=False)
model, batch, loss_fn = load_step("hf:{DOCS / "what-fits" / "llama-70b.json"}", seed=0, sizes=sizes)
profile = punar.profile(model, batch, loss_fn, device="h200-141gb", optimizer="adamw", shards=8)
punar.solve(profile, budget="auto").save("{tmp_path / "plan.json"}")
"""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", script], check=True)
    seconds = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    assert (tmp_path / "plan.json").stat().st_size > 0
    assert seconds < MOST_SECONDS
    assert grown < MOST_BYTES
