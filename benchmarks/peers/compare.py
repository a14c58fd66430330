"""One model: measures peers and punar, and sets punar beside each peer's point."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from peers.known import KNOWN
from peers.measure import Bench, Ratio, Run
from peers.memory import find_witness
from peers.models import make_subject
from peers.ours import Planner
from peers.patches import patches_of

PILOT_ROUNDS = 2
"""The first of the rounds, after which punar's plans for the peers' times are chosen: these have so many fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A point that punar is compared with, measured. ``run`` is None where another process measured it."""

    name: str
    family: str
    peak_bytes: int
    run: Run | None = None
    time: Ratio | None = None

    def time_ratio(self, plain: Run) -> Ratio:
        if self.run is not None:
            return Ratio.of(self.run.cpu_s, plain.cpu_s)
        assert self.time is not None
        return self.time

    def against(self, run: Run, plain: Run) -> Ratio:
        """The time of a run relative to this peer's: round by round where both took turns, else the ratio of the medians."""
        if self.run is not None:
            return Ratio.of(run.cpu_s, self.run.cpu_s)
        ours, theirs = Ratio.of(run.cpu_s, plain.cpu_s), self.time_ratio(plain)
        return Ratio(median=ours.median / theirs.median, low=ours.low / theirs.high, high=ours.high / theirs.low)


def compare(name: str, scale: float, rounds: int, until: float, only: str, compiled: dict[str, Any] | None) -> dict[str, Any]:
    """Measures one model.

    Args:
        until: the process's time (``perf_counter``) after which no further round begins.
        only: restricts the peers to those whose names begin so.
        compiled: what ``measure_compiled`` found for this model.
    """
    start, cpu = time.perf_counter(), time.process_time()
    bench = Bench(make_subject(name, scale), find_witness())
    for peer, patch in patches_of(bench.subject).items():
        if is_chosen(peer, only):
            tell(bench.add(Run(name=peer, patch=patch)), bench.plain)
    planner = Planner(bench)
    peers = [Peer(name=run.name, family="eager", peak_bytes=run.peak_bytes, run=run) for run in bench.runs[1:] if not run.error]
    if is_chosen("rotor", only):
        peers += [Peer(name=f"own {run.name}", family="rotor", peak_bytes=run.peak_bytes, run=run) for run in planner.rotor()]
    peers += compiled_peers(compiled, bench.plain)
    at_memory = {peer.name: planner.within_peak(peer.peak_bytes) for peer in peers}
    print(f"  {len(bench.runs)} runs; {PILOT_ROUNDS} rounds, then punar's plans for the peers' times", file=sys.stderr, flush=True)
    bench.take_turns(min(PILOT_ROUNDS, rounds))
    planner.add_within_times([peer.time_ratio(bench.plain).median for peer in peers])
    print(f"  {len(bench.runs)} runs for the other rounds; {time.perf_counter() - start:.0f} s so far", file=sys.stderr, flush=True)
    bench.take_turns(max(rounds - PILOT_ROUNDS, 1), until)
    return {
        "model": name,
        "scale": scale,
        "rounds": rounds,
        "only": only,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "memory_by": bench.witness.name,
        "plain_peak_bytes": bench.plain.peak_bytes,
        "planning_s": planner.planning_s,
        "planner_bytes": planner.planner_bytes,
        "took_s": time.perf_counter() - start,
        "took_cpu_s": time.process_time() - cpu,
        "runs": [run.as_data(bench.plain) for run in bench.runs],
        "predicted_frontier": predicted_frontier(planner),
        "points": [point(peer, at_memory[peer.name], planner.own_runs(), bench.plain) for peer in peers],
        "known": {planner_name: list(map(list, points)) for planner_name, points in KNOWN.get(name, {}).items()},
    }


def is_chosen(peer: str, only: str) -> bool:
    """Whether a peer's name begins with one of the names in ``only``, which are separated by commas; each does where there are none."""
    return not only or peer.startswith(tuple(only.split(",")))


def tell(run: Run, plain: Run) -> None:
    """Says how a run's first steps went."""
    found = run.error or f"{run.peak_bytes / plain.peak_bytes:.3f} of the plain peak"
    print(f"  {run.name}: {found}", file=sys.stderr, flush=True)


def compiled_peers(compiled: dict[str, Any] | None, plain: Run) -> list[Peer]:
    """The compiler's points, both of whose ratios are to plain ``torch.compile``: the same ratios to the plain step are asked of punar."""
    points = [point for point in (compiled or {}).get("points", ()) if "error" not in point]
    return [
        Peer(
            name=point["name"],
            family="compile",
            peak_bytes=int(point["memory_ratio"] * plain.peak_bytes),
            time=Ratio(**point["time_ratio"]),
        )
        for point in points
    ]


def predicted_frontier(planner: Planner) -> list[list[float]]:
    """Memory and time relative to plain, as planned: time without what watching the operators costs."""
    plain_ns, resident, plain = planner.profile.trace.plain_time_ns, planner.resident_bytes, planner.bench.plain.peak_bytes
    return [[(point.peak_bytes - resident) / plain, point.time_ns / plain_ns] for point in planner.frontier]


def point(peer: Peer, at_memory: Run | None, own: list[Run], plain: Run) -> dict[str, Any]:
    """punar beside one peer: at its memory, and at its time."""
    return {
        "peer": peer.name,
        "family": peer.family,
        "memory_ratio": peer.peak_bytes / plain.peak_bytes,
        "time_ratio": asdict(peer.time_ratio(plain)),
        "at_its_memory": beside(peer, at_memory, plain),
        "at_its_time": beside(peer, smallest_as_fast(peer, own, plain), plain),
        "plain_memory_to_peer": plain.peak_bytes / peer.peak_bytes,
    }


def smallest_as_fast(peer: Peer, own: list[Run], plain: Run) -> Run | None:
    """Of punar's runs whose measured time is at most the peer's, the one of least measured peak."""
    fitting = [run for run in own if peer.against(run, plain).median <= 1]
    return min(fitting, key=lambda run: run.peak_bytes, default=None)


def beside(peer: Peer, run: Run | None, plain: Run) -> dict[str, Any] | None:
    """A run of punar's relative to a peer; None where punar has none to offer."""
    if run is None:
        return None
    return {
        "run": run.name,
        "memory_ratio": run.peak_bytes / plain.peak_bytes,
        "memory_to_peer": run.peak_bytes / peer.peak_bytes,
        "time_ratio": asdict(Ratio.of(run.cpu_s, plain.cpu_s)),
        "time_to_peer": asdict(peer.against(run, plain)),
    }
