"""The exact solver for small steps: an integer programme that is corrected by the simulator until both agree.

NOTE. What is exact, and how.

1. The family: every value is either held from forward on, or dropped, made again once and held then until nothing needs it (``hold_from`` 0 or 1).
2. The programme (``stages.py``) says when each operator runs again and what is alive then. It never counts too much, so that its optimum
   is a lower bound for the family; where a storage has one version, it counts what the simulator counts.
3. The simulator judges each optimum. Where an operator that runs again lacks room, that moment's row is added; where the two differ for
   another reason, the choice is excluded; the programme is solved again.
4. The best judged plan is optimal once the programme's optimum is no less than its time. ``auto``'s plan, which may be outside the family, is
   judged with the others: so the plan is never slower than ``auto``'s, and where it is proved, neither than any of the family.
5. ``bound_ns`` is the lower bound for the family and ``auto``'s plan, the plan's own time where it is proved. Plans that make a value
   again more often may be faster still: for those see ``auto``'s bound.

Measured on one core of 2023 that was shared, HiGHS 1.16, at budgets of 1, 3 and 5 eighths of the way from ``auto``'s least peak to the plain one, each proved
in the first round: 71 to 98 values in 1 to 9 s (chains, synthetic and traced transformers, LSTM cells); a residual network of 92 values in 3 to 35 s; 203 values of
a synthetic transformer in 24 to 43 s. A traced transformer with dropout inside its attention: 113 values in 2 and 12 s at 5 and 3 eighths, 151 in 7 s at 5; not
in 60 s at less. At ``auto``'s least peak itself: 43, 59 and 92 values in 1 to 5 s, 93 and 161 of transformers not in 60 s. A row that
cuts off what is slower than ``auto``'s plan made no difference.

Source: the formulation follows Jain et al. 2020, Checkmate, arXiv:1910.02653, section 4, with one integer a value instead of one a value and
stage; the loop is logic-based Benders decomposition, Hooker, Ottosson 2003, doi:10.1007/s10107-003-0375-9.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from time import monotonic
from typing import ClassVar, TypeAlias

from punar.errors import InfeasibleBudget, UsageError
from punar.ir import EventKind, Trace
from punar.plan import Plan, make_plan
from punar.plan.simulate import simulate
from punar.solvers.auto import frontier_of
from punar.solvers.base import infeasible
from punar.solvers.stages import Choice, Stages

Judged: TypeAlias = tuple[int, Sequence[int]]
"""A plan as (time in ns, ``hold_from``)."""

HALF_NS = 0.5
"""Times are whole nanoseconds: a bound this near to a plan's time proves it."""


@dataclass(frozen=True, slots=True)
class Milp:
    """Finds the fastest plan of the family (see the NOTE), for steps of up to ``values`` droppable values, in ``seconds`` at most.

    After that time it returns the best plan judged so far, with what is proved until then.
    """

    values: int = 300
    seconds: float = 60.0
    name: ClassVar[str] = "milp"
    source: ClassVar[str] = "Jain et al. 2020, Checkmate, arXiv:1910.02653; Hooker, Ottosson 2003, doi:10.1007/s10107-003-0375-9"

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"solver 'milp' was asked to take {self.seconds} seconds; give it some, as in 'milp{{seconds=60}}'")

    def solve(self, trace: Trace, budget_bytes: int) -> Plan:
        deadline = monotonic() + self.seconds
        search = self.search(trace, budget_bytes, best=_fitting(trace, budget_bytes))
        search.run(deadline)
        if search.best is None:
            raise self.found_none(trace, budget_bytes, is_proved=search.is_proved)
        plan = make_plan(trace, search.best[1], solver=self.name, budget_bytes=budget_bytes)
        return replace(plan, bound_ns=plan.time_ns if search.is_proved else search.rounded_bound())

    def search(self, trace: Trace, budget_bytes: int, *, best: Judged | None) -> Search:
        """The search for a plan that is faster than ``best``."""
        stages = Stages(trace)
        if len(stages.free) > self.values:
            raise UsageError(
                f"solver 'milp' was asked for a step with {len(stages.free)} values that could be dropped; it is meant for at most {self.values}, "
                f"since its programme grows with their square; use 'auto', or 'milp{{values={len(stages.free)}}}' to wait"
            )
        return Search(Choice(stages, budget_bytes, self.name), best)

    def found_none(self, trace: Trace, budget_bytes: int, *, is_proved: bool) -> InfeasibleBudget:
        least = frontier_of(trace).points[0]
        plan = make_plan(trace, least.hold_from, solver=self.name, budget_bytes=budget_bytes)
        if is_proved:
            return infeasible(trace, plan, hint="plans that drop a value or hold it reach no less than was asked for")
        return infeasible(
            trace, plan, hint=f"or give the search more time than {self.seconds:g} s, as in 'milp{{seconds={4 * self.seconds:g}}}'"
        )


