"""A plan in the form in which a forward pass obeys it: a row for each operator, and what was learned of the passes that did."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from punar.costs import Ledger
from punar.ir import Op, Trace
from punar.plan import Plan
from punar.plan.nearby import NEARBY
from punar.plan.plan import MoveRow
from punar.torch.drift import Trial, Watch
from punar.torch.operators import operator_info

_TIMED_FIRST = 3
"""So many passes time every operator anew, since a traced step runs cold and beside a profiler; later ones do twice as far apart each time."""

_REMEMBERED = 9
"""Timed passes that are remembered."""

LEFT_ALONE, _QUIET = 15, 3
"""After so many quiet passes of a script (see ``Script``) the backward passes of so many run unwatched, before one is watched again."""

_SETTLED, _RESTS = 4, 16
"""What passes with an unwatched backward take is believed after so many; so many are remembered."""

_FEWEST_REPLAYED = 10
"""A step that replays fewer operators tells nothing about what replaying one costs."""


OUTDATED = -1
"""Stands for the extra bytes of a script whose plan must be made anew before it is followed again."""


class Row:
    """One operator of the script. ``holds``: for each value it makes (hold_from, rank, bytes). ``is_simple``: it is only run and metered.

    ``moves``: with their numbers, of values it makes; ``lands``: numbers of those whose copies must be done before it runs.
    """

    __slots__ = (
        *("func", "has_grad_mode", "holds", "info", "is_recorded", "is_simple", "lands", "makes", "moves", "name", "peak_bytes", "time_ns"),
    )

    def __init__(self, name: str, has_grad_mode: bool, is_recorded: bool, holds: tuple[tuple[int, int, int], ...], peak_bytes: int) -> None:
        self.name = name
        self.func = _resolve(name)
        self.info = operator_info(self.func) if self.func is not None else None
        self.makes = self.info is not None and self.info.makes
        self.has_grad_mode = has_grad_mode
        self.is_recorded = is_recorded
        self.is_simple = not is_recorded and self.info is not None and not self.info.can_write
        self.holds = holds
        self.moves: list[tuple[int, MoveRow]] = []
        self.lands: list[int] = []
        self.peak_bytes = peak_bytes
        self.time_ns = -1

    def is_of(self, func: Any, *, has_grad: bool) -> bool:
        """Whether this is the row of such a call; where grad mode is another one it is not: evaluation inside a step may run the same operators."""
        return has_grad == self.has_grad_mode and (self.func is func or (self.func is None and self.name == str(func)))

    def timed(self, now_ns: Callable[[], int], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the operator and writes down how long it took."""
        start = now_ns()
        out = func(*args, **kwargs)
        self.time_ns = now_ns() - start
        return out


