"""The dispatch mode that a ``Remat`` enters: hands each operator to whoever is in charge of the present forward pass.

An *episode* is one forward pass with its backward. The first operator of an episode decides what happens with it: where a plan for a step that
begins so is known, a ``Follower`` obeys it; else a ``Tracer`` records it, and a plan is made when it is complete.
"""

from __future__ import annotations

import itertools
import platform
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from punar.costs import CostCache, Ledger
from punar.errors import InfeasibleBudget, NestedRemat, UsageError
from punar.ir import Trace
from punar.ir.derived import forget_derived
from punar.plan import Plan, plain_plan, simulate
from punar.plan.nearby import plans_of_other_sizes
from punar.plan.plan import gap_ns_of
from punar.torch import attributes
from punar.torch.calm import Calm
from punar.torch.drift import Drift, Drifts, Pass, Replan
from punar.torch.engine import announced, aside, is_innermost, runs_python
from punar.torch.follower import DroppedHandle, Follower, Handle, run_metered
from punar.torch.functorch import hooks, remove_hooks
from punar.torch.meter import Meter, StorageRecord, device_of, meter_for
from punar.torch.modules import called_with, running_root
from punar.torch.movers import Movers
from punar.torch.online import EvictingTracer, unread_bytes
from punar.torch.operators import PLAIN_TYPES, in_backward, operator_info, signature_of, tensors_in
from punar.torch.optimizers import AFTER_STEP
from punar.torch.records import Episode, active
from punar.torch.replay import ReplayCount
from punar.torch.rescue import CutRecording
from punar.torch.scratch import end_parked
from punar.torch.script import LEFT_ALONE, OUTDATED, Script
from punar.torch.script_cache import Key, ScriptCache, sizes_of
from punar.torch.tracer import TracedHandle, Tracer
from punar.torch.undo import Undo
from punar.units import format_apart, format_bytes, format_seconds

FirstBudget = Callable[[torch.device, int], int | None]
"""What a step may have of which nothing is known yet, in bytes, where so many are in use now; None where the budget depends on the step."""

Planner = Callable[[Trace, int, int, Iterable[Plan]], Plan]
"""Makes a plan for a trace, given how many bytes are resident now beyond those of the trace, what the ``with`` block has been seen
to reach outside of forward and backward, in an optimizer's step for example, and the plans known for the same step on other sizes."""

_SAME_OVERHEAD = 0.02
"""A plan whose predicted overhead moves by less than this share of the plain step's time when operators are timed anew is kept, and one that was made
for other sizes where its overhead is less."""

_SAME_PEAK = 0.002
"""A plan whose steps reach more than its predicted peak by less than this part of it is kept."""

_PASSAGES = 2
"""So many steps may exceed their budget in going over from one script to another, before the first is given less."""

LEARNED_AFTER, _REPLANNED_UNTIL = 3, 8
"""After so many timed passes of a plan its operators' times are believed; until so many a plan is made anew where they say otherwise."""

_NO_KWARGS: dict[str, Any] = {}

_local = threading.local()
_owners = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one ``with`` block did. Units: bytes of the whole step, nanoseconds of wall time.

    ``measured_peak_bytes``: None where the block or its backward pass ran unwatched, on a device that keeps no statistics.
    ``predicted_peak_bytes``: the highest of the plans obeyed in the block, None where there was none. ``kept_bytes``: held for backward by
    the plan's account, or the plain step's where it was recorded; ``recomputed_bytes`` and ``replayed_operators``: counted while they happened.
    ``moved_bytes``: copied off the device and back, each way counted; ``stall_ns``: time waited for it; ``unmoved_values``: that were to be moved
    or encoded and could not. ``coded_bytes``: of values that were held in fewer bytes; ``coding_ns``: time taken by that. ``is_traced``: the block,
    or one of its forward passes, was recorded. ``plan``: the one obeyed last in the block; None where none was. ``rescues``: how often
    ``Remat.step`` repeated the step, which ran out of memory; the other fields are those of the last attempt. ``drifts``: how many entries
    ``Remat.drifts`` got in the step. ``evicted_bytes``: of values that were dropped to keep a recorded step under its budget, each time they
    were. ``str()`` is a line.
    """

    measured_peak_bytes: int | None
    predicted_peak_bytes: int | None
    time_ns: int
    kept_bytes: int
    recomputed_bytes: int
    replayed_operators: int
    is_traced: bool
    plan: Plan | None
    moved_bytes: int = 0
    stall_ns: int = 0
    unmoved_values: int = 0
    coded_bytes: int = 0
    coding_ns: int = 0
    rescues: int = 0
    drifts: int = 0
    evicted_bytes: int = 0

    def __str__(self) -> str:
        measured = "unmeasured" if self.measured_peak_bytes is None else format_bytes(self.measured_peak_bytes)
        predicted = "" if self.predicted_peak_bytes is None else f" ({format_bytes(self.predicted_peak_bytes)} predicted)"
        parts = [
            f"{format_seconds(self.time_ns)}, peak {measured}{predicted}, {format_bytes(self.kept_bytes)} kept",
            f"{format_bytes(self.recomputed_bytes)} recomputed by {self.replayed_operators} operators" if self.replayed_operators else "",
            f"{format_bytes(self.moved_bytes)} moved, {format_seconds(self.stall_ns)} waited for" if self.moved_bytes else "",
            f"{format_bytes(self.coded_bytes)} compressed in {format_seconds(self.coding_ns)}" if self.coded_bytes else "",
            f"{self.unmoved_values} values could not be moved" if self.unmoved_values else "",
            "recorded" if self.is_traced else "",
            f"{format_bytes(self.evicted_bytes)} evicted" if self.evicted_bytes else "",
            f"repeated {self.rescues} times, out of memory" if self.rescues else "",
            f"{self.drifts} notes of drift" if self.drifts else "",
        ]
        return ", ".join(filter(None, parts))


class Waiting:
    """No operator of the episode has run yet. What needs no gradient is no part of any: it is run and metered.

    An episode begins with the first operator that reads something requiring a gradient; views tell too little of shapes to know one by.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.episode = Episode(session.owner)
        self.live_before = session.meter.live
        self.handles: list[weakref.ref[TracedHandle]] = []

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        info = operator_info(func)
        is_first = (
            torch.is_grad_enabled()
            and not info.is_view
            and not in_backward()
            and any(tensor.requires_grad for tensor in tensors_in((*args, *kwargs.values())))
        )
        if is_first:
            return self.session.begin(self.episode, func, args, kwargs).on_op(func, args, kwargs)
        out = run_metered(info, args, kwargs, self.session.meter)
        self.session.see_outside()
        return out

    def pack(self, tensor: Tensor) -> Handle:
        handle = TracedHandle(tensor, self.episode)
        self.handles.append(weakref.ref(handle))
        return handle


