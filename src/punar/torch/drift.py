"""Whether steps still do what their plan says, and what is done where they do not.

NOTE. From drift to another plan.

1. Of each script the last passes that can be compared are remembered: those whose operators were not timed, and whose backward pass was watched or not as in those
   that the prediction was learned from. Compared are medians, since single times are noisy.
2. Where a median is beyond its tolerance, that is told, once of each kind; the operators' times are forgotten and measured anew in the next passes, and a plan is
   made by them beside training. No step waits for it: the first that begins after it is there obeys it.
3. A new plan is on trial until as many passes of it can be compared with those of the plan before. Where it turns out slower than that one, or higher than it
   predicts, that one is obeyed again.
4. After each time a script is left alone for longer, so that a machine which is busy now and then does not have plans made for ever.

What a step needs of memory is not put off like this: see ``Session.allow``.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import TYPE_CHECKING, Literal

from punar.errors import PunarError
from punar.ir import Trace
from punar.plan import Plan
from punar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from punar.torch.script import Script
    from punar.torch.script_cache import ScriptCache

WINDOW = 9
"""So many passes are compared."""

TOLERANCE = 0.25
"""By so much, in parts of the predicted time, passes may take longer or shorter."""

SAME_WORK = 0.05
"""By so much, in parts of the predicted number, operators replayed and bytes moved may differ."""

SLOWER = 0.05
"""By so much a plan on trial may be slower than the one before."""

_PATIENCE, _MOST_PATIENCE = 32, 4096
"""So many passes a script is left alone after it was measured anew, twice as many each time, up to so many."""

_TRIAL = 128
"""After so many passes a plan is taken as good whose passes could not be compared with those of the one before."""

Kind = Literal["time", "replays", "moved", "peak", "fallbacks"]
Event = Literal["drifted", "replanned", "kept", "accepted", "rolled back", "not replanned"]

Replan = Callable[[Trace, int], Callable[[], Plan]]
"""Given a trace and the bytes that are resident beyond it, says how a plan for it is made, which may take seconds, in any thread."""

_UNITS: dict[Kind, Callable[[int], str]] = {"time": format_seconds, "peak": format_bytes, "moved": format_bytes}

_NAMES: dict[Kind, str] = {
    "time": "time of a step",
    "replays": "operators replayed",
    "moved": "bytes moved",
    "peak": "peak",
    "fallbacks": "values that could not be moved",
}

_RESULTS: dict[Event, str] = {
    "drifted": "beyond the tolerance",
    "replanned": "the new plan, made by times measured anew, is obeyed",
    "kept": "by times measured anew the plan stays",
    "accepted": "the new plan is no slower than the one before and stays",
    "rolled back": "the new plan is worse, the one before is obeyed again",
    "not replanned": "no plan could be made by times measured anew",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Something in which steps and their plan differ, or what was done about it; ``str()`` is a line.

    Attributes:
        kind: what differs: ``time``, ``replays``, ``moved``, ``peak`` or ``fallbacks``.
        event: ``drifted``: it was found to; ``replanned``: another plan is obeyed from this step on; ``kept``: none better is known; ``accepted``, ``rolled back``:
            the new plan has proved good, or bad; ``not replanned``: none could be made.
        measured, predicted: by the plan that is obeyed, or as it was before; nanoseconds, bytes or numbers.
        step: in which step, counted from 1.
    """

    kind: Kind
    event: Event
    measured: int
    predicted: int
    step: int = 0

    def __str__(self) -> str:
        unit = _UNITS.get(self.kind, str)
        return f"step {self.step}: {_NAMES[self.kind]} {unit(self.measured)} measured, {unit(self.predicted)} predicted: {_RESULTS[self.event]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one pass along a script did. Units: nanoseconds in all, of these in replays, and lost to moves; operators; bytes, each way counted; values."""

    time_ns: int
    replay_ns: int = 0
    lost_ns: int = 0
    replayed: int = 0
    moved_bytes: int = 0
    kept: int = 0

    def since(self, before: Pass) -> Pass:
        """What is left of counts that go on from pass to pass."""
        return Pass(**{field.name: getattr(self, field.name) - getattr(before, field.name) for field in fields(self)})


