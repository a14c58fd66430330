"""Steps that begin alike and go on differently: does each get a plan of its own, and is none lost to another?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import punar
from punar.torch.session import StepStats
from tests.torch.models import make_blocks, plain_step


def train(remat: punar.Remat | None, is_training: Callable[[int], bool], steps: int) -> dict[str, Tensor]:
    """Trains blocks with batch norm, which evaluate differently, and returns their state at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters())
    for turn in range(steps):
        model.train(is_training(turn))
        x = torch.randn(512, 64)
        optimizer.zero_grad()
        if remat is None:
            plain_step(model, x)
        else:
            with remat:
                plain_step(model, x)
        optimizer.step()
    return model.state_dict()


def is_training(turn: int) -> bool:
    return not (6 <= turn < 12 or 18 <= turn < 21)


@pytest.fixture
def remat() -> punar.Remat:
    return punar.Remat(budget=0.6)


def is_kept(stats: StepStats) -> bool:
    """Whether the step was watched and kept to the budget its plan was made for."""
    assert stats.plan is not None
    return stats.measured_peak_bytes is None or stats.measured_peak_bytes <= stats.plan.budget_bytes


def test_training_and_evaluating_in_turn_keeps_both_plans(remat: punar.Remat) -> None:
    plain, planned = train(None, is_training, 30), train(remat, is_training, 30)
    assert [name for name in plain if not torch.equal(plain[name], planned[name])] == []
    assert [turn for turn, stats in enumerate(remat.stats) if stats.is_traced] == [0, 7]  # 6 leaves the only plan there is
    going_over = (12, 18, 21)  # their first operators obey the other plan
    assert all(is_kept(stats) for turn, stats in enumerate(remat.stats) if turn not in (0, 6, 7, *going_over))
    assert len({stats.plan.budget_bytes for stats in remat.stats if stats.plan is not None}) == 1


def test_the_first_step_of_a_known_other_way_goes_over_to_its_plan(remat: punar.Remat) -> None:
    train(remat, is_training, 30)
    for turn, way in [(12, 13), (18, 19), (21, 22)]:
        assert remat.stats[turn].predicted_peak_bytes == remat.stats[way].predicted_peak_bytes
        assert remat.stats[turn].replayed_operators >= remat.stats[way].replayed_operators - 2


def test_a_step_that_strays_is_watched_in_its_backward_too(remat: punar.Remat) -> None:
    train(remat, lambda turn: turn < 12, 13)
    assert [stats.measured_peak_bytes for stats in remat.stats[9:12]] == [None] * 3
    assert remat.stats[12].measured_peak_bytes is not None


def test_a_part_that_comes_now_and_then_is_not_recorded_for_ever(remat: punar.Remat) -> None:
    """The step after each such one is of the usual kind: recording it once more teaches nothing."""
    model, x = make_blocks(), torch.randn(64, 32)
    for turn in range(24):
        model.zero_grad()
        with remat:
            hidden = model(x)
            extra = sum((F.softplus(hidden + shift).square().mean() for shift in range(8)), torch.zeros(())) if turn % 6 == 5 else 0
            (hidden.square().mean() + extra).backward()
    assert [turn for turn, stats in enumerate(remat.stats) if stats.is_traced] == [0, 6]


def test_ways_that_are_other_ones_each_time_are_not_recorded_for_ever(remat: punar.Remat) -> None:
    model, x = make_blocks(8), torch.randn(64, 32)
    torch.manual_seed(0)
    for _ in range(20):
        model.zero_grad()
        with remat:
            hidden = x
            for i in torch.randperm(7).tolist():
                hidden = (torch.sin, torch.tanh, F.gelu, F.softplus, torch.sigmoid, F.silu, torch.atan)[i](model[i](hidden))
            hidden.square().mean().backward()
    assert sum(stats.is_traced for stats in remat.stats) == 2


def test_evaluation_that_begins_inside_later_blocks_is_no_other_way(remat: punar.Remat) -> None:
    model, x = make_blocks(), torch.randn(64, 32)
    for turn in range(8):
        model.zero_grad()
        with remat:
            hidden = model[0](x)
            if turn > 3:
                with torch.no_grad():
                    F.softplus(model[1:](hidden).exp()).atan()  # the operators of the pass itself
            model[1:](hidden).square().mean().backward()
    assert [turn for turn, stats in enumerate(remat.stats) if stats.is_traced] == [0]
    assert remat.stats[-1].replayed_operators > 0
