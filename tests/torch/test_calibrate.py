"""Does measuring this machine's processor give a description that profiles take?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import punar
from punar.costs import find_device
from punar.costs.devices import FIGURES, read_device
from punar.errors import OffloadError, UsageError
from punar.torch import calibrate
from tests.torch.models import WIDTH, make_blocks


def test_the_processor_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_LONG_ENOUGH_NS", 1_000_000)
    found = calibrate.calibrated(torch.device("cpu"), str(tmp_path), "mine")
    assert read_device(found.to_json()) == found
    assert (found.name, found.kind) == ("mine", "cpu")
    assert found.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert set(found.sources) == set(FIGURES)
    assert found.host_bytes_per_second == found.memory_bytes_per_second > 10**8
    assert list(tmp_path.iterdir()) == []

    path = tmp_path / "mine.json"
    path.write_text(found.to_json(), encoding="utf-8")
    trace = punar.profile(make_blocks(2), torch.randn(8, WIDTH), lambda model, x: model(x).sum(), device=path).trace
    assert trace.meta["described_device"] == "mine"
    assert all(op.time_ns >= found.launch_ns for op in trace.ops if op.kind not in ("view", "prelude"))
    assert find_device(path) == found


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is here")
def test_a_device_that_is_not_here_is_not_measured(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="asked to measure cuda:1, which is not here"):
        calibrate.calibrated(torch.device("cuda:1"), str(tmp_path))


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="nowhere"):
        calibrate.calibrated(torch.device("cpu"), str(tmp_path / "nowhere"))
