"""Are moves planned at the speeds of a device that is not here?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import punar
from punar.errors import UsageError

HOST, DISK = 64_000_000_000, 4_000_000_000


@pytest.fixture(scope="module")
def profile() -> punar.Profile:
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(4096, 4096), nn.GELU(), nn.Dropout(0.1))))
        return punar.profile(model, torch.empty(8192, 4096), lambda model, x: model(x).sum(), device="h100-80gb")


@pytest.mark.parametrize(
    ("offload", "speeds"),
    [("cpu", [HOST]), ("disk:/not/here", [DISK]), (["cpu:2 GiB", "disk:/not/here"], [HOST, DISK]), (["disk:/a", "cpu"], [DISK, HOST])],
)
def test_each_place_has_the_speed_described(profile: punar.Profile, offload: str | list[str], speeds: list[int]) -> None:
    names = ["cpu" if place.startswith("cpu") else place for place in ([offload] if isinstance(offload, str) else offload)]
    found = punar.frontier(profile, offload=offload, compress=())
    assert [(c.name, c.write_bytes_per_s, c.read_bytes_per_s) for c in found._channels] == [
        (n, s, s) for n, s in zip(names, speeds, strict=True)
    ]
    assert found.points[0].peak_bytes <= punar.frontier(profile, compress=()).points[0].peak_bytes


def test_a_frontier_shows_both_curves(profile: punar.Profile) -> None:
    found = punar.frontier(profile, offload="cpu", compress=())
    assert found.alone is not None
    assert found.alone.alone is None
    assert [(p.peak_bytes, p.time_ns) for p in found.alone.points] == [
        (p.peak_bytes, p.time_ns) for p in punar.frontier(profile, compress=()).points
    ]
    times = [(found.time_at(point.peak_bytes), point.time_ns) for point in found.alone.points]
    assert all(moved is not None and moved <= alone for moved, alone in times)
    assert any(moved < alone for moved, alone in times if moved is not None)
    header, *rows = str(found).splitlines()
    assert header.endswith("without offloading")
    assert [row.endswith("-") for row in rows] == [point.peak_bytes < found.alone.points[0].peak_bytes for point in found.points]


def test_moving_to_fast_memory_is_planned(profile: punar.Profile) -> None:
    moved, recomputed = (punar.solve(profile, budget="min", offload=offload) for offload in ("cpu:2 GiB", None))
    assert moved.moves
    assert moved.peak_bytes < recomputed.peak_bytes


def test_a_place_that_the_device_cannot_use_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    step = punar.profile(model, torch.empty(4, 8), lambda model, x: model(x).sum(), device="cpu")
    with pytest.raises(UsageError, match="asked to offload to cpu, found a step on cpu"):
        punar.solve(step, budget="min", offload="cpu")


def test_auto_is_a_share_of_the_memory_described(profile: punar.Profile) -> None:
    assert punar.solve(profile, budget="auto").budget_bytes == int(80e9 * 0.9)
    with pytest.raises(punar.BudgetError, match=r"above what h100-80gb has, 74\.5 GiB; give at most that"):
        punar.solve(profile, budget="80 GiB")