class Watch:
    """The last passes of a script that can be compared (Rule 1). ``is_rest``: their backward passes ran unwatched.

    ``cause``: what was found last, and whether it was in such passes; ``is_measured_anew``: the next timed passes alone say what operators take.
    """

    def __init__(self) -> None:
        self.passes: deque[Pass] = deque(maxlen=WINDOW)
        self.is_rest = False
        self.patience = self.left_alone = 0
        self.cause: tuple[Drift, bool] | None = None
        self.is_measured_anew = False

    def add(self, passed: Pass, *, is_rest: bool) -> None:
        if is_rest != self.is_rest:
            self.passes.clear()
        self.is_rest = is_rest
        self.passes.append(passed)
        self.left_alone = max(0, self.left_alone - 1)

    @property
    def is_full(self) -> bool:
        return len(self.passes) == WINDOW

    @property
    def time_ns(self) -> int:
        """What the passes take."""
        return int(median(passed.time_ns for passed in self.passes))

    def rest(self) -> None:
        """Begins anew, and leaves the script alone for a while (Rule 4)."""
        self.passes.clear()
        self.patience = min(max(_PATIENCE, 2 * self.patience), _MOST_PATIENCE)
        self.left_alone = self.patience

    def beyond(self, plan: Plan) -> list[Drift]:
        """Where the medians are beyond their tolerances of what a plan says."""
        replayed, moved = (int(median(getattr(passed, name) for passed in self.passes)) for name in ("replayed", "moved_bytes"))
        compared: tuple[tuple[Kind, int, int, float], ...] = (
            ("time", self.time_ns, plan.step_time_ns, TOLERANCE),
            ("replays", replayed, plan.replayed_ops, SAME_WORK),
            ("moved", moved, plan.moved_bytes, SAME_WORK),
        )
        return [
            Drift(kind=kind, event="drifted", measured=measured, predicted=predicted)
            for kind, measured, predicted, tolerance in compared
            if abs(measured - predicted) > tolerance * predicted
        ]


@dataclass(slots=True, kw_only=True)
class Trial:
    """What a new plan must be no worse than (Rule 3). ``passes``: how many of it there were."""

    origin: Script
    time_ns: int
    is_rest: bool
    passes: int = 0


