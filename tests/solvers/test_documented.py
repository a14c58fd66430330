"""Does the page on planning list the solvers that there are?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from punar.solvers import find
from punar.solvers.registry import OURS

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


def rows() -> dict[str, str]:
    """The last cell of each solver's row, by name."""
    table = PAGE.read_text(encoding="utf-8").split("## Solvers")[1].split("\n## ")[0]
    return {match[1]: match[2] for match in re.finditer(r"^\| `([\w-]+)` \|.*\| ([^|]+) \|$", table, flags=re.MULTILINE)}


def test_the_table_has_one_row_for_each_registered_solver() -> None:
    assert sorted(rows()) == sorted(OURS)


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_year_in_a_row_is_one_of_the_sources_of_the_solver(name: str) -> None:
    stated = find(name).source
    assert set(re.findall(r"\b(?:19|20)\d\d\b", rows()[name])) <= set(re.findall(r"\b(?:19|20)\d\d\b", stated))
    assert stated
