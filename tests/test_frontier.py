"""What does the whole curve of memory and time say, and what does it cost?"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import punar
from punar.errors import UsageError
from punar.solvers import search
from punar.solvers.auto import frontier_of


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.fixture(scope="module")
def profile() -> punar.Profile:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
    return punar.profile(model, torch.randn(512, 64), loss_fn)


def test_peaks_rise_and_times_fall_from_the_least_plan_to_the_plain_step(profile: punar.Profile) -> None:
    points = punar.frontier(profile).points
    assert len(points) > 3
    assert all(a.peak_bytes < b.peak_bytes and a.time_ns > b.time_ns for a, b in itertools.pairwise(points))
    assert points[0].peak_bytes == punar.solve(profile, budget="min").peak_bytes
    assert (points[-1].time_ns, points[-1].overhead) == (profile.trace.plain_time_ns, 0.0)
    assert all(point.bound_ns <= point.time_ns for point in points)


def test_less_memory_is_never_bounded_by_less_time() -> None:
    model = nn.Sequential(*[nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(4)])
    points = punar.frontier(punar.profile(model, torch.empty(8, 32, 64), loss_fn, device="cpu")).points
    assert all(a.bound_ns >= b.bound_ns for a, b in itertools.pairwise(points))


def test_its_plans_are_those_of_solve(profile: punar.Profile) -> None:
    frontier = punar.frontier(profile)
    for point in frontier.points:
        assert point.plan == frontier.at(point.peak_bytes) == punar.solve(profile, budget=point.peak_bytes)
        assert (point.plan.peak_bytes, point.plan.time_ns) == (point.peak_bytes, point.time_ns)
        assert point.plan.bound_ns <= point.bound_ns
        assert point.plan.overhead == point.overhead
    assert frontier.at("min") == punar.solve(profile, budget="min")
    assert frontier.at(0.7) == punar.solve(profile, budget=0.7)


def test_the_whole_curve_takes_one_search(profile: punar.Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    run = search.Search.run

    def counted(self: search.Search) -> None:
        searched.append(1)
        run(self)

    monkeypatch.setattr(search.Search, "run", counted)
    frontier_of.cache_clear()
    frontier = punar.frontier(profile)
    assert [point.plan for point in frontier.points]
    assert frontier.at(0.6).peak_bytes <= frontier.points[-1].peak_bytes
    assert len(searched) == 1


def test_it_is_printed_as_one_line_a_point(profile: punar.Profile) -> None:
    frontier = punar.frontier(profile)
    header, *rows = str(frontier).splitlines()
    assert "predicted peak" in header
    assert len(rows) == len(frontier.points)
    assert rows[-1].split()[-3] == "0.0%"


def test_what_is_no_profile_or_no_budget_is_refused(profile: punar.Profile) -> None:
    with pytest.raises(UsageError, match=r"found something of type Linear; give what punar\.profile"):
        punar.frontier(nn.Linear(2, 2))
    with pytest.raises(punar.InfeasibleBudget, match=r"Give at least \d+ B"):
        punar.frontier(profile).at(1)
    with pytest.raises(punar.BudgetError, match="float outside"):
        punar.frontier(profile).at(2.0)
