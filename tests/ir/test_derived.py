"""Is what was derived from a trace there while it is planned for, and gone afterwards?"""

from __future__ import annotations

import pytest

import punar
from punar.ir import derived
from punar.ir.lineage import lineage_of
from punar.torch.session import LEARNED_AFTER
from tests.synthetic import transformer
from tests.torch.harness import train
from tests.torch.models import plain_step, stepping


def kept() -> int:
    return sum(function.cache_info().currsize for function in derived._derived)


def test_it_is_computed_once_until_it_is_forgotten() -> None:
    trace = transformer(2)
    first = lineage_of(trace)
    assert lineage_of(trace) is first
    derived.forget_derived()
    assert kept() == 0
    assert lineage_of(trace) == first


def test_equal_traces_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = transformer(2), transformer(2)
    assert one == other
    line = lineage_of(one)
    monkeypatch.setattr(type(one), "__eq__", None)  # comparing them would raise
    assert lineage_of(other) is lineage_of(other)
    assert lineage_of(other) is not line


def test_no_more_than_some_traces_are_kept() -> None:
    derived.forget_derived()
    traces = [transformer(1) for _ in range(derived.KEPT + 2)]
    lines = [lineage_of(trace) for trace in traces]
    assert lineage_of(traces[-1]) is lines[-1]
    assert lineage_of(traces[0]) is not lines[0]
    assert max(function.cache_info().currsize for function in derived._derived) == derived.KEPT


def test_a_session_forgets_it_once_its_plan_is_settled() -> None:
    remat = punar.Remat(budget="min")
    train(stepping(plain_step), steps=1, remat=remat)
    remat._session.complete()
    assert kept() > 0
    remat = punar.Remat(budget="min")
    train(stepping(plain_step), steps=LEARNED_AFTER + 2, remat=remat)
    assert kept() == 0
