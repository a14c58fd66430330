"""Steps that begin alike and go on differently: does each get a plan of its own, and is none lost to another?"""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
    going_over = (12, 18, 21, 27)  # 27 is expected to be as 18 was; their first operators obey the other plan
    assert all(is_kept(stats) for turn, stats in enumerate(remat.stats) if turn not in (0, 6, 7, *going_over))
    assert len({stats.plan.budget_bytes for stats in remat.stats if stats.plan is not None}) == 1


def test_the_first_step_of_a_known_other_way_goes_over_to_its_plan(remat: punar.Remat) -> None:
    train(remat, is_training, 30)
    for turn, way in [(12, 13), (18, 19), (21, 22)]:
        assert remat.stats[turn].predicted_peak_bytes == remat.stats[way].predicted_peak_bytes
        assert remat.stats[turn].replayed_operators >= remat.stats[way].replayed_operators - 2


def test_a_step_that_strays_is_watched_in_its_backward_too(remat: punar.Remat) -> None:
    train(remat, lambda turn: turn < 24, 25)
    assert [stats.measured_peak_bytes for stats in remat.stats[21:24]] == [None] * 3
    assert remat.stats[24].measured_peak_bytes is not None


def rarely(model: nn.Module, x: Tensor, *, is_rare: bool) -> Tensor:
    """A step of which some have a part more."""
    hidden = model(x)
    extra = sum((F.softplus(hidden + shift).square().mean() for shift in range(8)), torch.zeros(())) if is_rare else 0
    return hidden.square().mean() + extra


def train_rarely(remat: punar.Remat, rare: Iterable[bool]) -> list[StepStats]:
    model, x = make_blocks(), torch.randn(64, 32)
    for is_rare in rare:
        model.zero_grad()
        with remat:
            rarely(model, x, is_rare=is_rare).backward()
    return remat.stats


def test_a_part_that_comes_every_so_many_steps_gets_a_plan(remat: punar.Remat) -> None:
    """The step after the first such one is recorded, and is of the usual kind; the third one is expected."""
    steps = train_rarely(remat, (turn % 6 == 5 for turn in range(36)))
    assert [turn for turn, stats in enumerate(steps) if stats.is_traced] == [0, 6, 17]
    assert steps[17].measured_peak_bytes > steps[0].measured_peak_bytes  # it is of the other kind
    assert all(is_kept(stats) for stats in steps[18:])
    assert {stats.measured_peak_bytes is None for stats in steps[18:]} == {True, False}


def test_two_kinds_of_steps_in_turn_both_get_plans(remat: punar.Remat) -> None:
    steps = train_rarely(remat, (turn % 2 == 1 for turn in range(14)))
    assert [turn for turn, stats in enumerate(steps) if stats.is_traced] == [0, 2, 5]
    assert all(is_kept(stats) for stats in steps[6:])


def test_ways_that_are_other_ones_each_time_are_not_recorded_for_ever(remat: punar.Remat) -> None:
    model, x = make_blocks(8), torch.randn(64, 32)
    torch.manual_seed(0)
    for _ in range(30):
        model.zero_grad()
        with remat:
            hidden = x
            for i in torch.randperm(7).tolist():
                hidden = (torch.sin, torch.tanh, F.gelu, F.softplus, torch.sigmoid, F.silu, torch.atan)[i](model[i](hidden))
            hidden.square().mean().backward()
    assert sum(stats.is_traced for stats in remat.stats) == 4


def test_a_part_that_comes_at_random_is_not_recorded_for_ever() -> None:
    """And in the end there is room for it."""
    rare = (torch.rand(90, generator=torch.Generator().manual_seed(1)) < 0.15).tolist()
    budget = int(0.8 * train_rarely(punar.Remat(), rare)[0].measured_peak_bytes)
    stats = train_rarely(punar.Remat(budget=budget), rare)
    assert sum(step.is_traced for step in stats) <= 6
    assert all(step.is_traced or step.measured_peak_bytes is None or step.measured_peak_bytes <= budget for step in stats[70:])


def test_a_wrapped_function_that_both_ways_call_does_not_lead_from_one_to_the_other(remat: punar.Remat) -> None:
    """Its row in a script is known by name only."""
    wrapped = punar.replayable(lambda t: torch.atan(t).exp())
    model, x = make_blocks(), torch.randn(64, 32)
    for turn in range(14):
        model.train(not 4 <= turn < 9)
        model.zero_grad()
        with remat:
            model(wrapped(model[0].norm(x))).square().mean().backward()
    assert [turn for turn, stats in enumerate(remat.stats) if stats.is_traced] == [0, 5]
    assert [script.passes for script in remat._session.scripts] == [7, 3]  # all but those recorded, 4 that strays and 9 that goes over


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