class Planning:
    """A plan that is made in a thread. ``plan``: None until it is there, or where there is none; ``error``: why. ``is_own``: see ``Drifts.plan_own``."""

    def __init__(self, script: Script, trace: Trace, make: Callable[[], Plan], *, is_own: bool = False) -> None:
        self.script, self.trace, self.extra_bytes, self.is_own = script, trace, script.extra_bytes, is_own
        self.plan: Plan | None = None
        self.error: PunarError | None = None
        self._make = make
        self._thread = threading.Thread(target=self._run, name="punar-planning", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.plan = self._make()
        except PunarError as error:
            self.error = error


class Drifts:
    """Watches the scripts of one session. ``replan``: None where no plan can be made beside training. ``planning``: the plan that is being made."""

    def __init__(self, scripts: ScriptCache, replan: Replan | None = None) -> None:
        self.scripts = scripts
        self.replan = replan
        self.planning: Planning | None = None
        self._made: dict[Script, Planning] = {}
        self._waiting: dict[Script, tuple[Trace, bool]] = {}
        self._found: list[Drift] = []
        self._told: set[Kind] = set()

    def note(self, drift: Drift) -> None:
        """Writes down what ``take`` tells."""
        self._found.append(drift)

    @property
    def found(self) -> int:
        """How much there is for ``take``."""
        return len(self._found)

    def take(self, step: int) -> list[Drift]:
        """What was found and done since this was called last, all of it of this step."""
        found, self._found = self._found, []
        return [replace(drift, step=step) for drift in found]

    def see(self, script: Script, passed: Pass, *, is_rest: bool) -> Script:
        """A pass is over that can be compared; says which script is followed from now on."""
        watch = script.watch
        watch.add(passed, is_rest=is_rest)
        if script.trial is not None:
            return self._judge(script, script.trial)
        if watch.is_full and not watch.left_alone and not watch.is_measured_anew and not script.plan.drops_nothing:
            found = watch.beyond(script.plan)
            for drift in found:
                self.note(drift)
                self._tell(drift)
            if found:
                watch.cause, watch.is_measured_anew = (found[0], watch.is_rest), True
                watch.rest()
                script.measure_anew()
        return script

    def _tell(self, drift: Drift) -> None:
        """Warns of what got worse, once of each kind."""
        if drift.kind in self._told or drift.measured < drift.predicted:
            return
        self._told.add(drift.kind)
        unit = _UNITS.get(drift.kind, str)
        warnings.warn(
            f"punar's plan no longer says what steps do: {_NAMES[drift.kind]} {unit(drift.measured)}, median of the last {WINDOW}, predicted "
            f"{unit(drift.predicted)}. Operators are timed anew in the next steps and a plan is made by that beside training; gradients are not touched. "
            "What comes of it, remat.drifts says; of this kind nothing more is told",
            stacklevel=6,
        )

    def plan_anew(self, script: Script, trace: Trace) -> None:
        """A script was measured anew, which gave this trace: has a plan made by it."""
        self._plan(script, trace, is_own=False)

    def plan_own(self, script: Script, trace: Trace) -> None:
        """A script whose first plan was made for other sizes has been timed, which gave this trace: has a plan made for its own."""
        script.is_own_due = False
        self._plan(script, trace, is_own=True)

    def _plan(self, script: Script, trace: Trace, *, is_own: bool) -> None:
        """Has a plan made for a script, now or once those are there that were asked for before."""
        if self.replan is None:
            return
        known = set(self.scripts)
        self._made = {each: planning for each, planning in self._made.items() if each in known and each is not script}
        self._waiting = {each: asked for each, asked in self._waiting.items() if each in known} | {script: (trace, is_own)}
        self._go_on()

    def _go_on(self) -> None:
        """Puts by the plan that is there, and has the next one made."""
        planning = self.planning
        if planning is not None and planning.is_done:
            self._made[planning.script] = planning
            self.planning = None
        while self.planning is None and self._waiting:
            script = next(iter(self._waiting))
            trace, is_own = self._waiting.pop(script)
            self._start(script, trace, is_own=is_own)

    def _start(self, script: Script, trace: Trace, *, is_own: bool) -> None:
        assert self.replan is not None
        try:
            make = self.replan(trace, script.extra_bytes)
        except PunarError:
            if not is_own:
                self._note_of(script, "not replanned")
            return
        self.planning = Planning(script, trace, make, is_own=is_own)

    def begin(self, script: Script) -> Script:
        """A pass along a script begins; says along which it does, where a new plan has been made for it (Rule 2)."""
        self._go_on()
        planning = self._made.pop(script, None)
        is_asked_again = script in self._waiting or (self.planning is not None and self.planning.script is script)
        if planning is None or is_asked_again:
            return script  # what was made of it meanwhile was made by older times
        if planning.extra_bytes != script.extra_bytes:
            return script  # since then more or less is resident
        plan = planning.plan
        if planning.is_own:
            return self._own(script, plan, planning.trace)
        if plan is None:
            self._note_of(script, "not replanned")
            return script
        is_same = (plan.hold_from, plan.moves) == (script.plan.hold_from, script.plan.moves)
        is_better = plan.step_time_ns < script.plan.step_time_ns or plan.peak_bytes < script.plan.peak_bytes
        if is_same or not is_better:
            self._note_of(script, "kept")
            return script
        return self._try(script, plan, planning.trace)

    def _own(self, script: Script, plan: Plan | None, trace: Trace) -> Script:
        """Puts the plan that was made for a script's own sizes in the place of the one made for others, where it is faster."""
        if plan is None or plan.time_ns > script.plan.judged(trace).time_ns:
            return script
        script.trace = script.retimed = trace
        own = script.replanned(plan, script.extra_bytes)
        self.scripts.replace(script, own)
        return own

    def _try(self, script: Script, plan: Plan, trace: Trace) -> Script:
        """Puts a new plan in a script's place, on trial."""
        assert script.watch.cause is not None
        cause, was_rest = script.watch.cause
        new = script.replanned(plan, script.extra_bytes)
        new.retimed = trace
        before_ns = cause.measured if cause.kind == "time" else script.plan.step_time_ns
        new.trial = Trial(origin=script, time_ns=before_ns, is_rest=was_rest)
        new.watch.patience = script.watch.patience
        self.scripts.replace(script, new)
        self._note_of(script, "replanned", predicted=plan.step_time_ns if cause.kind == "time" else None)
        return new

    def _judge(self, script: Script, trial: Trial) -> Script:
        trial.passes += 1
        watch = script.watch
        if watch.is_full and watch.is_rest == trial.is_rest:
            is_lower = script.plan.peak_bytes < trial.origin.plan.peak_bytes  # which may take the time that it says
            allowed_ns = max(trial.time_ns, script.plan.step_time_ns if is_lower else 0)
            if watch.time_ns > (1 + SLOWER) * allowed_ns:
                return self.roll_back(script, Drift(kind="time", event="rolled back", measured=watch.time_ns, predicted=allowed_ns))
            self.note(Drift(kind="time", event="accepted", measured=watch.time_ns, predicted=allowed_ns))
        elif trial.passes < _TRIAL:
            return script
        script.trial = None
        watch.rest()
        return script

    def roll_back(self, script: Script, why: Drift) -> Script:
        """A plan on trial is worse than the one before: that one is followed again."""
        assert script.trial is not None
        origin = script.trial.origin
        script.trial = None
        origin.passes, origin.drift_bytes = script.passes, max(origin.drift_bytes, script.drift_bytes)
        origin.watch.rest()
        self.scripts.replace(script, origin)
        self.note(why)
        return origin

    def forget_trials(self) -> None:
        """Plans must be tighter or looser from now on: none is gone back to."""
        for script in self.scripts:
            script.trial = None

    def _note_of(self, script: Script, event: Event, *, predicted: int | None = None) -> None:
        assert script.watch.cause is not None
        cause, _ = script.watch.cause
        self.note(
            Drift(kind=cause.kind, event=event, measured=cause.measured, predicted=cause.predicted if predicted is None else predicted)
        )
