"""The times of operators as they were measured, by signature, and the estimate that is made of them.

NOTE. The estimate of an operator's time.

1. Operators with equal signatures cost the same: the median of their last measured times is what was seen.
2. One seen seldom is drawn to what the model (``model.py``) says of it, by the precision of either: the variance of a median of n times is
   taken as the usual one of times of one signature, divided by n; that of the model as its usual error for this kind.
3. One never seen counts as seen once, for the time that its trace has; where that is none, it is as the model says.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import exp, log
from statistics import median

from punar.costs.model import CostModel, Measured, fit
from punar.costs.work import work_of
from punar.ir import Op, Trace

REMEMBERED = 27
"""Times that are remembered of a signature."""

_LEAST_NOISE, _USUAL_NOISE = 0.01, 0.2
"""The least that times are taken to vary, and how much they are until enough of them are known; in logarithms."""


_MOST_ASKED = 1024
"""Of so many signatures the noise is the usual one."""


class Ledger:
    """Collects times; ``timed`` puts estimates into a trace."""

    def __init__(self, samples: Mapping[str, Iterable[int]] | None = None) -> None:
        self.samples: dict[str, deque[int]] = {}
        self._fresh: set[str] = set()
        for key, times in (samples or {}).items():
            self.samples[key] = deque(times, maxlen=REMEMBERED)

    def add(self, op: Op, time_ns: int) -> None:
        """Notes one measured call."""
        key = key_of(op)
        self.samples.setdefault(key, deque(maxlen=REMEMBERED)).append(max(time_ns, 1))
        self._fresh.add(key)

    def take_fresh(self) -> dict[str, list[int]]:
        """The samples of what was measured since this was called last."""
        fresh, self._fresh = self._fresh, set()
        return {key: list(self.samples[key]) for key in fresh}

    def keep_last(self, trace: Trace, passes: int) -> None:
        """Forgets all but the times of the last passes of a step: what its operators took before is no more what they take."""
        for key, calls in Counter(key_of(op) for op in trace.ops).items():
            if key in self.samples:
                self.samples[key] = deque(list(self.samples[key])[-passes * calls :], maxlen=REMEMBERED)

    def times_of(self, op: Op) -> Sequence[int]:
        """What is known of an operator's time, the last times last (Rule 3)."""
        known = self.samples.get(key_of(op))
        if known:
            return known
        return (op.time_ns,) if op.time_ns > 0 else ()

    def noise(self) -> float:
        """The usual distance of the logarithm of one measured time from the median of its signature, by the signatures that came last."""
        groups = [times for times in islice(reversed(self.samples.values()), _MOST_ASKED) if len(times) > 2]
        distances = [abs(log(time / middle)) for times in groups for middle in (median(times),) for time in times]
        return max(1.4826 * median(distances), _LEAST_NOISE) if distances else _USUAL_NOISE

    def model(self, trace: Trace) -> CostModel | None:
        """The model of the trace's operators; None where nothing is known of any."""
        known = ((op, self.times_of(op)) for op in distinct_ops(trace).values())
        rows = [Measured(kind=op.kind, work=work_of(trace, op), time_ns=median(times)) for op, times in known if times]
        return fit(rows) if rows else None

    def timed(self, trace: Trace) -> Trace:
        """The trace with each operator's estimated time (see the NOTE); unchanged where nothing is known of any."""
        model = self.model(trace)
        if model is None:
            return trace
        noise = self.noise()
        estimates = {key: self.estimate_ns(trace, op, model, noise) for key, op in distinct_ops(trace).items()}
        return replace(trace, ops=tuple(replace(op, time_ns=estimates.get(key_of(op), op.time_ns)) for op in trace.ops))

    def estimate_ns(self, trace: Trace, op: Op, model: CostModel, noise: float) -> int:
        line = model.line_of(op.kind)
        expected = max(line.predict_ns(work_of(trace, op)), 1.0)
        times = self.times_of(op)
        if not times:
            return round(expected)
        seen, of_model = len(times) / noise**2, 1 / line.spread**2
        return round(exp((seen * log(median(times)) + of_model * log(expected)) / (seen + of_model)))


def distinct_ops(trace: Trace) -> dict[str, Op]:
    """The last of the operators of each signature, without the prelude."""
    return {key_of(op): op for op in trace.ops if op.kind != "prelude"}


def key_of(op: Op) -> str:
    """What operators of equal cost have in common."""
    return f"{op.signature} backward" if op.is_backward else op.signature