def _fitting(trace: Trace, budget_bytes: int) -> Judged | None:
    """``auto``'s plan as (time, ``hold_from``), where it has one."""
    fitting = [point for point in frontier_of(trace).points if point.peak_bytes <= budget_bytes]
    return (fitting[-1].time_ns, fitting[-1].hold_from) if fitting else None


class Search:
    """The loop of Rules 3 and 4. ``bound_ns``: no plan of the family takes less."""

    def __init__(self, choice: Choice, best: Judged | None) -> None:
        self.choice, self.trace, self.best = choice, choice.trace, best
        self.bound_ns: float = self.trace.plain_time_ns
        self.stage_at = _stage_places(choice.stages)

    @property
    def is_proved(self) -> bool:
        return self.bound_ns + HALF_NS >= (self.best[0] if self.best else float("inf"))

    def rounded_bound(self) -> int:
        """The bound in whole nanoseconds, less what floating point may have added."""
        return max(int(self.bound_ns * (1 - 1e-9)), self.trace.plain_time_ns)

    def run(self, deadline: float) -> None:
        while not self.is_proved and monotonic() < deadline:
            outcome = self.choice.programme.run(seconds=deadline - monotonic())
            self.bound_ns = max(self.bound_ns, outcome.bound_ns + self.trace.plain_time_ns)
            if outcome.values:
                self.judge(self.choice.dropped(outcome.values))
        if self.best is not None:
            self.bound_ns = min(self.bound_ns, self.best[0])

    def judge(self, dropped: AbstractSet[int]) -> None:
        """Simulates the plan that drops these values, and tells the programme what it did not know."""
        hold = [int(v in dropped) for v in range(len(self.trace.values))]
        replays: dict[int, list[int]] = {}

        def note(place: int, bytes: int, is_replay: bool) -> None:
            if is_replay:
                replays.setdefault(self.stage_at.get(place, 0), []).append(bytes)

        seen = simulate(self.trace, hold, on_run=note)
        if seen.peak_bytes <= self.choice.budget and (self.best is None or seen.time_ns < self.best[0]):
            self.best = (seen.time_ns, hold)
        if not self.is_proved and not self.tie_replays(dropped, replays):
            self.choice.exclude(dropped)

    def tie_replays(self, dropped: AbstractSet[int], replays: dict[int, list[int]]) -> bool:
        """Adds the rows of operators that ran again without having the room; says whether any is new."""
        is_new = False
        for stage, ops in self.choice.returns(dropped).items():
            high = replays.get(stage, [])
            if len(high) == len(ops):
                for op, bytes in zip(ops, high, strict=True):
                    is_new |= bytes > self.choice.budget and self.choice.tie_replay(op, stage)
        return is_new


def _stage_places(stages: Stages) -> dict[int, int]:
    """For the place of each first demand the stage that it begins."""
    left = dict(stages.asked)
    found = {}
    for place, (kind, id) in enumerate(stages.trace.events):
        value = stages.trace.saves[id].value if kind == EventKind.DEMAND else -1
        if value in left:
            found[place] = left.pop(value)
    return found
