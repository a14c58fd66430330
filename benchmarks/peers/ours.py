"""punar's runs: within each peer's measured peak, and within each peer's measured time.

NOTE. How the two conventions of counting meet. A plan's budget is of the whole step; a peer's peak is what its step allocates above what was there.
The trace says what is there (``resident_bytes``), so that a peer's peak and that are punar's budget, less what punar's planning keeps
between steps, which is charged to each of its runs. The measured peak must then be no more than the peer's: where it is, the budget is lowered by the
difference and the plan made again.
"""

from __future__ import annotations

import time
from statistics import median

import punar
from peers.measure import Bench, Ratio, Run
from punar.ir import Trace
from punar.solvers.auto import frontier_of

RECORDED_STEPS = 6
"""One is recorded, then each operator is timed in a few more; the last begins with the new times."""

TRIES = 4
"""How often a budget is lowered where the measured peak is above the peer's."""

SAME = 0.01
"""Plans for a time whose predicted peaks differ by less than this part of the activation peak are taken to be one."""

ROTOR_SHARES = (0.7, 0.5, 0.35)
"""Of the plain step's activation peak: the budgets of ``rotor``."""

MARGIN = 0.02
"""Of the plain step's time, by which a second plan is predicted to be faster than a peer's time."""


class Planner:
    """Records the model's step once, and adds runs under plans to the bench; equal plans are one run."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        before = bench.witness.live_bytes()
        self.profile = punar.Profile(trace=record(bench))
        start = time.perf_counter()
        self.frontier = frontier_of(self.profile.trace).points
        self.planning_s = time.perf_counter() - start
        self.planner_bytes = max(bench.witness.live_bytes() - before, 0)
        self.runs: dict[tuple[int, ...], Run] = {}

    @property
    def resident_bytes(self) -> int:
        return self.profile.trace.resident_bytes

    def run(self, plan: punar.Plan) -> Run:
        """The run under a plan, measured now where none has been."""
        found = self.runs.get(plan.hold_from)
        if found is None:
            name = f"punar {len(self.runs) + 1}" if plan.solver == "auto" else f"{plan.solver} {len(self.runs) + 1}"
            found = self.runs[plan.hold_from] = self.bench.add(Run(name=name, plan=plan, held_bytes=self.planner_bytes))
        return found

    def within_peak(self, peak_bytes: int) -> Run | None:
        """The fastest plan whose *measured* peak is at most this; None where punar knows none."""
        room = peak_bytes - self.planner_bytes
        for _ in range(TRIES):
            try:
                plan = punar.solve(self.profile, budget=self.resident_bytes + max(room, 1))
            except punar.InfeasibleBudget:
                return None
            run = self.run(plan)
            if run.peak_bytes <= peak_bytes:
                return run
            room = plan.peak_bytes - self.resident_bytes - (run.peak_bytes - peak_bytes)
        return None

    def rotor(self) -> list[Run]:
        """The runs of punar's own ``rotor``, at some shares of the activation peak that it can reach."""
        found = []
        for share in ROTOR_SHARES:
            try:
                plan = punar.solve(self.profile, budget=share, solver="rotor")
            except punar.InfeasibleBudget:
                continue
            if plan.hold_from not in self.runs and plan.replayed_ops:
                found.append(self.run(plan))
        return found

    def add_within_times(self, time_ratios: list[float]) -> None:
        """Adds the tightest plans that should take at most these times, and ones a little faster in case they take more.

        What the runs measured so far took beyond their prediction is taken to hold for the others.
        """
        correction = median(self.unpredicted(run) for run in self.own_runs())
        for time_ratio in time_ratios:
            for margin in (0.0, MARGIN):
                budget = self.tightest(time_ratio - correction - margin)
                if budget is not None and not self.has_near(budget):
                    self.run(punar.solve(self.profile, budget=budget))

    def own_runs(self) -> list[Run]:
        """The runs of the default solver."""
        return [run for run in self.runs.values() if run.plan is not None and run.plan.solver == "auto"]

    def unpredicted(self, run: Run) -> float:
        """The measured time above the predicted, in plain steps: watching operators is part of it."""
        assert run.plan is not None
        return Ratio.of(run.cpu_s, self.bench.plain.cpu_s).median - run.plan.time_ns / run.plan.plain_time_ns

    def tightest(self, time_ratio: float) -> int | None:
        """The least peak at which the frontier is predicted to take at most this; None where nothing is so fast."""
        plain_ns = self.profile.trace.plain_time_ns
        return next((point.peak_bytes for point in self.frontier if point.time_ns / plain_ns <= time_ratio), None)

    def has_near(self, peak_bytes: int) -> bool:
        """Whether a plan of nearly this peak is measured already."""
        peaks = [run.plan.peak_bytes for run in self.own_runs() if run.plan is not None]
        return any(abs(peak - peak_bytes) <= SAME * self.bench.plain.peak_bytes for peak in peaks)


def record(bench: Bench) -> Trace:
    """The step as punar sees it while it obeys a plan that keeps everything: recorded once, its operators timed warm."""
    remat = punar.Remat()
    for _ in range(RECORDED_STEPS):
        bench.zero_gradients()
        with remat:
            bench.subject.step()
    assert remat.trace is not None
    return remat.trace
