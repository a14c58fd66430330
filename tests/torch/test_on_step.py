"""Is what is to be called after each step called, and does a failure of it leave training alone? What is logged?"""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

import punar
from punar.errors import UsageError
from punar.export import JsonLines
from punar.torch.session import StepStats
from tests.torch.models import WIDTH, make_blocks


def train(remat: punar.Remat, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, batch = make_blocks(4), torch.randn(256, WIDTH)
    for _ in range(steps):
        model.zero_grad()
        with remat:
            model(batch).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_each_step_is_told_in_order() -> None:
    seen: list[StepStats] = []
    counts: list[int] = []
    remat = punar.Remat(budget=0.6, on_step=[seen.append, lambda stats: counts.append(len(remat.stats))])
    train(remat)
    assert seen == remat.stats
    assert counts == [1, 2, 3]


def test_one_that_raises_is_a_warning_once_and_training_goes_on() -> None:
    seen: list[StepStats] = []

    def broken(stats: StepStats) -> None:
        raise OSError("the disk is full")

    remat = punar.Remat(budget=0.6, on_step=[broken, seen.append])
    with pytest.warns(UserWarning, match="it raised OSError: the disk is full. Training goes on") as caught:
        found = train(remat)
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the line of the `with` block
    assert len(seen) == 3
    assert all(map(torch.equal, found, train(punar.Remat(budget=0.6))))


def test_a_step_that_fails_is_told_and_raises_what_it_did() -> None:
    seen: list[StepStats] = []
    remat = punar.Remat(on_step=seen.append)
    with pytest.raises(ZeroDivisionError), remat:
        1 / 0  # noqa: B018
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("given", "found"), [(JsonLines, "the class JsonLines"), (3, "type int"), (["steps.jsonl"], "type str"), ("ab", "type str")]
)
def test_what_cannot_be_called_is_refused_at_once(given: object, found: str) -> None:
    with pytest.raises(UsageError, match=f"asked to call .*{found}"):
        punar.Remat(on_step=given)


def test_steps_are_logged_at_debug_and_new_plans_at_info(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="punar"):
        remat = punar.Remat(budget=0.6)
        train(remat, 2)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["DEBUG", "INFO", "DEBUG"]
    assert lines[0][1].endswith("recorded")
    assert lines[1][1].startswith("step 2 obeys a new plan: budget ")
    assert lines[2][1] == f"step 2: {remat.stats[1]}"
    assert f"recomputed by {remat.stats[1].replayed_operators} operators" in lines[2][1]


def test_a_plan_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its times are learned meanwhile, which makes no new one of it; nor does another one between."""
    remat = punar.Remat(budget=0.6)
    model = make_blocks(4)
    with caplog.at_level(logging.INFO, logger="punar"):
        for step in range(12):
            with remat:
                model(torch.randn(128 << step % 2, WIDTH)).square().mean().backward()
            model.zero_grad()
    plans = {(stats.plan.budget_bytes, stats.plan.hold_from) for stats in remat.stats if stats.plan is not None}
    assert len(caplog.records) == len(plans)


def test_nothing_is_said_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(punar.Remat(budget=0.6), 2)
    assert capfd.readouterr() == ("", "")


def test_where_nobody_listens_no_line_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stats: StepStats) -> str:
        raise AssertionError("a line was made")

    monkeypatch.setattr(StepStats, "__str__", fail)
    train(punar.Remat(budget=0.6), 2)
