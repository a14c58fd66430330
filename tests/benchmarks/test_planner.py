"""Does the planner's benchmark say what is so of plans that can be worked out by hand?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PLANNER = Path(__file__).parents[2] / "benchmarks" / "planner.py"


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    ran = subprocess.run(
        [sys.executable, str(PLANNER), "--json", "--models", "tiny", "--scale", "1", "--depths", "4,16"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)  # type: ignore[no-any-return]


def test_shares_and_gaps_of_a_model(found: dict[str, list[dict[str, Any]]]) -> None:
    (row,) = found["models"]
    assert 0 < row["any"] <= row["least"] < 1
    assert row["least"] <= row["blocks"]
    assert 0 <= row["median_gap"] <= row["worst_gap"]
    assert row["operators"] > 10


def test_four_times_the_depth_takes_twice_the_memory_and_a_forward_pass(found: dict[str, list[dict[str, Any]]]) -> None:
    shallow, deep = found["depths"]
    assert deep["least_by_root"] <= 1.2 * shallow["least_by_root"]
    assert 0 < deep["passes"] < 1.2
