"""No test reads or writes what earlier runs measured."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_cost_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUNAR_CACHE", "off")
