"""``Remat``: a training step, made to fit a budget."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

from punar.arguments import (
    EXACT,
    Budget,
    Compress,
    Exporter,
    Offloading,
    check_budget,
    check_compress,
    check_exporters,
    check_function,
    check_limit,
    check_modules,
    check_offload,
    check_solver,
)
from punar.errors import InfeasibleBudget, PlanError, UsageError
from punar.ir import Trace
from punar.pages import page_of
from punar.plan import Plan, simulate
from punar.plan.moves import Channel
from punar.plan.nearby import nearby_plan
from punar.plan.plan import moved
from punar.planning import budget_in_bytes, codec_channels, free_budget, held_text, plan_for, resident_text
from punar.profiles import Profile, explain
from punar.reporting.explain import Explanation
from punar.reporting.report import Report
from punar.reporting.timeline import Timeline
from punar.solvers import least
from punar.solvers import solve as solve_trace
from punar.solvers.elsewhere import Request, can_ask, solve_elsewhere
from punar.torch.drift import Drift
from punar.torch.offload import Offload
from punar.torch.places import opened, unmeasured
from punar.torch.reach import reached_by
from punar.torch.rescue import TIGHTER, CutRecording, Ladder, add_note, is_alone, is_out_of_memory, let_go
from punar.torch.script import OUTDATED, Script
from punar.torch.session import Session, StepStats
from punar.torch.undo import Undo
from punar.units import format_apart, format_bytes

P = ParamSpec("P")
T = TypeVar("T")

_LOG = logging.getLogger("punar")


class Remat:
    """Makes the training steps run inside it fit a memory budget.

    The first ``with`` block is recorded; where its budget is known in bytes before, values are dropped while it runs to keep it. From the second on, the
    plan made from it is obeyed. What is dropped in forward is recomputed in backward, operator by operator, so that gradients are the plain step's bit
    for bit and no code of the model runs twice.

    Args:
        budget: bytes of device memory for the whole step (parameters, gradients, optimizer state where it was seen, activations,
            temporaries), as an int or a text such as ``"6 GiB"``; a float in (0, 1]: that share of the peak of the plain step's own
            allocations, of the largest step so far where shapes vary; ``"min"``: the least that a plan of about one extra forward pass
            reaches; ``"auto"``: what the device has free, less a tenth; None: only measure.
        plan: obey this plan from the first step on, instead of making one.
        solver: who makes the plan; see ``docs/planning.md``.
        offload: where activations may be moved meanwhile, instead of dropping them. From a CUDA device to ``"cpu"``, the computer's memory, of
            which half is used at most, or what ``"cpu:32 GiB"`` says; from any to ``"disk:/path/of/a/folder"`` or
            ``"disk:/path:500 GiB"``. Of several all that the step's device can use are, the first one first. How fast a disk is, is measured now, the
            computer's memory when the first plan is made. A plan that moves values needs it as well.
        compress: how values may be held in fewer bytes meanwhile. ``"mask"`` loses nothing: dropout's masks and the signs ReLU needs as bits, whole
            numbers of 64 bits in 32. ``"bf16"``, ``"int8"``, ``"int4"`` round, so that gradients are no more the plain step's (see ``punar.verify``).
        limit: bytes that a step on the CPU may have, as an int or a text such as ``"6 GiB"``: one that has more raises ``punar.errors.OutOfMemory``, as
            a CUDA device does by itself. Every operator is then watched.
        modules: a module, or several, that ``step`` puts back before it repeats a step; those that its function names, it finds by itself.
        on_step: called with the ``StepStats`` of each block when it is over, or several such; see ``punar.export``. Where it raises, that is a
            warning, once.

    Raises:
        BudgetError: the budget is none of these, or the limit is no number of bytes.
        UsageError: both a budget and a plan were given, or there is no such solver, or ``offload``, ``compress`` or ``on_step`` is none of these.
        OffloadError: the folder cannot be used.

    Example:
        >>> import torch, punar
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> remat = punar.Remat(budget="min")
        >>> for _ in range(2):
        ...     with remat:
        ...         model(torch.ones(4, 8)).sum().backward()
        >>> len(remat.stats)
        2
    """

    def __init__(
        self,
        budget: Budget = None,
        *,
        plan: Plan | None = None,
        solver: str = "auto",
        offload: Offloading = None,
        compress: Compress = EXACT,
        limit: str | int | None = None,
        modules: torch.nn.Module | Iterable[torch.nn.Module] = (),
        on_step: Exporter | Iterable[Exporter] | None = None,
    ) -> None:
        if plan is not None and budget is not None:
            raise UsageError("asked for both a budget and a plan; a plan has its budget already: give one of the two")
        if plan is not None and not isinstance(plan, Plan):
            raise UsageError(f"asked to obey a plan, found a {type(plan).__name__}; give what punar.solve or punar.Plan.load returned")
        self.budget = check_budget(budget)
        self.solver = check_solver(solver)
        self.compress = check_compress(compress)
        self.stats: list[StepStats] = []
        self._exporters = check_exporters(on_step)
        self._has_raised: set[int] = set()
        self._told_plans: set[int] = set()
        self._promised_bytes = 0
        self._drifts: list[Drift] = []
        self.limit = check_limit(limit)
        self._modules = check_modules(modules)
        self._ladder = Ladder()
        self._is_rescue_told = self._is_iterator_told = False
        self._session = Session(
            self._make_plan,
            first_budget=self._first_budget,
            is_in_bytes=isinstance(self.budget, int),
            limit_bytes=self.limit,
            replan=self._replan,
        )
        self._places = check_offload(offload)
        self._opened_for = ""
        if plan is not None and plan.leaves_device:
            self._session.movers.offload = unmeasured(self._places, plan.off_device)
        elif disks := tuple(place for place in self._places if place.folder is not None):
            self._session.movers.offload = opened(disks, "cpu")
            self._opened_for = "cpu"
        if plan is not None:
            self._session.fixed = Script(plan)
            self._session.plan = plan

    def __enter__(self) -> Remat:
        self._session.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._record(self._session.stop(is_failed=error is not None))

    def _record(self, stats: StepStats) -> None:
        """Keeps what a step did, and tells those that want to know.

        Raises:
            InfeasibleBudget: no plan is known that keeps further steps like it within the budget.
        """
        self.stats.append(stats)
        drifts = self._session.drifts.take(len(self.stats)) if stats.drifts else []
        self._drifts.extend(drifts)
        if _LOG.isEnabledFor(logging.INFO):
            self._log(stats, drifts)
        for place, export in enumerate(self._exporters):
            try:
                export(stats)
            except Exception as failure:
                self._warn_of(place, failure)
        refused, self._session.refused = self._session.refused, None
        if refused is not None:
            raise refused

    def _log(self, stats: StepStats, drifts: list[Drift]) -> None:
        """A line at DEBUG for each step, at INFO for each plan that is new, and for what is in ``drifts``."""
        plan = stats.plan
        if plan is not None and (key := hash((plan.budget_bytes, plan.fingerprint, plan.hold_from, plan.moves))) not in self._told_plans:
            self._told_plans.add(key)
            _LOG.info("step %d obeys a new plan: %s", len(self.stats), describe_plan(plan))
        for drift in drifts:
            _LOG.info("%s", drift)
        _LOG.debug("step %d: %s", len(self.stats), stats)

    def _warn_of(self, place: int, failure: Exception) -> None:
        """Says once that an exporter fails: what a step did is no reason to lose it."""
        if place not in self._has_raised:
            self._has_raised.add(place)
            warnings.warn(
                f"asked to call {self._exporters[place]!r} after each step, it raised {type(failure).__name__}: {failure}. Training goes on, and it is "
                "called again after the next step; this is not told again",
                stacklevel=4,
            )

    def step(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs ``function(*args, **kwargs)`` as a ``with`` block, and once more under a tighter plan where it runs out of memory, until it goes through.

        Before each repetition all is put back as it was: random states, what was written into, gradients, modules' attributes; see ``docs/rescue.md`` for
        what cannot be, and for steps that are not repeated, such as those that take their batches from an iterator. After some steps that went through
        at once the looser plan is tried again.

        Raises:
            UsageError: an optimizer stepped inside the function, or it is no function, or one whose call runs nothing yet.
            NestedRemat: a ``Remat`` is active in this thread.
            MemoryError, torch.OutOfMemoryError, RuntimeError: the first error that said that memory ran out, where no tighter plan is known; with a note
                of what held the memory.

        Example:
            >>> import torch, punar
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
            >>> def train_step(batch):
            ...     loss = model(batch).sum()
            ...     loss.backward()
            ...     return loss.detach()
            >>> remat = punar.Remat()
            >>> loss = remat.step(train_step, torch.ones(4, 8))
            >>> remat.stats[-1].rescues
            0
        """
        check_function(function)
        results: list[T] = []
        reached = reached_by(function, (*args, *kwargs.values()))
        taken_from = ", ".join(dict.fromkeys(type(iterator).__name__ for iterator in reached.iterators))
        if taken_from and not self._is_iterator_told:
            self._is_iterator_told = True
            warnings.warn(f"asked to repeat a step where it runs out of memory, {_why_once(taken_from)}", stacklevel=2)
        undo = Undo([*self._modules, *reached.modules], self._session.meter, reached.schedulers)
        with undo.refusing_optimizers():
            rescues = self._repeat(undo, lambda: results.append(function(*args, **kwargs)), taken_from)
        if not rescues and self._ladder.rest():
            self._session.loosen()
        return results[0]

    def rescued(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorates a function that is one training step, so that calling it is ``step``.

        Raises:
            UsageError: it is no function, or one whose call runs nothing yet.
        """
        check_function(function)

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            return self.step(function, *args, **kwargs)

        return run

    def _repeat(self, undo: Undo, run: Callable[[], None], taken_from: str) -> int:
        """Runs a step under ever tighter plans until it goes through; says how often it had to be repeated.

        ``taken_from``: names the iterators that it can reach.
        """
        errors: list[BaseException] = []
        while True:
            stats, error = self._attempt(undo, run)
            stats = replace(stats, rescues=len(errors))
            if error is None:
                self._record(stats)
                return len(errors)
            errors.append(error)
            undo.restore()
            why_not = self._why_not(taken_from) or self._tighten(error)
            if why_not:
                self._record(stats)
                add_note(errors[0], why_not)
                try:
                    raise errors[0]
                finally:
                    del error, errors  # else the error would hold itself, by this frame

    def _attempt(self, undo: Undo, run: Callable[[], None]) -> tuple[StepStats, BaseException | None]:
        """Runs a step once; where memory runs out, returns the error."""
        session = self._session
        session.start(undo)
        try:
            run()
        except BaseException as error:
            is_repeatable = is_out_of_memory(error)
            stats = session.stop(is_failed=True, is_out_of_memory=is_repeatable)
            if is_repeatable:
                return stats, error
            self._record(stats)
            raise
        return session.stop(is_failed=False), None

    def _why_not(self, taken_from: str) -> str:
        """Why the step that just failed is not repeated, whatever it needs; nothing where it can be."""
        if taken_from:
            return f"punar did not repeat the step: {_why_once(taken_from)}"
        if not is_alone():
            return "punar did not repeat the step: other processes take part in it, and would have to repeat it as well"
        if self._session.fixed is not None:
            return "punar did not repeat the step: it obeys a plan that was given, and knows no other; give Remat a budget instead"
        if self._session.failed is None:
            return (
                "punar did not repeat the step: it failed before anything was recorded of it that a plan could drop; make the batch smaller"
            )
        return ""

    def _tighten(self, error: BaseException) -> str:
        """Has the step that failed obey a tighter plan from now on; says what held its memory where there is none."""
        let_go(error)  # planning takes memory as well
        failed = self._session.failed
        assert failed is not None
        if isinstance(failed, CutRecording):
            return self._record_again(error, failed)
        plan, ceiling_bytes = self._tighter(failed)
        if plan.peak_bytes >= failed.plan.peak_bytes and failed.extra_bytes != OUTDATED:
            assert failed.trace is not None
            return held_text(failed.trace, failed.plan, "punar knows no tighter plan than the one that failed")
        self._ladder.tighten(ceiling_bytes)
        self._session.tighten(ceiling_bytes, plan)
        self._tell_rescue(
            error, f"a plan of {format_bytes(failed.plan.peak_bytes)} predicted", f"under one of {format_bytes(plan.peak_bytes)}"
        )
        return ""

    def _record_again(self, error: BaseException, failed: CutRecording) -> str:
        """Has a step that failed while it was recorded be recorded once more in less, where there is anything left to drop."""
        trace = failed.trace
        ceiling_bytes = self._goal_bytes(failed.peak_bytes, trace.resident_bytes)
        if failed.is_exhausted or ceiling_bytes >= failed.peak_bytes:
            why = "punar dropped all that it could while it recorded the step. As far as that came, no plan is tighter than the least"
            return held_text(trace, least(trace), why)
        self._ladder.tighten(ceiling_bytes)
        self._session.tighten(ceiling_bytes)
        self._tell_rescue(error, "no plan", f"dropping what can be recomputed beyond {format_bytes(ceiling_bytes)}")
        return ""

    def _tighter(self, failed: Script) -> tuple[Plan, int]:
        """The next tighter plan than the one that a script obeys, and the bytes of the whole step that no plan may exceed from then on."""
        trace, plan = failed.trace, failed.plan
        assert trace is not None
        if failed.extra_bytes == OUTDATED:
            return plan, plan.peak_bytes  # a looser one was to be made when the step failed, and was not yet obeyed
        goal_bytes = self._goal_bytes(plan.peak_bytes, plan.resident_bytes)
        tighter = self._plan_under(trace, goal_bytes, plan.resident_bytes - trace.resident_bytes)
        return tighter, max(goal_bytes, tighter.peak_bytes)

    def _goal_bytes(self, failed_bytes: int, resident_bytes: int) -> int:
        """What a step is repeated within that failed with so many bytes in all, or was to be kept within them."""
        if self.limit is not None and failed_bytes > self.limit:
            return self.limit
        return resident_bytes + int(TIGHTER * (failed_bytes - resident_bytes))

    def _plan_under(self, trace: Trace, ceiling_bytes: int, extra_bytes: int) -> Plan:
        """The fastest plan under a ceiling, or the one of least peak where none is."""
        channels = self._channels(trace)
        try:
            return moved(solve_trace(trace, ceiling_bytes - extra_bytes, channels=channels), extra_bytes)
        except InfeasibleBudget as error:
            return moved(solve_trace(trace, error.least_bytes, channels=channels), extra_bytes)

    def _channels(self, trace: Trace, budget: Budget = "min", solver: str = "auto") -> tuple[Channel, ...]:
        """All ways for values to be elsewhere or smaller meanwhile, of which such a plan could make use."""
        offload = self._offload_from(trace.device)
        moves = () if offload is None or offload.has_failed else offload.channels
        return (*moves, *codec_channels(trace, budget, solver, self.compress))

    def _tell_rescue(self, error: BaseException, under: str, how: str) -> None:
        """Says once that steps are repeated: what the failed one was under, and how it is repeated."""
        if self._is_rescue_told:
            return
        self._is_rescue_told = True
        warnings.warn(
            f"a step ran out of memory ({type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}) under {under}. It is repeated "
            f"from the same state {how}; whether that happens again, remat.stats[i].rescues says",
            stacklevel=5,
        )

    @property
    def plan(self) -> Plan | None:
        """The plan in force, None before the first step is complete."""
        return self._session.plan

    @property
    def trace(self) -> Trace | None:
        """The last recorded step."""
        return self._session.trace

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """Where steps and their plans differed, and what was done about it; see ``docs/drift.md``."""
        return tuple(self._drifts)

    def report(self, *, html: str | Path | None = None) -> Report:
        """What was planned and what was measured; ``str()`` of it is a text.

        Args:
            html: where to write it as a page besides, with the last recorded step under the plan in force: the frontier, memory over time, modules,
                the plan of one block, predicted and measured peaks. It asks the network for nothing. Needs the extra ``report``.

        Raises:
            UsageError: a page was asked for, and no step has been recorded.
            MissingDependency: a page was asked for, and bokeh or jinja2 is not installed.
            PlanError: the page cannot be written.
        """
        is_given = self._session.fixed is not None
        device = str(self._session.device)
        report = Report.of_steps(
            self.stats, device=device, budget=self.budget, plan=self.plan, is_plan_given=is_given, drifts=map(str, self._drifts)
        )
        if html is not None:
            page_of(self._up_to_date("report on"), self.plan, report=report, steps=self.stats).save(html)
        return report

    def explain(self) -> Explanation:
        """Why the last recorded step needs the memory it does, and why the plan in force does what it does; ``str()`` of it is a text.

        Raises:
            UsageError: no step has been recorded.
        """
        return explain(self._up_to_date("explain"), self.plan)

    def _up_to_date(self, verb: str) -> Profile:
        """The last recorded step, with the state that the optimizer may have made since."""
        trace, plan = self._recorded(verb).trace, self.plan
        if plan is not None and plan.resident_bytes > trace.resident_bytes:
            since = plan.resident_bytes - trace.resident_bytes + int(trace.meta["optimizer_bytes"])
            trace = replace(trace, meta=trace.meta | {"optimizer_bytes": str(min(since, self._session.optimizer_bytes))})
        return Profile(trace=trace)

    def timeline(self) -> Timeline:
        """The last recorded step under the plan in force, as it is predicted: ``save`` writes it for Perfetto.

        Raises:
            UsageError: no step has been recorded.
        """
        return self._recorded("show the timeline of").timeline(self.plan)

    def _recorded(self, verb: str) -> Profile:
        if self.trace is None:
            raise UsageError(
                f"asked to {verb} a step, none has been recorded; run one first, or, where a plan was given to obey, make a profile with "
                "punar.profile and give it the plan"
            )
        return Profile(trace=self.trace)

    def _make_plan(self, trace: Trace, extra_bytes: int = 0, outside_peak_bytes: int = 0, nearby: Iterable[Plan] = ()) -> Plan:
        budget = self._budget_for(trace, extra_bytes)
        plan = self._nearby_plan(trace, budget, nearby) or self._plan_within(trace, budget, extra_bytes)
        if isinstance(self.budget, float):
            self._promised_bytes = max(self._promised_bytes, plan.budget_bytes)
        ceiling_bytes = self._ladder.ceiling_bytes
        if ceiling_bytes is not None and plan.peak_bytes > ceiling_bytes:
            plan = self._plan_under(trace, ceiling_bytes, extra_bytes)
        return self._beside_outside(plan, trace, extra_bytes, outside_peak_bytes)

    def _beside_outside(self, plan: Plan, trace: Trace, extra_bytes: int, outside_peak_bytes: int) -> Plan:
        """A plan with the peak that the block reaches outside of forward and backward, where that is higher."""
        if outside_peak_bytes <= plan.peak_bytes:
            return plan
        if isinstance(self.budget, int) and outside_peak_bytes > plan.budget_bytes:
            asked, found = format_apart(plan.budget_bytes, outside_peak_bytes)
            raise InfeasibleBudget(
                f"asked for a step within {asked}, found {found} in use inside the `with` block but "
                "outside of forward and backward: an optimizer step (or evaluation) sets the peak, not activations, and recomputation cannot lower it. "
                f"Give at least {outside_peak_bytes} B, or move it out of the block. {resident_text(trace, extra_bytes)}",
                budget_bytes=plan.budget_bytes,
                least_bytes=outside_peak_bytes,
            )
        return replace(plan, peak_bytes=outside_peak_bytes, budget_bytes=max(plan.budget_bytes, outside_peak_bytes))

    def _nearby_plan(self, trace: Trace, budget: Budget, known: Iterable[Plan]) -> Plan | None:
        """One of the plans known for the same step on other sizes, where recomputation is needed and it fits on these too."""
        if budget is None or budget == "min":
            return None
        candidates = list(known)
        if not candidates:
            return None
        plain_peak_bytes = simulate(trace, (0,) * len(trace.values)).peak_bytes
        budget_bytes = min(budget_in_bytes(trace, budget, plain_peak_bytes), self._ladder.ceiling_bytes or sys.maxsize)
        if plain_peak_bytes <= budget_bytes:
            return None
        offload = self._offload_from(trace.device)
        can_leave = offload is not None and not offload.has_failed
        return nearby_plan(trace, [plan for plan in candidates if can_leave or not plan.leaves_device], budget_bytes)

    def _replan(self, trace: Trace, extra_bytes: int) -> Callable[[], Plan]:
        """How a plan for a trace timed anew is made in another thread: all that must be asked in this one has been."""
        budget, ceiling_bytes = self._budget_for(trace, extra_bytes), self._ladder.ceiling_bytes
        budget_bytes = None
        if budget != "min":
            asked = (ceiling_bytes, None if budget is None else budget_in_bytes(trace, budget, 0, extra_bytes))
            known = [size for size in asked if size is not None]
            if not known:
                raise PlanError("asked for a plan anew, found neither a budget nor a limit: a step that is only measured needs none")
            budget_bytes = min(known) - extra_bytes
        request = Request(trace=trace, budget_bytes=budget_bytes, solver=self.solver, channels=self._channels(trace, budget, self.solver))
        outside_peak_bytes = self._session.outside_peak_bytes

        def make() -> Plan:
            found = solve_elsewhere(request) if can_ask() else request.answer()
            return self._beside_outside(moved(found, extra_bytes), trace, extra_bytes, outside_peak_bytes)

        return make

    def _plan_within(self, trace: Trace, budget: Budget, extra_bytes: int) -> Plan:
        """The plan for a budget; without moves where a tier has failed and the budget can be met so."""
        offload, channels = self._offload_from(trace.device), self._channels(trace, budget, self.solver)
        if offload is not None and offload.has_failed:
            with suppress(InfeasibleBudget):
                return plan_for(trace, budget, self.solver, extra_bytes, channels)
            channels = (*offload.channels, *channels)
        return plan_for(trace, budget, self.solver, extra_bytes, channels)

    def _offload_from(self, device: str) -> Offload | None:
        """Where a step on this device may offload to; opened now where that was not yet known."""
        kind = torch.device(device).type
        if self._places and kind != self._opened_for:
            self._session.movers.offload = opened(self._places, device)
            self._opened_for = kind
        return self._session.movers.offload

    def _first_budget(self, device: torch.device, used_bytes: int) -> int | None:
        """What a step that has no plan yet may have, in bytes; None where that is not known before it was seen."""
        budget_bytes = self.budget if isinstance(self.budget, int) else None
        if self.budget == "auto" and device.type in ("cpu", "cuda"):
            budget_bytes = free_budget(str(device), used_bytes)
        known = [each for each in (budget_bytes, self._ladder.ceiling_bytes) if each is not None]
        return min((*known, *(() if self.limit is None else (self.limit,)))) if known else None

    def _budget_for(self, trace: Trace, extra_bytes: int) -> Budget:
        """The budget for a step of this shape: a share of a small step is no less than what a larger one was given in bytes."""
        if not isinstance(self.budget, float):
            return self.budget
        own = budget_in_bytes(trace, self.budget, simulate(trace, (0,) * len(trace.values)).peak_bytes, extra_bytes)
        return max(own, self._promised_bytes)


def _why_once(taken_from: str) -> str:
    """Why a step that reaches iterators is not repeated."""
    return (
        f"found that it can take items from what can give each only once ({taken_from}): repeated, it would train on others. Take them before, and give the "
        "step a list of them"
    )


def describe_plan(plan: Plan) -> str:
    """A plan in a line: all of it is predicted."""
    return (
        f"budget {format_bytes(plan.budget_bytes)}, peak {format_bytes(plan.peak_bytes)} of plain {format_bytes(plan.plain_peak_bytes)}, "
        f"{plan.overhead:+.1%} time, {format_bytes(plan.kept_bytes)} kept, {format_bytes(plan.recomputed_bytes)} recomputed, solver {plan.solver}"
    )
