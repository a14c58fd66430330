"""Do measured times outlive a run, and does a cache that cannot be used do no harm?"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import punar
from punar.arguments import check_offload
from punar.costs import CostCache, Ledger, remembered
from punar.costs.cache import write_waiting
from punar.plan.moves import Channel
from punar.torch import places
from tests.synthetic import chain

DEVICE = {"device_name": "abacus", "threads": "1"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PUNAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def measured(time: int, place: int = 0) -> Ledger:
    ledger = Ledger()
    ledger.add(chain([100, 200, 300]).ops[place], time)
    return ledger


def test_what_is_saved_is_loaded(folder: Path) -> None:
    CostCache(DEVICE).save(measured(7))
    assert CostCache(DEVICE).load().samples == measured(7).samples
    assert [path.suffix for path in folder.iterdir()] == [".json"]  # nothing half written is left


def test_another_device_or_version_has_another_file(folder: Path) -> None:
    CostCache(DEVICE).save(measured(7))
    assert CostCache({**DEVICE, "threads": "2"}).load().samples == {}


def test_what_another_process_wrote_is_kept(folder: Path) -> None:
    CostCache(DEVICE).save(measured(7, place=0))
    CostCache(DEVICE).save(measured(9, place=1))
    assert len(CostCache(DEVICE).load().samples) == 2


def test_what_is_to_be_written_soon_is_known_at_once_and_written_after_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    one, other = measured(7, place=0), measured(9, place=1)
    CostCache(DEVICE).save_soon(one)
    CostCache(DEVICE).save_soon(other)
    assert not folder.exists()
    assert len(CostCache(DEVICE).load().samples) == 2
    one.add(chain([100, 200, 300]).ops[0], 8)
    now_s += 61
    CostCache(DEVICE).save_soon(other)  # nothing is new of it
    assert not folder.exists()
    CostCache(DEVICE).save_soon(one)
    (path,) = folder.iterdir()
    assert sorted(json.loads(path.read_text())["samples"].values()) == [[7, 8], [9]]
    write_waiting()
    assert len(CostCache(DEVICE).load().samples) == 2


def test_what_waits_is_written_when_the_program_ends(folder: Path) -> None:
    program = """
from punar.costs import CostCache, Ledger
from tests.synthetic import chain
ledger = Ledger()
ledger.add(chain([100, 200, 300]).ops[0], 7)
CostCache({"device_name": "abacus", "threads": "1"}).save_soon(ledger)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
    assert CostCache(DEVICE).load().samples == measured(7).samples


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "punar-costs", "version": 9}', '{"format": "punar-costs", "version": 1, "samples": 3}']
)
def test_a_damaged_file_is_as_none_and_written_anew(folder: Path, text: str) -> None:
    cache = CostCache(DEVICE)
    folder.mkdir()
    assert cache.path is not None
    cache.path.write_text(text)
    assert cache.load().samples == {}
    cache.save(measured(7))
    assert cache.load().samples == measured(7).samples


def test_times_that_are_none_are_left_out(folder: Path) -> None:
    folder.mkdir()
    path = CostCache(DEVICE).path
    assert path is not None
    path.write_text('{"format": "punar-costs", "version": 1, "samples": {"a": [1, 2], "b": ["x"], "c": [-1], "d": [], "e": 3}}')
    assert {key: list(times) for key, times in CostCache(DEVICE).load().samples.items()} == {"a": [1, 2]}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PUNAR_CACHE", str(tmp_path / "file" / "cache"))
    CostCache(DEVICE).save(measured(7))
    assert CostCache(DEVICE).load().samples == {}


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUNAR_CACHE", "off")
    assert CostCache(DEVICE).path is None


def test_a_second_run_plans_with_the_first_ones_times(folder: Path) -> None:
    def train(steps: int) -> punar.Remat:
        model, remat = nn.Sequential(nn.Linear(16, 16), nn.GELU()), punar.Remat(budget="min")
        for _ in range(steps):
            model.zero_grad()
            with remat:
                model(torch.ones(4, 16)).sum().backward()
        return remat

    train(4)
    write_waiting()
    assert len(list(folder.iterdir())) == 1
    again = train(1)
    assert all(len(again._session.ledger.times_of(op)) == 3 for op in again.trace.ops if op.kind != "prelude")


def test_a_disk_is_measured_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = places.measure
    monkeypatch.setattr(places, "measure", lambda spool: calls.append(spool) or real(spool, blocks=1, block_bytes=1 << 16, repeats=1))

    def channels() -> tuple[Channel, ...]:
        offload = places.opened(check_offload(f"disk:{tmp_path}"), "cpu")
        assert offload is not None
        offload.close()
        return offload.channels

    assert channels() == channels()
    assert len(calls) == 1
    for path in folder.iterdir():
        path.write_text(path.read_text().replace("read_bytes_per_s", "damaged"))
    channels()
    assert len(calls) == 2


def test_figures_that_are_remembered(folder: Path) -> None:
    assert remembered(DEVICE, ["a"], lambda: {"a": 7, "none": 0}) == {"a": 7, "none": 0}
    assert remembered(DEVICE, ["a"], dict) == {"a": 7}
    assert remembered(DEVICE, ["b"], lambda: {"b": 1}) == {"b": 1}
