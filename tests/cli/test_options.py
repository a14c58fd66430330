"""How are budgets read from the command line?"""

from __future__ import annotations

import pytest

from punar.cli.options import parse_budget
from punar.errors import BudgetError


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("min", "min"),
        ("auto", "auto"),
        ("0.4", 0.4),
        ("1", 1.0),
        ("1e-1", 0.1),
        ("600 MiB", "600 MiB"),
        ("2GB", "2GB"),
        ("1048576", 1048576),
    ],
)
def test_budget_is_read(text: str, budget: str | float | int) -> None:
    found = parse_budget(text)
    assert found == budget
    assert type(found) is type(budget)


@pytest.mark.parametrize("text", ["6 gb/s", "", "much", "0 MiB", "-1 MiB", "minimum", "40%", "9" * 400 + " MiB"])
def test_text_that_is_no_budget(text: str) -> None:
    with pytest.raises(BudgetError, match="budget"):
        parse_budget(text)


@pytest.mark.parametrize("text", ["0", "-0.5", "1.5", "nan", "inf", "-3", "9" * 400, "9" * 5000])
def test_number_that_is_no_fraction(text: str) -> None:
    with pytest.raises(BudgetError, match="above 0 and at most 1"):
        parse_budget(text)