class Session(TorchDispatchMode):
    """Sees every operator of the ``with`` block.

    ``planner``: turns a finished trace into a plan. ``first_budget``: what a step may have until there is one, None for no limit.
    ``is_in_bytes``: its budget is a number of bytes, whatever the step. ``limit_bytes``: what the whole step may have on the CPU, None for no
    limit. ``replan``: has a plan made beside training (see ``drift``). ``undo``: what is known of the changes of a step that can be repeated,
    None where it cannot.
    ``is_guarded``: either is there, so that each operator is seen, whatever the plan. ``failed``: the script of the step that ran out of memory last, or
    what was recorded of it; None where nothing is known of it. ``refused``: why there is no plan for the step that has just
    ended, to be raised once what it did is written down. ``covered``: how the pass began that follows the script of a larger one; None for others.
    """

    supports_higher_order_operators = True
    tracer_type: type[Tracer] = Tracer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper it asks for costs microseconds an operator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled regions stay compiled

    def __init__(
        self,
        planner: Planner,
        *,
        first_budget: FirstBudget | None = None,
        is_in_bytes: bool = False,
        limit_bytes: int | None = None,
        replan: Replan | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.first_budget = first_budget
        self.limit_bytes = limit_bytes
        self.undo: Undo | None = None
        self.is_guarded = limit_bytes is not None
        self.failed: Script | CutRecording | None = None
        self.is_in_bytes = is_in_bytes
        self.owner = next(_owners)
        self.planner = planner
        self.scripts = ScriptCache()
        self.drifts = Drifts(self.scripts, replan)
        self.fixed: Script | None = None
        self.meter: Meter = Meter()
        self.device = torch.device("cpu")
        self.count = ReplayCount()
        self.movers = Movers()
        self.cache, self.ledger = CostCache({}), Ledger()
        self.calm, self.is_watched = Calm(), True
        self.phase: Waiting | Tracer | Follower | None = None
        self.pending: Tracer | None = None
        self.pending_key = Key("", (), 0)
        self.followed: Script | None = None
        self.pending_optimizer_bytes = 0
        self.gradients: list[weakref.ref[StorageRecord]] = []
        self.leaves: list[weakref.ref[Tensor]] = []
        self.trace: Trace | None = None
        self.plan: Plan | None = None
        self.stack: ExitStack | None = None
        self.calling: Waiting | Tracer | Follower | None = None
        self.is_traced = self.has_rested = False
        self.is_plan_followed = self.is_passage = False
        self.obeyed: list[Plan] = []
        self.left: Script | None = None
        self.covered: Key | None = None
        self.has_failed = self.is_drift_told = self.is_excess_told = False
        self.optimizer_bytes = self.optimizer_outside_bytes = self.outside_peak_bytes = 0
        self.traced_source_bytes: int | None = None
        self.traced_peak_bytes = self.traced_kept_bytes = 0
        self.refused: InfeasibleBudget | None = None
        AFTER_STEP.add(self.see_optimizer)

    def see_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: what it keeps is resident from now on, if it trains what this session has seen."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if type(p) in PLAIN_TYPES]
        if self.device.type == "meta" or not any(self.meter.knows(p) for p in parameters):
            return
        state = [t for t in tensors_in(map(dict.values, optimizer.state.values())) if type(t) in PLAIN_TYPES]
        records = {record for record in map(self.meter.record_of, state) if record is not None}
        self.optimizer_bytes = sum(record.nbytes for record in records)
        self.optimizer_outside_bytes = sum(record.nbytes for record in records if not record.is_created)

    def see_outside(self) -> None:
        """An operator ran that is part of no forward or backward pass."""
        if self.has_failed:
            return  # what a failed step left alive will go
        self.outside_peak_bytes = max(self.outside_peak_bytes, self.meter.resident_with(self.meter.live, self.source_bytes()))

    def source_bytes(self) -> int:
        """Bytes that are there and that no operator seen here made: what the step reads, as of its trace, and optimizer state."""
        traced = self.traced_source_bytes
        return self.meter.resident if traced is None else traced + self.optimizer_outside_bytes

    def set_limit(self) -> None:
        """Tells the meter what the step may have beside what it reads, as far as that is known."""
        is_known = self.traced_source_bytes is not None and not isinstance(self.phase, Tracer)
        self.meter.limit(self.limit_bytes, self.source_bytes() if is_known else None)

    # -- the with block --------------------------------------------------------------------------------------------------

    def start(self, undo: Undo | None = None) -> None:
        """Begins a block. ``undo``: what is to know of its changes.

        Raises:
            NestedRemat: a Remat is active in this thread already, or this one is in another.
        """
        if getattr(_local, "session", None) is not None or self.stack is not None:
            raise NestedRemat(
                "asked to enter a Remat that is active in another thread; its plan is of one step at a time: use a Remat of its own in each thread"
                if getattr(_local, "session", None) is None
                else "asked to enter a Remat while one is active in this thread; two would plan the same memory twice: leave the outer `with` first"
            )
        self.complete()
        self.undo = undo
        self.is_guarded = undo is not None or self.limit_bytes is not None
        attributes.install()
        self.count = ReplayCount()
        self.movers.begin()
        self.is_traced = self.has_rested = self.is_plan_followed = self.is_passage = False
        self.traced_peak_bytes = self.traced_kept_bytes = 0
        self.obeyed, self.left, self.followed = [], None, None
        self.meter.start()
        self.set_limit()
        self.calm.begin()
        self.is_watched = self.is_guarded or not self.calm.is_calm
        self.phase = Waiting(self) if self.is_watched else None
        self.started_ns = self.episode_started_ns = time.perf_counter_ns()
        self.episode_before = Pass(time_ns=0)
        with ExitStack() as stack:
            if self.is_watched:
                stack.enter_context(hooks(self.pack, unpack))
                stack.enter_context(announced(self.run_backward))
                stack.enter_context(self)
            else:
                self.unwatched = Episode(self.owner)
                stack.enter_context(hooks(self.glance, unpack))
            self.stack = stack.pop_all()
        _local.session, active.owner = self, self.owner

    def stop(self, *, is_failed: bool, is_out_of_memory: bool = False) -> StepStats:
        """Ends a block and says what it did. ``is_out_of_memory``: it failed so, and is to be repeated if that can be.

        Raises:
            UsageError: no block has begun.
        """
        if self.stack is None:
            raise UsageError("asked to leave a Remat that was not entered; use it as `with remat:`")
        _local.session = active.owner = None
        stack, self.stack = self.stack, None
        stack.close()
        time_ns = time.perf_counter_ns() - self.started_ns
        end_parked()
        self.failed = self.script_at_hand() if is_out_of_memory else None
        self.leave_episode()
        if is_failed:
            self.abandon(is_out_of_memory=is_out_of_memory)
            self.has_failed = True
        elif self.pending is not None:
            self.pending.pause()
            if self.pending.episode.handles == 0:
                try:
                    self.complete()
                except InfeasibleBudget as error:
                    self.refused = error
        self.undo = None
        if not self.is_watched:
            return self.unwatched_stats(time_ns)
        plan = self.obeyed[-1] if self.obeyed else None
        moved = self.movers.count
        measured_peak_bytes = self.measured_peak()
        is_plain = False
        if measured_peak_bytes is not None and not (is_failed or self.is_traced):
            self.allow(measured_peak_bytes)
            is_plain = self.is_plain(measured_peak_bytes)
        self.calm.end_watched(is_plain=is_plain, is_traced=self.is_traced and not is_failed)
        return StepStats(
            measured_peak_bytes=measured_peak_bytes,
            predicted_peak_bytes=max((plan.peak_bytes for plan in self.obeyed), default=None),
            time_ns=time_ns,
            kept_bytes=plan.kept_bytes if plan is not None else self.traced_kept_bytes,
            recomputed_bytes=self.count.nbytes,
            replayed_operators=self.count.operators,
            is_traced=self.is_traced,
            plan=plan,
            moved_bytes=moved.nbytes,
            stall_ns=moved.stall_ns,
            unmoved_values=moved.kept,
            coded_bytes=moved.coded_bytes,
            coding_ns=moved.coding_ns,
            drifts=self.drifts.found,
            evicted_bytes=self.count.evicted_bytes,
        )

    def measured_peak(self) -> int | None:
        """The peak of the block so far, None where it is not known."""
        if self.has_rested:
            return self.meter.allocator_peak()
        return max(self.meter.peak_with(self.source_bytes()), self.traced_peak_bytes)

    def unwatched_stats(self, time_ns: int) -> StepStats:
        """What can be said of a block that ran as it is."""
        measured_peak_bytes = self.meter.allocator_peak()
        is_over = self.plan is not None and (measured_peak_bytes or 0) > self.plan.budget_bytes * (1 + _SAME_PEAK)
        plan = self.plan if self.calm.end_unwatched(is_over=is_over) else None
        return StepStats(
            measured_peak_bytes=measured_peak_bytes,
            predicted_peak_bytes=None if plan is None else plan.peak_bytes,
            time_ns=time_ns,
            kept_bytes=0 if plan is None else plan.kept_bytes,
            recomputed_bytes=0,
            replayed_operators=0,
            is_traced=False,
            plan=plan,
        )

    def is_plain(self, measured_peak_bytes: int) -> bool:
        """Whether plans with a budget were obeyed in the block that held everything, and the budget was kept."""
        budgeted = all(plan.solver != "none" and plan.drops_nothing for plan in self.obeyed)
        least_bytes = measured_peak_bytes / (1 + _SAME_PEAK)  # losses that are kept, for example, are a little more in each step
        within = all(least_bytes <= plan.budget_bytes for plan in self.obeyed)
        return self.fixed is None and bool(self.obeyed) and budgeted and within

    def leave_episode(self) -> None:
        """The forward pass is over, for whatever reason."""
        phase, self.phase = self.phase, None
        now, before, moved = self.count.now_ns(), self.episode_before, self.movers.count
        so_far = Pass(
            time_ns=now,
            replay_ns=self.count.time_ns,
            lost_ns=moved.lost_ns,
            replayed=self.count.operators,
            moved_bytes=moved.nbytes,
            kept=moved.kept,
        )
        if isinstance(phase, EvictingTracer):
            phase.episode.seal()
        if isinstance(phase, Follower):
            phase.episode.seal()
            if self.judge(phase) and phase.is_complete:
                self.learn(phase, so_far.since(replace(before, time_ns=self.episode_started_ns)))
        self.episode_started_ns, self.episode_before = now, so_far

    def judge(self, follower: Follower) -> bool:
        """Says whether the pass kept to its script, as far as a step can whose sizes depend on its data. If not, such steps are recorded."""
        script, strays = follower.script, follower.mismatches + (follower.resized if self.covered is None else 0)
        if follower.has_switched:
            assert script.trace is not None
            self.left = follower.begun
            self.obeyed[-1] = self.plan = script.plan
            self.find_source(int(script.trace.meta["source_bytes"]), int(script.trace.meta["source_gradient_bytes"]))
        self.is_plan_followed = strays == 0 and bool(self.obeyed)
        is_quiet = not strays and not follower.is_overwriting
        if follower.is_overwriting and script.is_quiet and not follower.runs_python:
            warnings.warn(
                "backward has begun to write into tensors that recomputation reads, after steps in which it did not. Backward passes of such a plan "
                f"are watched only now and then: if this began in one of the last {LEFT_ALONE} steps, through `.data` in a hook, gradients of the "
                "steps since may be wrong. From now on each is watched. Write under torch.no_grad() instead, which is always noticed",
                stacklevel=4,
            )
        if not is_quiet:
            script.quiet = 0
        elif follower.is_complete and not follower.has_rested:
            script.quiet += 1
        if self.fixed is not None:
            return True
        self.followed = script
        if self.covered is not None:
            self.judge_covered(self.covered, follower)
            return False
        is_recorded_next = self.note_way(follower)
        self.is_passage = is_recorded_next or (follower.has_switched and not strays)  # its peak is that of no plan
        return not is_recorded_next

    def judge_covered(self, begun: Key, follower: Follower) -> None:
        """A pass along the script of a larger step is over, which says nothing of that one: but whether a smaller one does the same, in less."""
        is_alike = follower.mismatches <= len(follower.rows) // 50
        if not is_alike or (self.measured_peak() or 0) > follower.script.plan.peak_bytes * (1 + _SAME_PEAK):
            self.scripts.uncover(begun)
        self.is_passage, self.covered = True, None

    def note_way(self, follower: Follower) -> bool:
        """Remembers which way the pass went; says whether it is one that is yet to be recorded."""
        script, few = follower.script, len(follower.rows) // 50
        is_like = follower.mismatches + follower.resized <= few
        if is_like or (script.is_plain and (self.measured_peak() or 0) <= script.plan.budget_bytes):
            self.scripts.take(script)
            return False
        return self.scripts.stray(script) if follower.mismatches > few else self.scripts.resize(script)

    def learn(self, follower: Follower, passed: Pass) -> None:
        """A pass of a script is complete: its plan is judged by the times that were seen, and made anew where they change it much and early."""
        self.judge_again(follower, passed)
        if follower.script.passes >= LEARNED_AFTER:
            forget_derived()

    def judge_again(self, follower: Follower, passed: Pass) -> None:
        """What ``learn`` does."""
        script = follower.script
        script.passes += 1
        if script.trace is None or not (follower.is_timed or self.meter.is_synchronous):
            return
        if self.is_worse(follower, passed) or not (follower.is_timed or follower.has_rested):
            return
        wall_ns = passed.time_ns - passed.lost_ns
        if follower.is_timed:
            script.learn(wall_ns, passed.replay_ns, self.ledger, is_resized=follower.resized > 0)
        elif not script.learn_rest(wall_ns - passed.replay_ns):
            return
        if len(script.timed_ns) < LEARNED_AFTER:
            return
        is_measured_anew, script.watch.is_measured_anew = script.watch.is_measured_anew, False
        if is_measured_anew:
            (script.own_times or self.ledger).keep_last(script.trace, LEARNED_AFTER)
        self.cache.save_soon(self.ledger)
        script.retimed = self.trace = trace = script.retimed_trace(self.ledger)
        known = judged_anew(script.plan, trace)
        if script.is_own_due:
            is_kept = known.overhead <= _SAME_OVERHEAD
        else:
            is_kept = abs(known.overhead - script.plan.overhead) <= _SAME_OVERHEAD or script.passes > _REPLANNED_UNTIL
        if is_measured_anew or is_kept or script.is_nearby:
            script.plan = self.plan = known
            if is_measured_anew:
                self.drifts.plan_anew(script, trace)
            elif not is_kept:
                self.drifts.plan_own(script, trace)
            return
        script.trace = trace
        self.plan = self.planner(trace, script.extra_bytes, self.outside_peak_bytes, ())
        self.followed = script.replanned(self.plan, script.extra_bytes)
        self.scripts.replace(script, self.followed)

    def is_worse(self, follower: Follower, passed: Pass) -> bool:
        """A pass is over that may say whether its plan still holds (see ``drift``); says whether that is a new one, given up for the one before."""
        script = follower.script
        is_comparable = not follower.is_timed and len(script.timed_ns) >= LEARNED_AFTER and follower.has_rested == script.has_settled
        if not is_comparable or passed.kept:
            return False
        now = self.drifts.see(script, passed, is_rest=follower.has_rested)
        if now is script:
            return False
        self.followed, self.plan = now, now.plan
        return True

    def allow(self, measured_peak_bytes: int) -> None:
        """A block is over: where it needed more than its plan said, the plan's next steps are given that room.

        So where the bytes of a step depend on its data, as where tokens are routed to experts, the budget holds for the greatest step seen.
        Backward passes of such steps are watched.
        """
        script = self.fixed or self.followed
        if script is None or len(self.obeyed) != 1 or self.outside_peak_bytes >= measured_peak_bytes:
            return
        if self.is_passage:
            self.allow_passage(measured_peak_bytes)
            return
        if self.movers.count.kept:
            self.drifts.note(Drift(kind="fallbacks", event="drifted", measured=self.movers.count.kept, predicted=0))
            script.extra_bytes = OUTDATED
            return
        if abs(measured_peak_bytes - script.measured_peak_bytes) > _SAME_PEAK * measured_peak_bytes:
            script.measured_peak_bytes, script.quiet = measured_peak_bytes, 0
        excess = measured_peak_bytes - self.obeyed[0].peak_bytes
        if excess > _SAME_PEAK * self.obeyed[0].peak_bytes:
            if script is self.fixed:
                self.warn_excess(measured_peak_bytes)
            script.drift_bytes += excess
            seen = Drift(kind="peak", event="drifted", measured=measured_peak_bytes, predicted=self.obeyed[0].peak_bytes)
            self.drifts.note(seen)
            if script.trial is not None:
                self.followed = self.drifts.roll_back(script, replace(seen, event="rolled back"))

    def allow_passage(self, measured_peak_bytes: int) -> None:
        """A step began along one script and went over to another: where that exceeds a budget in bytes again and again, the first leaves room for it."""
        excess = measured_peak_bytes - self.obeyed[0].budget_bytes
        if self.left is not None and self.is_in_bytes and excess > 0:
            self.left.passages += 1
            if self.left.passages > _PASSAGES:
                self.left.drift_bytes += excess

    def warn_excess(self, measured_peak_bytes: int) -> None:
        """Says once that the plan that was given does not keep its budget."""
        assert self.fixed is not None
        plan = self.fixed.plan
        if self.is_excess_told or measured_peak_bytes <= plan.budget_bytes:
            return
        self.is_excess_told = True
        why = (
            f"more is resident than when its step was profiled, such as optimizer state ({format_bytes(self.optimizer_bytes)} now), gradients that "
            "are kept, copies of what hooks write into, or other tensors. Profile after the optimizer's first step"
            if self.is_plan_followed
            else "its operators or their sizes are others than those of the profiled step. Profile a step like this one"
        )
        promised, within, reached = format_apart(plan.peak_bytes, plan.budget_bytes, measured_peak_bytes)
        warnings.warn(
            f"the plan given promises a peak of {promised} within {within}, the step reached {reached}: {why}, or give Remat the budget instead of "
            "a plan: it then plans for what it finds",
            stacklevel=5,
        )

    def abandon(self, *, is_out_of_memory: bool) -> None:
        """The step failed: what was traced of it is no whole step. Where it is to be repeated, that is known of it at least."""
        tracer, self.pending = self.pending, None
        if tracer is None:
            return
        if is_out_of_memory and tracer.cut():
            trace = self.traced(tracer, is_backward_seen=False)
            known = (self.measured_peak(), tracer.budget_bytes)
            peak_bytes = min((size for size in known if size is not None), default=plain_plan(trace).peak_bytes)
            if self.limit_bytes is not None and tracer.budget_bytes is None:
                peak_bytes = max(peak_bytes, self.limit_bytes + 1)  # with what the operator that failed would have made
            self.failed = CutRecording(trace, peak_bytes=peak_bytes, is_exhausted=tracer.is_exhausted)
        tracer.close()

    def script_at_hand(self) -> Script | None:
        """The script of a recorded step that is followed now, or the last one that was, or that would be."""
        if isinstance(self.phase, Follower):
            return self.phase.script
        return self.followed or next((script for script in self.scripts if script.plan is self.plan), None)

    def loosen(self) -> None:
        """All plans are made anew before they are followed again."""
        self.drifts.forget_trials()
        for script in self.scripts:
            script.extra_bytes = OUTDATED

    def tighten(self, ceiling_bytes: int, plan: Plan | None = None) -> None:
        """The step that failed is to be repeated, under this plan or recorded once more, and no plan may exceed the ceiling."""
        self.has_failed = False  # all that it left is gone
        self.drifts.forget_trials()
        failed = self.failed
        if plan is not None and isinstance(failed, Script):
            assert failed.trace is not None
            self.plan = plan
            self.scripts.replace(failed, failed.replanned(plan, plan.resident_bytes - failed.trace.resident_bytes))
        for script in self.scripts:
            if script.plan.peak_bytes > ceiling_bytes:
                script.extra_bytes = OUTDATED

    # -- operators -------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and not PLAIN_TYPES.issuperset(types):
            return NotImplemented
        if kwargs is None:
            kwargs = _NO_KWARGS
        if self.undo is not None:
            self.undo.before(func, args, kwargs)
        phase = self.phase
        if phase is None:
            out = func(*args, **kwargs)
        else:
            episode = phase.episode
            if not episode.handles and episode.saves and torch.is_grad_enabled() and not in_backward():
                phase = self.next_episode()
            out = phase.on_op(func, args, kwargs)
        if self.is_guarded:
            self.look_after(func, out)
        return out

    def look_after(self, func: Any, out: Any) -> None:
        """An operator has run, of a step that has a limit or that can be undone.

        Raises:
            OutOfMemory: the step has gone beyond its limit.
        """
        if self.undo is not None:
            self.undo.after(operator_info(func), out)
        self.meter.check()

    def glance(self, tensor: Tensor) -> Handle:
        """Autograd saves one of the first tensors of an unwatched block; the others it saves unseen."""
        if not in_backward() and not self.calm.look(tensor):
            remove_hooks()
        return Handle(tensor, self.unwatched)

    def pack(self, tensor: Tensor) -> Handle | DroppedHandle:
        phase = self.phase or self.calling
        assert phase is not None
        self.calm.look(tensor)
        episode = phase.episode
        if not episode.handles and episode.saves and not in_backward():
            phase = self.next_episode()
        return phase.pack(tensor)

    def call(self, call: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function that stands on the tape as one operator; what it runs inside is not seen."""
        phase = self.phase
        if phase is None or not all(type(t) in PLAIN_TYPES for t in tensors_in((*args, *kwargs.values()))):
            return function(*args, **kwargs)
        call.live.append(function)
        self.calling, self.phase = phase, None
        try:
            return phase.on_op(call, args, kwargs)
        finally:
            self.calling, self.phase = None, self.phase or phase

    def run_backward(self, run: Callable[[], Any], outputs: Iterable[Any]) -> Any:
        """Backward is about to run: its operators are not watched where all that a plan needs of it comes through autograd's hooks."""
        phase = self.phase
        if self.undo is not None:
            self.undo.see_backward(outputs)
        if isinstance(phase, Tracer) and not in_backward():
            made = run()
            if not phase.episode.handles:
                phase.pause()  # here no operator is running
            return made
        if not isinstance(phase, Follower) or not phase.script.is_quiet or in_backward():
            return run()
        phase.runs_python = phase.runs_python or runs_python(outputs)
        if phase.runs_python or phase.mismatches or not phase.may_rest or self.is_guarded or not is_innermost(self):
            return run()
        self.has_rested = phase.has_rested = True
        with aside(self):
            made = run()
        for tensor in (*self.leaf_gradients(), *tensors_in(made or ())):
            self.meter.record_created(tensor)
        return made

    # -- episodes --------------------------------------------------------------------------------------------------------

    def next_episode(self) -> Waiting:
        if self.pending is not None:
            self.pending.give_up_scratch()
        self.leave_episode()
        self.phase = waiting = Waiting(self)
        self.complete()  # where that raises, and the error is caught, the block goes on
        return waiting

    def begin(self, episode: Episode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tracer | Follower:
        """The first operator of an episode is about to run: decides who is in charge."""
        waiting = self.phase if isinstance(self.phase, Waiting) else Waiting(self)
        signature = signature_of(str(func), args, kwargs)
        if self.fixed is not None:
            self.set_device(tensors_in((*args, *kwargs.values())))
            return self.follow(episode, self.given_script(signature))
        gradient_bytes = sum(record.nbytes for record in self.alive_gradients())
        read = tensors_in((*args, *kwargs.values()))
        shapes = tuple(sizes_of(tensor) for tensor in (*read, *tensors_in(called_with())))
        begun = Key(signature, shapes, gradient_bytes)
        key = self.scripts.stand_in(begun)
        script = self.scripts.find(key)
        if script is not None:
            self.covered = begun if key.shapes != shapes and key.covers(begun) else None
            return self.follow(episode, self.beside(script, gradient_bytes - key.gradient_bytes))
        self.set_device(read)
        return self.record(episode, waiting, key, args)

    def given_script(self, signature: str) -> Script:
        """The plan that the user gave; for a step that it was not made for, one that holds everything."""
        assert self.fixed is not None
        if self.fixed.plan.skeleton.signature == signature:
            self.obeyed.append(self.fixed.plan)
            root = running_root()
            if not self.leaves and root is not None:
                self.leaves = [weakref.ref(parameter) for parameter in root.parameters()]
            self.find_source(self.fixed.plan.source_bytes, self.fixed.plan.source_gradient_bytes)
            return self.fixed
        self.warn_mismatch(signature)
        return Script(empty_plan(self.fixed.plan))

    def beside(self, script: Script, more_gradient_bytes: int) -> Script:
        """The script of a recorded step, its plan made anew where more or less is resident now than it was made for."""
        trace = script.trace
        assert trace is not None
        script = self.drifts.begin(script)
        resident = max(0, self.optimizer_bytes - int(trace.meta["optimizer_bytes"])) + max(0, more_gradient_bytes)
        if resident + script.drift_bytes != script.extra_bytes:
            before_ns = time.perf_counter_ns()
            old, script = script, self.replanned(script, resident)
            if script.passes >= LEARNED_AFTER:
                forget_derived()
            self.scripts.replace(old, script)
            self.episode_started_ns += time.perf_counter_ns() - before_ns  # planning is no part of what such a step takes
        self.plan = script.plan
        self.obeyed.append(script.plan)
        self.find_source(int(trace.meta["source_bytes"]), int(trace.meta["source_gradient_bytes"]))
        return script

    def find_source(self, source_bytes: int, gradient_bytes: int) -> None:
        """What is there that no operator seen here made, as of a trace: without those of the gradients in it that are not, or that operators made since."""
        there = sum(record.nbytes for record in self.alive_gradients() if not record.is_created)
        self.traced_source_bytes = source_bytes - max(0, gradient_bytes - there)

    def replanned(self, script: Script, resident_bytes: int) -> Script:
        """A script's plan made anew beside so many more resident bytes, and with the room that earlier steps needed, or as much of it as there is.

        From the trace that the last one was made from, since all plans of that trace are known by now; only judged by the times learned since.
        """
        assert script.trace is not None
        assert script.retimed is not None
        extra = resident_bytes + script.drift_bytes
        try:
            plan = self.planner(script.trace, extra, self.outside_peak_bytes, ())
            return script.replanned(plan if script.retimed is script.trace else judged_anew(plan, script.retimed), extra)
        except InfeasibleBudget as error:
            if not script.drift_bytes:
                raise
            room = max(0, script.drift_bytes - (error.least_bytes - error.budget_bytes))
            if resident_bytes + room <= script.extra_bytes:
                self.warn_drift(error.least_bytes)
            script.drift_bytes = room
            return self.replanned(script, resident_bytes)

    def warn_drift(self, least_bytes: int) -> None:
        """Says once that the budget cannot be kept for every step."""
        if not self.is_drift_told:
            self.is_drift_told = True
            warnings.warn(
                "a step needed more memory than its plan said, since operators or sizes differ from step to step, and no plan leaves that room: the tightest "
                f"is obeyed, and some steps may exceed the budget. Give {format_bytes(least_bytes)} ({least_bytes} B) for the largest step seen so far",
                stacklevel=6,
            )

    def follow(self, episode: Episode, script: Script) -> Follower:
        self.has_failed = False
        self.phase = follower = Follower(episode, script, self.meter, self.count, self.scripts.others(script), self.movers)
        self.set_limit()
        return follower

    def tracer(self, episode: Episode, gradients: list[StorageRecord], carried_bytes: int, args: tuple[Any, ...]) -> Tracer:
        """Who records a step, under a budget where there is one that does not depend on what will be recorded."""
        if self.first_budget is not None:
            unread = unread_bytes(args)
            used_bytes = self.meter.used(self.meter.live, self.optimizer_outside_bytes + sum(unread.values()))
            budget_bytes = self.first_budget(self.device, used_bytes)
            if budget_bytes is not None:
                return EvictingTracer(
                    episode, self.meter, self.device, gradients, carried_bytes, budget_bytes=budget_bytes, unread=unread, count=self.count
                )
        return self.tracer_type(episode, self.meter, self.device, gradients, carried_bytes)

    def record(self, episode: Episode, waiting: Waiting, key: Key, args: tuple[Any, ...]) -> Tracer:
        gradients = self.alive_gradients()
        carried_bytes = max(0, waiting.live_before - sum(record.nbytes for record in gradients if record.is_created))
        self.phase = self.pending = tracer = self.tracer(episode, gradients, carried_bytes, args)
        if self.has_failed:
            tracer.forget_leftovers(max(0, carried_bytes - (self.optimizer_bytes - self.optimizer_outside_bytes)))
            self.has_failed = False
        self.pending_key = key
        self.pending_optimizer_bytes = self.optimizer_bytes
        tracer.optimizer_bytes = self.optimizer_outside_bytes
        for handle in (reference() for reference in waiting.handles):
            if handle is not None:
                tracer.watch_handle(handle, tracer.value_of(handle.tensor))
        self.is_traced = True
        self.set_limit()
        return tracer

    def set_device(self, tensors: list[Tensor]) -> None:
        device = device_of(tensors)
        if self.limit_bytes is not None and device.type != "cpu":
            raise UsageError(
                f"asked to limit a step's bytes, found that it runs on {device}, where they are not counted; leave `limit` out and give "
                "torch.cuda.set_per_process_memory_fraction the limit: what the device refuses is rescued all the same"
            )
        if device != self.device:
            self.device = device
            self.meter = meter_for(device)
            self.meter.start()

    def alive_gradients(self) -> list[StorageRecord]:
        """Earlier gradients that are still there, to be accumulated into: a step beside them has another peak."""
        recorded = [record for record in (reference() for reference in self.gradients) if record is not None]
        others = [self.meter.record_of(gradient) for gradient in self.leaf_gradients() if gradient.device == self.device]
        return list(dict.fromkeys([*recorded, *(record for record in others if record is not None)]))

    def leaf_gradients(self) -> list[Tensor]:
        """The gradients that the leaves of recorded steps have now; those of steps that obeyed a plan, or ran outside, are known by them alone."""
        leaves = [leaf for leaf in (reference() for reference in self.leaves) if leaf is not None]
        return [leaf.grad for leaf in leaves if leaf.grad is not None and type(leaf.grad) in PLAIN_TYPES]

    def complete(self) -> None:
        """Makes a plan from the trace that is finished, where there is one."""
        tracer, self.pending = self.pending, None
        if tracer is None:
            return
        trace = self.traced(tracer, is_backward_seen=any(row["is_backward"] for row in tracer.rows))
        self.trace = trace
        plain = simulate(trace, (0,) * len(trace.values))
        self.traced_peak_bytes = max(self.traced_peak_bytes, tracer.peak_bytes(trace, plain))
        self.traced_kept_bytes = plain.kept_bytes
        known = ((script.plan, script.trace) for script in self.scripts if script.trace is not None)
        nearby = plans_of_other_sizes(trace, known, plain.peak_bytes)
        self.plan = self.planner(trace, 0, self.outside_peak_bytes, nearby)
        self.scripts.add(self.pending_key, Script(self.plan, trace=trace))

    def traced(self, tracer: Tracer, *, is_backward_seen: bool) -> Trace:
        """The trace that a tracer recorded; the leaves and gradients that it saw are known from now on."""
        self.gradients = [r for r in self.gradients if r() is not None] + tracer.gradients()
        leaves = [leaf for leaf in (r() for r in (*self.leaves, *tracer.leaves.values())) if leaf is not None]
        self.leaves = [weakref.ref(leaf) for leaf in {id(leaf): leaf for leaf in leaves}.values()]
        self.load_costs()
        meta = self.cache.device | {
            "optimizer_bytes": str(self.pending_optimizer_bytes),
            "gradient_bytes": str(self.pending_key.gradient_bytes),
        }
        trace = self.ledger.timed(tracer.finish(is_backward_seen=is_backward_seen, meta=meta))
        self.traced_source_bytes = int(trace.meta["source_bytes"])
        return trace

    def load_costs(self) -> None:
        """What is known of this device's operators from earlier runs."""
        device = describe(self.device)
        if device != self.cache.device:
            self.cache = CostCache(device)
            self.ledger = self.cache.load()

    def warn_mismatch(self, signature: str) -> None:
        assert self.fixed is not None
        warnings.warn(
            f"the plan given was made for a step that begins with {self.fixed.plan.skeleton.signature}, this one begins with {signature}: "
            "the plan is ignored and nothing is recomputed. Make a plan for this model and shape, or give a budget instead",
            stacklevel=4,
        )


def unpack(handle: Handle | DroppedHandle) -> Tensor:
    """Autograd asks for a saved tensor."""
    return handle.unpack()


def active_session() -> Session | None:
    """The session whose block this thread is in."""
    return getattr(_local, "session", None)


def judged_anew(plan: Plan, trace: Trace) -> Plan:
    """The same plan with the times of the same trace timed anew."""
    judged = plan.judged(trace)
    times = {name: getattr(judged, name) for name in ("time_ns", "copy_ns", "stall_ns", "coding_ns")}
    return replace(plan, **times, plain_time_ns=trace.plain_time_ns, gap_ns=gap_ns_of(trace))


def describe(device: torch.device) -> dict[str, str]:
    """What a trace's times depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {"torch": torch.__version__, "device_name": name, "threads": str(torch.get_num_threads())}


@lru_cache(maxsize=1)
def _cpu_name() -> str:
    """The processor's name, as far as the system tells."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def empty_plan(plan: Plan) -> Plan:
    """The plan that holds everything, for a step that a given plan was not made for."""
    bones = replace(plan.skeleton, names=(), has_grad_mode=(), is_recorded=(), holds=(), peak_bytes=(), backward=(), moves=())
    return replace(plan, solver="none", skeleton=bones, hold_from=(), moves=())
