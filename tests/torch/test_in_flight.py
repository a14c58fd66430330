"""Does a stage of a pipeline hold what is between forward and backward for each of its micro-batches?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import punar
from punar.errors import UsageError
from punar.plan import simulate
from tests.torch.models import WIDTH, make_blocks

ROWS = 64


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def plain(profile: punar.Profile) -> punar.Plan:
    return punar.solve(profile, budget=None)


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_a_stage_is_as_the_one_that_runs(in_flight: int) -> None:
    model, batch = make_blocks(4), torch.randn(ROWS, WIDTH)
    found = punar.profile(model, batch, loss_fn, device="cpu", in_flight=in_flight)
    loss_fn(model, batch).backward()  # so that gradients are there
    remat = punar.Remat()
    for _ in range(2):
        with remat:
            losses = [loss_fn(model, batch) for _ in range(in_flight)]
            for loss in losses:
                loss.backward()
        del loss, losses
    assert remat.trace is not None
    real = simulate(remat.trace, (0,) * len(remat.trace.values))
    losses_bytes = 4 * in_flight  # a trace counts what the step leaves as there from its beginning
    assert plain(found).peak_bytes == real.peak_bytes == (remat.stats[-1].measured_peak_bytes or 0) + losses_bytes
    assert plain(found).kept_bytes == real.kept_bytes


def test_what_is_kept_grows_by_the_number_in_flight() -> None:
    profiles = [
        punar.profile(make_blocks(4), torch.randn(ROWS, WIDTH), loss_fn, device="cpu", in_flight=in_flight) for in_flight in (None, 1, 3)
    ]
    alone, one, three = map(plain, profiles)
    gradients = sum(parameter.nbytes for parameter in make_blocks(4).parameters())
    assert one.resident_bytes - alone.resident_bytes == gradients
    assert alone.kept_bytes == one.kept_bytes
    assert three.kept_bytes == 3 * one.kept_bytes


def test_wrong_use() -> None:
    model, batch = make_blocks(1), torch.randn(ROWS, WIDTH)
    with pytest.raises(UsageError, match="asked for a stage with 0 micro-batches in flight"):
        punar.profile(model, batch, loss_fn, device="cpu", in_flight=0)
    with pytest.raises(UsageError, match="give zero_stage=1, as pipelines are trained"):
        punar.profile(model, batch, loss_fn, device="cpu", in_flight=2, shards=2)
    with pytest.raises(UsageError, match="`in_flight`, which are for steps that do not"):
        punar.profile(model, batch, loss_fn, in_flight=2)
    assert plain(punar.profile(model, batch, loss_fn, device="cpu", in_flight=2, shards=2, zero_stage=1)).kept_bytes