def _resolve(name: str) -> Any:
    """The operator of this name, ``None`` where it is not to be found."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if isinstance(found, torch._ops.OpOverload) else None  # a name that is none finds a namespace


END = Row("", True, False, (), 0)


class Script:
    """A plan in the form in which it is followed, operator by operator.

    ``trace``: what it was made from, to make it anew where the resident bytes change, ``retimed``: with the times that were learned since, by which it
    is judged; ``extra_bytes``: resident beyond those of the trace;
    ``drift_bytes``: what the steps that followed it needed beyond what was predicted, at most; ``measured_peak_bytes``: of the last of them whose
    peak was another one than before. ``is_retraced``: it was recorded a second time since sizes were others, so that they may be others each time.
    ``passes``: how often it was followed without a mismatch; ``passages``: how often a step that left it for another exceeded its budget.
    ``quiet``: in how many passes in a row, watched to their end, all sizes were as traced and backward wrote into nothing that a replay may read.
    ``timed_ns``: what timed passes took beside their replays, ``replays_ns``: what their replays took; ``rests_ns``: what passes whose backward ran
    unwatched took beside their replays. ``own_times``: of operators in passes where sizes were others than traced, which say what such a step takes
    but not what the traced operators do; None where there were none. ``is_nearby``: its first plan was made for other sizes, and those for its own
    are made beside training; ``is_own_due``: the first of them is yet to be asked for. ``watch``, ``trial``: see ``drift``.
    """

    def __init__(self, plan: Plan, *, trace: Trace | None = None, extra_bytes: int = 0, is_retraced: bool = False) -> None:
        self.plan = plan
        self.trace = self.retimed = trace
        self.extra_bytes = extra_bytes
        self.drift_bytes = 0
        self.is_retraced = is_retraced
        self.passes = self.passages = self.quiet = 0
        self.measured_peak_bytes = plan.peak_bytes
        self.timed_ns: deque[int] = deque(maxlen=_REMEMBERED)
        self.replays_ns: deque[int] = deque(maxlen=_REMEMBERED)
        self.rests_ns: deque[int] = deque(maxlen=_RESTS)
        self.own_times: Ledger | None = None
        self.watch = Watch()
        self.trial: Trial | None = None
        bones = plan.skeleton
        columns = (bones.names, bones.has_grad_mode, bones.is_recorded, bones.holds, bones.peak_bytes)
        self.rows = [Row(*row) for row in zip(*columns, strict=True)]
        self.rows.append(END)
        self.backward_rows = [Row(name, True, False, (), peak_bytes) for name, peak_bytes in bones.backward]
        for number, move in enumerate(bones.moves):
            maker, land = self.rows[move.maker], self.rows[move.land]
            maker.moves.append((number, move))
            land.lands.append(number)
            maker.is_simple = land.is_simple = False
        self.is_plain = plan.drops_nothing
        self.is_nearby = self.is_own_due = plan.solver == NEARBY

    @property
    def names(self) -> tuple[str, ...]:
        """The forward operators, by name."""
        return self.plan.skeleton.names

    def goes_on(self, other: Script, place: int, func: Any) -> bool:
        """Whether this script is the same as another up to a place, and has this operator there, with gradients."""
        row = self.rows[min(place, len(self.rows) - 1)]
        return row.is_of(func, has_grad=True) and self.names[:place] == other.names[:place]

    def replanned(self, plan: Plan, extra_bytes: int) -> Script:
        """Another plan for the same trace, beside so many more resident bytes."""
        script = Script(plan, trace=self.trace, extra_bytes=extra_bytes, is_retraced=self.is_retraced)
        script.retimed, script.is_nearby = self.retimed, self.is_nearby
        script.passes, script.passages, script.drift_bytes, script.own_times = self.passes, self.passages, self.drift_bytes, self.own_times
        if (plan.hold_from, plan.moves) == (self.plan.hold_from, self.plan.moves):
            script.quiet, script.timed_ns, script.replays_ns, script.rests_ns = self.quiet, self.timed_ns, self.replays_ns, self.rests_ns
            script.watch = self.watch
        return script

    @property
    def is_timed(self) -> bool:
        """Whether the next pass is to be timed: the first few under each plan are, and later ones at each doubling of their number."""
        passes = self.passes + 1
        return self.trace is not None and (len(self.timed_ns) < _TIMED_FIRST or passes & (passes - 1) == 0)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has happened for a while that is seen only by watching backward."""
        return self.quiet >= _QUIET

    @property
    def has_settled(self) -> bool:
        """Whether what it takes is predicted from passes whose backward ran unwatched."""
        return len(self.rests_ns) >= _SETTLED

    @property
    def may_rest(self) -> bool:
        """Whether the next pass's backward need not be watched."""
        return self.is_quiet and not self.is_plain and not self.is_timed and self.passes % (LEFT_ALONE + 1) != 0

    def measure_anew(self) -> None:
        """Its plan does not say what passes do: the next ones are timed, and what was learned before does not count."""
        self.timed_ns.clear()
        self.replays_ns.clear()
        self.rests_ns.clear()

    def learn_rest(self, time_ns: int) -> bool:
        """A pass is over whose backward ran unwatched, with its time less its replays'; says whether to judge the plan by these now."""
        self.rests_ns.append(time_ns)
        count = len(self.rests_ns)
        return _SETTLED <= count < _RESTS and count & (count - 1) == 0

    def learn(self, wall_ns: int, replay_ns: int, ledger: Ledger, *, is_resized: bool) -> None:
        """A timed pass is over, which took ``wall_ns``, and its replays ``replay_ns`` of that; its operators' times go into the ledger."""
        self.timed_ns.append(wall_ns - replay_ns)
        self.replays_ns.append(replay_ns)
        if is_resized:
            ledger = self.own_times = self.own_times or Ledger()
        for op, time_ns in self.times():
            ledger.add(op, time_ns)

    def retimed_trace(self, ledger: Ledger) -> Trace:
        """The trace with estimated times; what replays and the rest of the step cost besides operators is learned from the timed passes."""
        assert self.trace is not None
        trace = replace(self.trace, ops=(self.own_times or ledger).timed(self.trace).ops, overhead_ns=0)
        passes_ns = self.rests_ns if self.has_settled else self.timed_ns
        # Also what estimates leave out that are medians: times have a long tail.
        seen = self.plan.judged(trace)
        gap_ns = max(0, int(median(passes_ns)) - trace.plain_time_ns - seen.busy_ns)
        trace = replace(trace, meta={**trace.meta, "gap_ns": str(gap_ns)})
        if seen.replayed_ops < _FEWEST_REPLAYED:
            return replace(trace, overhead_ns=self.trace.overhead_ns)
        kernels_ns = seen.time_ns - seen.stall_ns - seen.busy_ns - seen.coding_ns - trace.plain_time_ns
        overhead_ns = (int(median(self.replays_ns)) - kernels_ns) // seen.replayed_ops
        return replace(trace, overhead_ns=max(0, overhead_ns))

    def times(self) -> list[tuple[Op, int]]:
        """Each operator of the trace with its time in the last timed pass."""
        assert self.trace is not None
        forward = zip(self.trace.forward_ops, self.rows, strict=False)  # all scripts share the last row, which is no operator's
        backward = zip((op for op in self.trace.ops if op.is_backward), self.backward_rows, strict=True)
        return [(op, row.time_ns) for op, row in (*forward, *backward) if row.time_ns >= 0]
