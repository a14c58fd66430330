"""How good ``auto``'s plans are, in simulation: the time above the proved bound, the least peak, and what planning takes.

    python benchmarks/planner.py [--json] [--models gpt,gpt2,...] [--scale 0.25] [--depths 10,30,100,300,1000]

Each model of the peers' benchmark is profiled once and planned for at nine budgets, even from the least peak worth its time to the plain step's. A gap is the plan's
time less its bound, in parts of the plain step's time. Peaks are relative to the plain step's, both less what was there before: ``least`` of the plan of least peak
at about one extra forward pass, ``any`` of the one that takes whatever time, ``blocks`` of recomputing each block from its boundary (solver ``full``). Planning
takes processor seconds, from the profile to the whole frontier. A depth is a chain of equal transformer blocks, traced without data for an H100, its peaks in the
bytes that one block's input has, by the root of the depth; what its least plan runs again is told in forward passes, each operator with what calling it takes.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from statistics import median

import torch
from peers.models import MODELS, make_subject
from torch import Tensor, nn

import punar
from punar.ir import Trace
from punar.plan import simulate
from punar.plan.bound import bound
from punar.reporting.table import format_columns
from punar.solvers import frontier_points, least, least_peak, solve

BUDGETS = 9

ROWS, LENGTH, WIDTH = 8, 1024, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One model; see the module's text."""

    model: str
    operators: int
    planning_s: float
    least: float
    any: float
    blocks: float
    least_overhead: float
    median_gap: float
    worst_gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """One chain of equal blocks; see the module's text."""

    blocks: int
    planning_s: float
    least_by_root: float
    passes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--depths", default="10,30,100,300,1000")
    options = parser.parse_args()
    torch.set_num_threads(1)
    qualities = [quality_of(name, options.scale) for name in filter(None, options.models.split(","))]
    depths = [depth_of(int(blocks)) for blocks in filter(None, options.depths.split(","))]
    if options.json:
        print(json.dumps({"models": [asdict(row) for row in qualities], "depths": [asdict(row) for row in depths]}, indent=2))
        return
    print(
        format_columns(
            ("model", "operators", "planning, s", "least", "any", "blocks", "time at least", "median gap", "worst gap"),
            [row_of(row) for row in qualities],
        )
    )
    print(
        format_columns(("blocks", "planning, s", "least / root of blocks", "extra forward passes"), [depth_row_of(row) for row in depths])
    )


def quality_of(name: str, scale: float) -> Quality:
    subject = make_subject(name, scale)
    trace = punar.profile(subject.model, subject.batch, lambda model, batch: subject.loss_of(model(batch))).trace
    planning_s = planned(trace)
    plain, lowest = simulate(trace, (0,) * len(trace.values)).peak_bytes, least(trace)
    budgets = [lowest.peak_bytes + (plain - lowest.peak_bytes) * k // (BUDGETS - 1) for k in range(BUDGETS)]
    gaps = [(solve(trace, budget).time_ns - bound(trace, budget)) / trace.plain_time_ns for budget in budgets]

    def share(peak_bytes: int) -> float:
        return (peak_bytes - trace.resident_bytes) / (plain - trace.resident_bytes)

    return Quality(
        model=name,
        operators=len(trace.ops),
        planning_s=planning_s,
        least=share(lowest.peak_bytes),
        any=share(least_peak(trace)),
        blocks=share(least_of_blocks(trace)),
        least_overhead=lowest.overhead,
        median_gap=median(gaps),
        worst_gap=max(gaps),
    )


def planned(trace: Trace) -> float:
    """Processor seconds that the whole frontier takes."""
    start = time.process_time()
    frontier_points(trace)
    return time.process_time() - start


def least_of_blocks(trace: Trace) -> int:
    """What recomputing every block takes at least."""
    try:
        return solve(trace, 1, "full").peak_bytes
    except punar.InfeasibleBudget as error:
        return error.least_bytes


def depth_of(blocks: int) -> Depth:
    with torch.device("meta"):
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True, dtype=torch.bfloat16) for _ in range(blocks)
        ]
        model, batch = nn.Sequential(*layers), torch.empty(ROWS, LENGTH, WIDTH, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)  # there before, so that they are no part of what grows
    trace = punar.profile(model, batch, loss_of, device="h100-80gb").trace
    planning_s = planned(trace)
    lowest = least(trace)
    forward_ns = sum(op.time_ns + trace.overhead_ns for op in trace.forward_ops)
    return Depth(
        blocks=blocks,
        planning_s=planning_s,
        least_by_root=(lowest.peak_bytes - trace.resident_bytes) / batch.nbytes / blocks**0.5,
        passes=(lowest.time_ns - trace.plain_time_ns) / forward_ns,
    )


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.square().mean()


def row_of(row: Quality) -> tuple[str, ...]:
    shares = (f"{share:.3f}" for share in (row.least, row.any, row.blocks))
    return (
        row.model,
        str(row.operators),
        f"{row.planning_s:.1f}",
        *shares,
        *(f"{part:.2%}" for part in (row.least_overhead, row.median_gap, row.worst_gap)),
    )


def depth_row_of(row: Depth) -> tuple[str, ...]:
    return (str(row.blocks), f"{row.planning_s:.1f}", f"{row.least_by_root:.1f}", f"{row.passes:.2f}")


if __name__ == "__main__":
    main()
