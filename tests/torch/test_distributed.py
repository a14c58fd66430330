"""Two gloo processes under DDP and FSDP2: the same weights as without punar, bit for bit?"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import punar
from tests.torch.models import make_blocks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")


def wrap(kind: str, model: nn.Sequential) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    return fully_shard(model)


def train(kind: str, remat: punar.Remat | None, rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = wrap(kind, make_blocks())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    torch.manual_seed(rank)
    x = torch.randn(64, 32)
    for _ in range(4):
        if remat is None:
            model(x).square().mean().backward()
        else:
            with remat:
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]


def work(rank: int, kind: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        plain = train(kind, None, rank)
        remat = punar.Remat(budget="min")
        checked = train(kind, remat, rank)
        assert all(torch.equal(a, b) for a, b in zip(plain, checked, strict=True))
        assert remat.stats[-1].replayed_operators > 0
        assert remat.stats[-1].measured_peak_bytes < remat.stats[0].measured_peak_bytes + 4 * sum(t.nbytes for t in plain)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes(kind: str, tmp_path) -> None:
    mp.spawn(work, args=(kind, str(tmp_path / "store")), nprocs=2)
