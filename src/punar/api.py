"""The verbs: make a step fit a budget, profile it, solve for a plan, verify what the plan computes."""

from __future__ import annotations

import logging
import math
import numbers
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from punar.costs import Device, find_device, timed_on, with_scratch
from punar.errors import BudgetError, InfeasibleBudget, PlanMismatch, UsageError, VerificationError
from punar.ir import Trace
from punar.ir.derived import forget_derived
from punar.plan import Plan, make_plan, simulate
from punar.plan.codecs import OPTIONS, codec_of
from punar.plan.moves import Channel
from punar.plan.plan import read_file, write_text
from punar.reporting.explain import Explanation, check_plan, explain_step
from punar.reporting.report import Report, count
from punar.reporting.table import format_columns
from punar.reporting.timeline import Timeline
from punar.solvers import codable, find, frontier_points, holder_lines, holders_at_peak, least
from punar.solvers import solve as solve_trace
from punar.torch.codecs import measured
from punar.torch.fake import trace_fake
from punar.torch.offload import Offload
from punar.torch.places import Place, described_channels, opened, physical_bytes, unmeasured
from punar.torch.rescue import TIGHTER, Ladder, add_note, is_alone, is_out_of_memory, let_go
from punar.torch.script import OUTDATED, Script
from punar.torch.session import LEARNED_AFTER, Session, StepStats
from punar.torch.sharding import STAGES, sharded, share
from punar.torch.state import StateSnapshot, bytes_equal, gradient_errors, restored, run_step
from punar.torch.undo import Undo, modules_of
from punar.units import format_bytes, format_seconds, parse_bytes

Budget = str | int | float | None
Compress = str | Iterable[str] | None
Exporter = Callable[[StepStats], object]
LossFn = Callable[[Any, Any], Any]
P = ParamSpec("P")
T = TypeVar("T")
Offloading = str | Sequence[str] | None

EXACT = ("mask",)
"""How values are compressed where nobody says how: what costs no precision."""

_LOG = logging.getLogger("punar")

_AUTO_MARGIN = 0.9
"""The share of the device's free memory that ``"auto"`` uses: the rest is for what the allocator loses and others take."""


class Remat:
    """Makes the training steps run inside it fit a memory budget.

    The first ``with`` block runs plain and is recorded; from the second on, the plan made from it is obeyed: what it drops in forward is
    recomputed in backward, operator by operator, so that gradients are the plain step's bit for bit and no code of the model runs twice.

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
        self.limit = check_limit(limit)
        self._modules = check_modules(modules)
        self._ladder = Ladder()
        self._is_rescue_told = False
        self._session = Session(self._make_plan, is_in_bytes=isinstance(self.budget, int), limit_bytes=self.limit)
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
        """Keeps what a step did, and tells those that want to know."""
        self.stats.append(stats)
        if _LOG.isEnabledFor(logging.INFO):
            self._log(stats)
        for place, export in enumerate(self._exporters):
            try:
                export(stats)
            except Exception as failure:
                self._warn_of(place, failure)

    def _log(self, stats: StepStats) -> None:
        """A line at DEBUG for each step, at INFO for each plan that is new."""
        plan = stats.plan
        if plan is not None and (key := hash((plan.budget_bytes, plan.fingerprint, plan.hold_from, plan.moves))) not in self._told_plans:
            self._told_plans.add(key)
            _LOG.info("step %d obeys a new plan: %s", len(self.stats), describe_plan(plan))
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
        what cannot be. After some steps that went through at once the looser plan is tried again.

        Raises:
            UsageError: an optimizer stepped inside the function.
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
        results: list[T] = []
        undo = Undo([*self._modules, *modules_of(function, (*args, *kwargs.values()))], self._session.meter)
        with undo.refusing_optimizers():
            rescues = self._repeat(undo, lambda: results.append(function(*args, **kwargs)))
        if not rescues and self._ladder.rest():
            self._session.loosen()
        return results[0]

    def rescued(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorates a function that is one training step, so that calling it is ``step``."""

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            return self.step(function, *args, **kwargs)

        return run

    def _repeat(self, undo: Undo, run: Callable[[], None]) -> int:
        """Runs a step under ever tighter plans until it goes through; says how often it had to be repeated."""
        errors: list[BaseException] = []
        while True:
            stats, error = self._attempt(undo, run)
            stats = replace(stats, rescues=len(errors))
            if error is None:
                self._record(stats)
                return len(errors)
            errors.append(error)
            undo.restore()
            why_not = self._why_not() or self._tighten(error)
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

    def _why_not(self) -> str:
        """Why the step that just failed is not repeated, whatever it needs; nothing where it can be."""
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
        plan, ceiling_bytes = self._tighter(failed)
        if plan.peak_bytes >= failed.plan.peak_bytes and failed.extra_bytes != OUTDATED:
            return held_text(failed)
        self._ladder.tighten(ceiling_bytes)
        self._session.tighten(plan, ceiling_bytes)
        self._tell_rescue(error, failed.plan, plan)
        return ""

    def _tighter(self, failed: Script) -> tuple[Plan, int | None]:
        """The next tighter plan than the one that a script obeys, and the bytes of the whole step that no plan may exceed from then on."""
        trace, plan = failed.trace, failed.plan
        assert trace is not None
        if failed.is_cut:
            return least(trace, self._channels(trace)), None  # how much more the step would have needed, nobody knows
        if failed.extra_bytes == OUTDATED:
            return plan, plan.peak_bytes  # a looser one was to be made when the step failed, and was not yet obeyed
        goal_bytes = plan.resident_bytes + int(TIGHTER * (plan.peak_bytes - plan.resident_bytes))
        if self.limit is not None:
            goal_bytes = min(goal_bytes, self.limit)
        tighter = self._plan_under(trace, goal_bytes, plan.resident_bytes - trace.resident_bytes)
        return tighter, max(goal_bytes, tighter.peak_bytes)

    def _plan_under(self, trace: Trace, ceiling_bytes: int, extra_bytes: int) -> Plan:
        """The fastest plan under a ceiling, or the one of least peak where none is."""
        channels = self._channels(trace)
        try:
            return moved(solve_trace(trace, ceiling_bytes - extra_bytes, channels=channels), extra_bytes)
        except InfeasibleBudget as error:
            return moved(solve_trace(trace, error.least_bytes, channels=channels), extra_bytes)

    def _channels(self, trace: Trace) -> tuple[Channel, ...]:
        """All ways for values to be elsewhere or smaller meanwhile."""
        offload = self._offload_from(trace.device)
        moves = () if offload is None or offload.has_failed else offload.channels
        return (*moves, *codec_channels(trace, "min", "auto", self.compress))

    def _tell_rescue(self, error: BaseException, failed: Plan, plan: Plan) -> None:
        """Says once that steps are repeated."""
        if self._is_rescue_told:
            return
        self._is_rescue_told = True
        warnings.warn(
            f"a step ran out of memory ({type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}) under a plan of "
            f"{format_bytes(failed.peak_bytes)} predicted. It is repeated from the same state under one of {format_bytes(plan.peak_bytes)}; whether "
            "that happens again, remat.stats[i].rescues says",
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

    def report(self) -> Report:
        """What was planned and what was measured; ``str()`` of it is a text."""
        is_given = self._session.fixed is not None
        return Report.of_steps(self.stats, device=str(self._session.device), budget=self.budget, plan=self.plan, is_plan_given=is_given)

    def explain(self) -> Explanation:
        """Why the last recorded step needs the memory it does, and why the plan in force does what it does; ``str()`` of it is a text.

        Raises:
            UsageError: no step has been recorded.
        """
        trace, plan = self._recorded("explain").trace, self.plan
        if plan is not None and plan.resident_bytes > trace.resident_bytes:  # the optimizer may have made its state since
            since = plan.resident_bytes - trace.resident_bytes + int(trace.meta["optimizer_bytes"])
            trace = replace(trace, meta=trace.meta | {"optimizer_bytes": str(min(since, self._session.optimizer_bytes))})
        return explain(Profile(trace=trace), plan)

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

    def _make_plan(self, trace: Trace, extra_bytes: int = 0, outside_peak_bytes: int = 0) -> Plan:
        plan = self._plan_within(trace, self._budget_for(trace, extra_bytes), extra_bytes)
        if isinstance(self.budget, float):
            self._promised_bytes = max(self._promised_bytes, plan.budget_bytes)
        ceiling_bytes = self._ladder.ceiling_bytes
        if ceiling_bytes is not None and plan.peak_bytes > ceiling_bytes:
            plan = self._plan_under(trace, ceiling_bytes, extra_bytes)
        if outside_peak_bytes <= plan.peak_bytes:
            return plan
        if isinstance(self.budget, int) and outside_peak_bytes > plan.budget_bytes:
            raise InfeasibleBudget(
                f"asked for a step within {format_bytes(plan.budget_bytes)}, found {format_bytes(outside_peak_bytes)} in use inside the `with` block but "
                "outside of forward and backward: an optimizer step (or evaluation) sets the peak, not activations, and recomputation cannot lower it. "
                f"Give at least {outside_peak_bytes} B, or move it out of the block. {resident_text(trace, extra_bytes)}",
                budget_bytes=plan.budget_bytes,
                least_bytes=outside_peak_bytes,
            )
        return replace(plan, peak_bytes=outside_peak_bytes, budget_bytes=max(plan.budget_bytes, outside_peak_bytes))

    def _plan_within(self, trace: Trace, budget: Budget, extra_bytes: int) -> Plan:
        """The plan for a budget; without moves where a tier has failed and the budget can be met so."""
        offload = self._offload_from(trace.device)
        codecs = codec_channels(trace, budget, self.solver, self.compress)
        if offload is not None and offload.has_failed:
            with suppress(InfeasibleBudget):
                return plan_for(trace, budget, self.solver, extra_bytes, codecs)
        return plan_for(trace, budget, self.solver, extra_bytes, (*(() if offload is None else offload.channels), *codecs))

    def _offload_from(self, device: str) -> Offload | None:
        """Where a step on this device may offload to; opened now where that was not yet known."""
        kind = torch.device(device).type
        if self._places and kind != self._opened_for:
            self._session.movers.offload = opened(self._places, device)
            self._opened_for = kind
        return self._session.movers.offload

    def _budget_for(self, trace: Trace, extra_bytes: int) -> Budget:
        """The budget for a step of this shape: a share of a small step is no less than what a larger one was given in bytes."""
        if not isinstance(self.budget, float):
            return self.budget
        own = budget_in_bytes(trace, self.budget, simulate(trace, (0,) * len(trace.values)).peak_bytes, extra_bytes)
        return max(own, self._promised_bytes)


def describe_type(item: object) -> str:
    """Names what was given instead of what was asked for."""
    return f"something of type {type(item).__name__}"


def check_budget(budget: Budget) -> Budget:
    """Raises ``BudgetError`` where a budget is none; returns it, texts of bytes as an int."""
    hint = 'give bytes such as "6 GiB", a fraction such as 0.4, "min", "auto" or None'
    if budget is None or budget in ("min", "auto"):
        return budget
    if isinstance(budget, numbers.Real) and not isinstance(budget, (bool, int, float)):
        budget = int(budget) if isinstance(budget, numbers.Integral) else float(budget)  # numpy's
    if isinstance(budget, bool) or not isinstance(budget, (str, int, float)):
        raise BudgetError(f"budget {budget!r} is a {type(budget).__name__}; {hint}")
    if isinstance(budget, str):
        return parse_bytes(budget)
    if isinstance(budget, float):
        if math.isfinite(budget) and 0 < budget <= 1:
            return budget
        raise BudgetError(f"budget {budget!r} is a float outside (0, 1]: a float is a share of the plain step's activation peak; {hint}")
    if budget <= 0:
        raise BudgetError(f"budget {budget} B is not positive; {hint}")
    return budget


def check_limit(limit: str | int | None) -> int | None:
    """Raises ``BudgetError`` where a limit is no positive number of bytes; returns it in bytes."""
    checked = None if limit is None else check_budget(limit)
    if checked is None or isinstance(checked, int):
        return checked
    raise BudgetError(f'limit {limit!r} is no number of bytes; give an int or a text such as "6 GiB"')


def check_modules(modules: torch.nn.Module | Iterable[torch.nn.Module]) -> tuple[torch.nn.Module, ...]:
    """Raises ``UsageError`` where these are no modules; returns them."""
    if isinstance(modules, torch.nn.Module):
        return (modules,)
    found = tuple(modules) if isinstance(modules, Iterable) else (modules,)
    if wrong := [item for item in found if not isinstance(item, torch.nn.Module)]:
        raise UsageError(f"asked to put modules back, found {describe_type(wrong[0])} among them; give torch.nn.Modules")
    return found


def check_offload(offload: Offloading) -> tuple[Place, ...]:
    """Reads where to offload to.

    Raises:
        UsageError: it is no text such as ``"cpu"``, ``"cpu:32 GiB"``, ``"disk:/path"`` or ``"disk:/path:500 GiB"``, nor a list of them.
    """
    if offload is None:
        return ()
    asked = [offload] if isinstance(offload, str) or not isinstance(offload, Sequence) else offload
    if not asked:
        raise UsageError(f"asked to offload to {offload!r}, which is no place: name one, or leave `offload` out")
    places = tuple(map(_place_in, asked))
    if len({place.name for place in places}) < len(places):
        raise UsageError(f"asked to offload to {offload!r}, which names a place twice: name each once")
    return places


def _place_in(text: object) -> Place:
    kind, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
    if text == "cpu" or (kind == "cpu" and _is_size(rest)):
        return Place(folder=None, most_bytes=parse_bytes(rest) if rest else None)
    if kind != "disk" or not rest:
        raise UsageError(
            f"asked to offload to {text!r}; what can be offloaded to is the computer's memory, for tensors on a CUDA device, and a disk: "
            'give "cpu", "cpu:32 GiB" to use at most so much of it, "disk:/path/of/a/folder" or "disk:/path/of/a/folder:500 GiB"'
        )
    folder, _, size = rest.rpartition(":")
    if folder and _is_size(size):
        return Place(folder=folder, most_bytes=parse_bytes(size))
    return Place(folder=rest, most_bytes=None)  # a colon is part of the path


def _is_size(text: str) -> bool:
    try:
        return parse_bytes(text) > 0
    except BudgetError:
        return False


def check_compress(compress: Compress) -> tuple[str, ...]:
    """Raises ``UsageError`` where these are no ways to compress; returns them, each once."""
    if compress is None:
        return ()
    asked = (compress,) if isinstance(compress, str) else tuple(compress) if isinstance(compress, Iterable) else (compress,)
    if unknown := [name for name in asked if name not in OPTIONS]:
        raise UsageError(f"asked to compress by {unknown[0]!r}; give some of {', '.join(map(repr, OPTIONS))}, or () for nothing")
    return tuple(option for option in OPTIONS if option in asked)


def codec_channels(trace: Trace, budget: Budget, solver: str, compress: tuple[str, ...]) -> tuple[Channel, ...]:
    """The codecs that a plan for a step could use, as fast as they are on its device; none for a device that is not here, and none that no value can go through."""
    if solver != "auto" or budget is None or not is_here(trace):
        return ()
    device = torch.device(trace.device)
    return tuple(measured(*known, device) for name in codable(trace, compress) if (known := codec_of(name)) is not None)


def check_exporters(on_step: Exporter | Iterable[Exporter] | None) -> tuple[Exporter, ...]:
    """Raises ``UsageError`` where something that is to be called after each step cannot be; returns all that can."""
    if on_step is None:
        return ()
    asked = (on_step,) if callable(on_step) or not isinstance(on_step, Iterable) else tuple(on_step)
    for export in asked:
        if isinstance(export, type) or not callable(export):
            found = f"the class {export.__name__}" if isinstance(export, type) else describe_type(export)
            raise UsageError(
                f"asked to call {found} after each step; give a function of one StepStats, an exporter such as punar.export.JsonLines(path), or a list"
            )
    return asked


def describe_plan(plan: Plan) -> str:
    """A plan in a line: all of it is predicted."""
    return (
        f"budget {format_bytes(plan.budget_bytes)}, peak {format_bytes(plan.peak_bytes)} of plain {format_bytes(plan.plain_peak_bytes)}, "
        f"{plan.overhead:+.1%} time, {format_bytes(plan.kept_bytes)} kept, {format_bytes(plan.recomputed_bytes)} recomputed, solver {plan.solver}"
    )


def check_solver(solver: str) -> str:
    """Raises ``UsageError`` where there is no such solver; returns its name."""
    if not isinstance(solver, str):
        raise UsageError(f"asked for a solver, found {describe_type(solver)}; give its name, such as 'auto'")
    find(solver)
    return solver


def plan_for(trace: Trace, budget: Budget, solver: str = "auto", extra_bytes: int = 0, channels: tuple[Channel, ...] = ()) -> Plan:
    """Turns a budget into bytes and has a solver make the plan; ``"min"`` and None need no solver.

    ``extra_bytes`` are resident now beyond those of the trace: they come off the budget. ``channels``: where values may be offloaded to.
    """
    if budget == "min":
        return moved(least(trace, channels), extra_bytes)
    plain = simulate(trace, (0,) * len(trace.values))
    if budget is None:
        return moved(make_plan(trace, (0,) * len(trace.values), solver="none", budget_bytes=plain.peak_bytes), extra_bytes)
    budget_bytes = budget_in_bytes(trace, budget, plain.peak_bytes, extra_bytes)
    try:
        return moved(solve_trace(trace, budget_bytes - extra_bytes, solver, channels), extra_bytes)
    except InfeasibleBudget as error:
        raise InfeasibleBudget(
            f"{error} {resident_text(trace, extra_bytes)} What would lower it, `explain()` of the Remat or of the profile says.",
            budget_bytes=budget_bytes,
            least_bytes=error.least_bytes + extra_bytes,
            holders=error.holders,
        ) from error


def moved(plan: Plan, extra_bytes: int) -> Plan:
    """The same plan beside more resident bytes."""
    if not extra_bytes:
        return plan
    sizes = {name: getattr(plan, name) + extra_bytes for name in ("budget_bytes", "peak_bytes", "plain_peak_bytes", "resident_bytes")}
    return replace(plan, **sizes)


def resident_text(trace: Trace, extra_bytes: int) -> str:
    """Says what no plan can change."""
    gradients = int(trace.meta.get("gradient_bytes", 0))
    optimizer = int(trace.meta.get("optimizer_bytes", 0)) + extra_bytes
    resident = trace.resident_bytes + extra_bytes
    return (
        f"Whatever the plan, {format_bytes(resident)} are resident: optimizer state and room for what varies {format_bytes(optimizer)}, "
        f"gradients from before {format_bytes(gradients)}, parameters, buffers, batch and the rest {format_bytes(resident - optimizer - gradients)}."
    )


def held_text(failed: Script) -> str:
    """Says what held the memory of a step that failed under the tightest plan."""
    trace, plan = failed.trace, failed.plan
    assert trace is not None
    return "\n".join(
        [
            f"punar knows no tighter plan than the one that failed, of {format_bytes(plan.peak_bytes)} predicted. At its peak are alive:",
            *holder_lines(holders_at_peak(trace, plan)),
            f"{resident_text(trace, max(0, plan.resident_bytes - trace.resident_bytes))} Make the batch smaller.",
        ]
    )


def budget_in_bytes(trace: Trace, budget: str | int | float, plain_peak_bytes: int, extra_bytes: int = 0) -> int:
    """A budget as bytes of the whole step.

    Raises:
        BudgetError: it is more than the device has, or ``"auto"`` for a step that was recorded on another machine.
    """
    if isinstance(budget, float):
        return trace.resident_bytes + extra_bytes + int(budget * (plain_peak_bytes - trace.resident_bytes))
    memory_bytes, name = _memory_of(trace)
    if budget == "auto":
        if memory_bytes is not None:
            return int(memory_bytes * _AUTO_MARGIN)
        if not has_device(trace.device):
            raise BudgetError(
                f'budget "auto" is what the device has free; the step was recorded on {trace.device}, which this machine has not: '
                'give bytes such as "6 GiB" or a fraction such as 0.4'
            )
        return int((device_memory(trace.device)[1] + trace.resident_bytes + extra_bytes) * _AUTO_MARGIN)
    assert isinstance(budget, int)
    if memory_bytes is None and has_device(trace.device):
        memory_bytes = device_memory(trace.device)[0]
    if memory_bytes is not None and budget > memory_bytes:
        raise BudgetError(f"budget {format_bytes(budget)} is above what {name} has, {format_bytes(memory_bytes)}; give at most that")
    return budget


def _memory_of(trace: Trace) -> tuple[int | None, str]:
    """The memory of the device that a step was traced for without being there, None for other steps; with the device's name."""
    described = trace.meta.get("described_device")
    return (None, trace.device) if described is None else (int(trace.meta["memory_bytes"]), described)


def is_here(trace: Trace) -> bool:
    """Whether a step was recorded on a device that this machine has."""
    return "described_device" not in trace.meta and has_device(trace.device)


def has_device(name: str) -> bool:
    """Whether this machine has a device of this name: a profile may come from another one."""
    try:
        kind = torch.device(name)
    except RuntimeError:
        return False
    return kind.type != "cuda" or (torch.cuda.is_available() and (kind.index or 0) < torch.cuda.device_count())


def device_memory(device: str) -> tuple[int, int]:
    """Bytes that a device has in all, and free now."""
    kind = torch.device(device)
    if kind.type == "cuda":
        free, total = torch.cuda.mem_get_info(kind)
        cached = torch.cuda.memory_reserved(kind) - torch.cuda.memory_allocated(kind)
        return total, free + cached
    return physical_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One recorded step. ``trace`` is all that a planner needs of it."""

    trace: Trace

    def save(self, path: str | Path) -> None:
        """Writes the profile to a file, as JSON.

        Raises:
            PlanError: the file cannot be written.
        """
        write_text(path, self.trace.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile from a file.

        Raises:
            PlanError: the file cannot be read or holds no profile of ours.
        """
        return cls(trace=read_file(path, Trace.from_json))

    def explain(self, plan: Plan | None = None) -> Explanation:
        """See ``punar.explain``."""
        return explain(self, plan)

    def timeline(self, plan: Plan | None = None) -> Timeline:
        """The step under a plan, or the plain one, as it is predicted: ``save`` writes it for Perfetto.

        Raises:
            UsageError: the plan is none.
            PlanMismatch: it was made for another step.
        """
        return Timeline.of(_trace_of(self), plan)


def profile(
    model: torch.nn.Module,
    batch: Any,
    loss_fn: LossFn,
    *,
    device: str | Path | None = None,
    optimizer: str | float | None = None,
    shards: int = 1,
    zero_stage: int = 3,
) -> Profile:
    """Runs one step ``loss_fn(model, batch).backward()`` and records it; gradients, buffers and random state are put back.

    The step runs once before it is recorded, so that one-time costs do not count, and three times after it: while a
    step is recorded its operators run beside a memory profiler, and each is timed in those passes instead. Gradients that the model
    has now are taken to be there in the step, as when accumulating.

    With a ``device`` nothing runs: the step is traced on fake tensors, of models of any size, also such as are built under
    ``torch.device("meta")``, and its operators' times are computed; see ``docs/what-fits.md``.

    Args:
        device: a device known by name, such as ``"h100-80gb"``, or the path of a description that ``punar calibrate`` wrote.
        optimizer: whose state is resident: ``"sgd"``, ``"momentum"``, ``"adam"`` or ``"adamw"`` (torch's, in the parameters' dtype),
            or the bytes it has for each number that is trained.
        shards: over how many devices what follows is spread; each has a batch of its own, and ``batch`` is one of them.
        zero_stage: what is spread: 1, the optimizer's state; 2, gradients too; 3, parameters too, as ``torch.distributed.fsdp.fully_shard`` on each
            element of the model's lists of modules does it.

    Raises:
        UsageError: the loss is no scalar tensor, nothing requires a gradient, there is no such device, optimizer or stage, or one of ``optimizer``,
            ``shards`` and ``zero_stage`` was given without a device.
        DataDependentStep: with a device, the step's shapes or its path depend on data.
        PlanError: the device's description is damaged.

    Example:
        >>> import torch, punar
        >>> with torch.device("meta"):
        ...     model, batch = torch.nn.Sequential(torch.nn.Linear(8192, 8192), torch.nn.GELU()), torch.empty(4096, 8192)
        >>> step = punar.profile(model, batch, lambda model, batch: model(batch).sum(), device="h100-80gb", optimizer="adamw")
        >>> step.trace.resident_bytes // 2**20
        896
    """
    check_step(model, loss_fn)
    if device is not None:
        return _profile_for(find_device(device), model, batch, loss_fn, optimizer=optimizer, shards=shards, zero_stage=zero_stage)
    if optimizer is not None or (shards, zero_stage) != (1, 3):
        raise UsageError(
            "asked to profile a step that runs here with `optimizer`, `shards` or `zero_stage`, which are for steps that do not; "
            "give `device` too, or let the optimizer step once before: its state is then counted as it is"
        )
    with restored(model) as before:
        run_step(model, batch, loss_fn)
        before.restore(model)
        trace = _recorded(model, batch, loss_fn, before)
    if trace is None or not trace.saves:
        raise _nothing_saved()
    return Profile(trace=trace)


def _profile_for(
    device: Device, model: torch.nn.Module, batch: Any, loss_fn: LossFn, *, optimizer: str | float | None, shards: int, zero_stage: int
) -> Profile:
    """The profile of a step on a described device."""
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise UsageError(f"asked to spread a step over {shards!r} devices; give a whole number from 1 on")
    if isinstance(zero_stage, bool) or zero_stage not in STAGES:
        raise UsageError(f"asked to spread a step by stage {zero_stage!r} of ZeRO; give one of {', '.join(map(str, STAGES))}")
    is_spread = shards > 1 and zero_stage > 1
    optimizer_bytes = share(optimizer_state_bytes(model, optimizer), shards)
    step = trace_fake(model, batch, loss_fn, device=device.torch_name, optimizer_bytes=optimizer_bytes, has_gradients=not is_spread)
    if step is None:
        raise _nothing_saved()
    trace = sharded(step, model, shards, zero_stage) if is_spread else step.trace
    trace = timed_on(with_scratch(trace) if device.kind == "cuda" else trace, device)
    described = {
        "described_device": device.name,
        "memory_bytes": str(device.memory_bytes),
        "host_bytes_per_s": str(device.host_bytes_per_second),
        "disk_bytes_per_s": str(device.disk_bytes_per_second),
        "shards": str(shards),
    }
    return Profile(trace=replace(trace, meta=trace.meta | described))


OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""How many numbers of a parameter's dtype torch's optimizers keep for each of its own."""


def optimizer_state_bytes(model: torch.nn.Module, optimizer: str | float | None) -> int:
    """What an optimizer keeps for the parameters that are trained. Units: bytes.

    Raises:
        UsageError: it is neither one of those known nor a number of bytes for each trained number.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None:
        return 0
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer] * sum(parameter.nbytes for parameter in trained)
    if isinstance(optimizer, (str, bool)) or not isinstance(optimizer, (int, float)) or not 0 <= optimizer < math.inf:
        raise UsageError(
            f"asked to count the state of the optimizer {optimizer!r}; give one of {', '.join(map(repr, OPTIMIZERS))}, or the bytes it keeps for "
            "each number that is trained, such as 12 for float32 copies and both moments"
        )
    return math.ceil(optimizer * sum(parameter.numel() for parameter in trained))


def _nothing_saved() -> UsageError:
    return UsageError("asked to profile a step, autograd saved nothing in it: there is nothing that could be recomputed")


def check_step(model: object, loss_fn: object) -> None:
    """Raises ``UsageError`` where these cannot be a step's."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"asked to run a step of a model, found {describe_type(model)}; give a torch.nn.Module")
    if not callable(loss_fn):
        raise UsageError(f"asked to run a step, found {describe_type(loss_fn)} in the place of loss_fn; give a function of (model, batch)")


def _recorded(model: torch.nn.Module, batch: Any, loss_fn: LossFn, before: StateSnapshot) -> Trace | None:
    """The step's trace, with the times of the passes after it: those that obey a plan which keeps all."""
    remat = Remat()
    with remat:
        run_step(model, batch, loss_fn)
    remat._session.complete()
    for _ in range(LEARNED_AFTER):
        before.restore(model)
        with remat:
            run_step(model, batch, loss_fn)
    return remat.trace


def solve(profile: Profile, *, budget: Budget, solver: str = "auto", offload: Offloading = None, compress: Compress = EXACT) -> Plan:
    """Makes a plan for a profiled step.

    ``offload``: as ``Remat`` takes it, and as the ``Remat`` that obeys the plan must be given it too; how fast it is, is measured now.
    ``compress``: as ``Remat`` takes it; the one that obeys the plan needs it no more.

    Raises:
        BudgetError: the budget is no budget, or more than the device has.
        InfeasibleBudget: no known plan fits; names the least budget and what holds it.
        UsageError: there is no such solver, or the profile is none, or ``offload`` is no place, or ``compress`` no way to.
        OffloadError: the folder cannot be used.
    """
    check_solver(solver)
    trace, asked = _trace_of(profile), check_budget(budget)
    codecs = codec_channels(trace, asked, solver, check_compress(compress))
    return plan_for(trace, asked, solver, channels=(*_channels_to(offload, trace), *codecs))


def explain(profile: Profile, plan: Plan | None = None) -> Explanation:
    """Says what sets a profiled step's peak, what a plan does about it and why, and what would lower the least peak.

    Without a plan it is the plain step that is explained. The least peak is that of ``budget="min"``, or the plan's where that is lower.

    Raises:
        UsageError: the profile or the plan is none.
        PlanMismatch: the plan was made for another step.

    Example:
        >>> import torch, punar
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
        >>> profile = punar.profile(model, torch.ones(512, 64), lambda model, batch: model(batch).sum())
        >>> explanation = punar.explain(profile)
        >>> sum(holder.bytes for holder in explanation.holders) == explanation.peak.bytes
        True
    """
    trace = _trace_of(profile)
    check_plan(trace, plan)
    if plan is not None:  # a Remat's plan may count more than was there when its step was recorded
        trace = replace(trace, resident_bytes=max(trace.resident_bytes, plan.resident_bytes))
    try:
        return explain_step(trace, plan, plan_for(trace, "min", channels=codec_channels(trace, "min", "auto", EXACT)))
    finally:
        forget_derived()  # the altered steps' too


def _channels_to(offload: Offloading, trace: Trace) -> tuple[Channel, ...]:
    """How fast a place to offload to is: measured now, or as the step's device is described."""
    places, device = check_offload(offload), trace.device
    if places and "described_device" in trace.meta:
        return described_channels(places, device, trace.meta)
    place = opened(places, device)
    if place is None:
        return ()
    place.close()
    return place.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One plan of a frontier, by what is predicted of it. Units: bytes and ns of the whole step.

    ``bound_ns``: a proved lower bound on the time of any plan of at most this peak; ``overhead``: extra time as a ratio to the plain step.
    """

    peak_bytes: int
    time_ns: int
    bound_ns: int
    overhead: float
    _trace: Trace = field(repr=False)
    _channels: tuple[Channel, ...] = field(default=(), repr=False)

    @property
    def plan(self) -> Plan:
        """The plan itself, made when it is asked for."""
        return solve_trace(self._trace, self.peak_bytes, channels=self._channels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The least time that ``auto`` found for each peak, from the least peak worth its time to the plain step: peaks rise, times fall.

    Example:
        >>> import torch, punar
        >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)])
        >>> frontier = punar.frontier(punar.profile(model, torch.ones(512, 64), lambda model, batch: model(batch).sum()))
        >>> frontier.points[-1].overhead
        0.0
        >>> frontier.at(frontier.points[0].peak_bytes) == frontier.points[0].plan
        True
    """

    profile: Profile
    points: tuple[FrontierPoint, ...]
    _channels: tuple[Channel, ...] = field(default=(), repr=False)

    def at(self, budget: Budget) -> Plan:
        """The plan that ``punar.solve`` gives for a budget.

        Raises:
            BudgetError: the budget is no budget, or more than the device has.
            InfeasibleBudget: no known plan fits; names the least budget and what holds it.
        """
        return plan_for(self.profile.trace, check_budget(budget), channels=self._channels)

    def __str__(self) -> str:
        rows = [
            (format_bytes(point.peak_bytes), format_seconds(point.time_ns), f"{point.overhead:.1%}", format_seconds(point.bound_ns))
            for point in self.points
        ]
        return format_columns(("predicted peak", "predicted time", "extra", "no plan below"), rows)


def frontier(profile: Profile, *, offload: Offloading = None, compress: Compress = EXACT) -> Frontier:
    """All that memory costs in time for a profiled step: the whole curve at once, as quick as one ``punar.solve``.

    Its plans take about one extra forward pass at most; a budget below its first point may still be met when ``at`` is asked.
    ``offload``, ``compress``: as ``Remat`` takes them; without the first, and with ``()`` for the second, the curve is that of recomputing alone.

    Raises:
        UsageError: this is no profile, or ``offload`` is no place, or ``compress`` no way to.
        OffloadError: the folder cannot be used.
    """
    trace = _trace_of(profile)
    channels = (*_channels_to(offload, trace), *codec_channels(trace, "min", "auto", check_compress(compress)))
    points = frontier_points(trace, channels)
    plain_ns = max(trace.plain_time_ns, 1)
    return Frontier(
        profile=profile,
        points=tuple(
            FrontierPoint(
                peak_bytes=p.peak_bytes,
                time_ns=p.time_ns,
                bound_ns=bound,
                overhead=p.time_ns / plain_ns - 1,
                _trace=trace,
                _channels=channels,
            )
            for p, bound in points
        ),
        _channels=channels,
    )


def _trace_of(profile: Profile) -> Trace:
    if not isinstance(profile, Profile) or not isinstance(profile.trace, Trace):
        raise UsageError(
            f"asked for a profiled step, found {describe_type(profile)}; give what punar.profile or punar.Profile.load returned"
        )
    return profile.trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Whether a step under a plan computes what the plain step does.

    ``differences``: what is not equal bit for bit. ``is_deterministic``: two plain steps agree; where they do not, a difference
    shows nothing about the plan. ``gradient_errors``: of a plan that rounds values, which is never identical, for each parameter how far its gradient is
    from the plain step's, as the norm of the difference in parts of the norm; ``gradient_error``: of all together.
    ``measured_peak_bytes``, ``replayed_operators``, ``recomputed_bytes``: of the step under the plan, as it ran.
    """

    is_identical: bool
    is_deterministic: bool
    differences: tuple[str, ...]
    plan: Plan
    measured_peak_bytes: int
    replayed_operators: int
    recomputed_bytes: int
    gradient_errors: dict[str, float] = field(default_factory=dict)
    gradient_error: float = 0.0

    @property
    def is_as_promised(self) -> bool:
        """Whether the step does what its plan says: all is identical, or only gradients differ, as far as rounding explains it, where it was asked to round."""
        others = [name for name in self.differences if not name.startswith("gradient of ")]
        return self.is_identical or bool(self.plan.lossy_codecs and not others and self.gradient_error < 1)

    def to_dict(self) -> dict[str, Any]:
        """The verification as JSON-able data, with the plan's predicted peak and its budget in the plan's place."""
        names = ("is_identical", "is_deterministic", "is_as_promised", "measured_peak_bytes", "replayed_operators", "recomputed_bytes")
        return {
            **{name: getattr(self, name) for name in (*names, "gradient_error", "gradient_errors")},
            "differences": list(self.differences),
            "predicted_peak_bytes": self.plan.peak_bytes,
            "budget_bytes": self.plan.budget_bytes,
            "text": str(self),
        }

    def __str__(self) -> str:
        peaks = f"peak {format_bytes(self.measured_peak_bytes)} measured, {format_bytes(self.plan.peak_bytes)} predicted"
        replays = f"{count(self.replayed_operators, 'operator')} replayed, {format_bytes(self.recomputed_bytes)} recomputed"
        if self.is_identical:
            return f"identical: loss, gradients, buffers and random state are the plain step's bit for bit ({peaks}; {replays})"
        if self.is_as_promised:
            worst = max(self.gradient_errors, key=lambda name: self.gradient_errors[name])
            return (
                f"rounded as asked ({', '.join(self.plan.lossy_codecs)}): gradients are {self.gradient_error:.2g} of their norm from the plain step's, "
                f"at most {self.gradient_errors[worst]:.2g} ({worst}); loss, buffers and random state are its bit for bit ({peaks}; {replays})"
            )
        listed = ", ".join(self.differences[:5]) + (f" and {len(self.differences) - 5} more" if len(self.differences) > 5 else "")
        cause = (
            "the plan's step differs from the plain one"
            if self.is_deterministic
            else "two plain steps differ already: the model is not deterministic"
        )
        return f"NOT identical: {cause}: {listed} ({peaks}; {replays})"

    def raise_if_different(self) -> None:
        """Raises ``VerificationError`` where the step is not identical, nor rounded as asked."""
        if not self.is_as_promised:
            raise VerificationError(f"asked to verify a plan: {self}. Use torch.use_deterministic_algorithms(True) to find the operator")


def verify(
    model: torch.nn.Module,
    batch: Any,
    loss_fn: LossFn,
    *,
    budget: Budget = None,
    plan: Plan | None = None,
    offload: Offloading = None,
    compress: Compress = EXACT,
) -> Verification:
    """Runs the step plain, twice, and under a plan; compares loss, gradients, buffers and random state bit for bit.

    With neither budget nor plan the least budget is taken. The model, its gradients and the random state are put back.
    ``offload``, ``compress``: as ``Remat`` takes them; of a plan that rounds, the gradients' error is told.

    Raises:
        UsageError: both a budget and a plan were given, the loss is no scalar tensor, or nothing requires a gradient.
        InfeasibleBudget: no known plan fits the budget.
        PlanMismatch: the plan was made for another step.
    """
    check_step(model, loss_fn)
    if plan is not None and budget is not None:
        raise UsageError("asked to verify both a budget and a plan; a plan has its budget already: give one of the two")
    if plan is None:
        plan = solve(profile(model, batch, loss_fn), budget="min" if budget is None else budget, offload=offload, compress=compress)
    with restored(model) as before:
        plain, again = (_outcome(model, batch, loss_fn, before) for _ in range(2))
        remat = Remat(plan=plan, offload=offload)
        checked = _outcome(model, batch, loss_fn, before, remat)
    measured_peak_bytes = remat.stats[-1].measured_peak_bytes
    assert measured_peak_bytes is not None
    noise, found = _differences(plain, again), _differences(plain, checked)
    errors, error = gradient_errors(plain[1], checked[1]) if plan.lossy_codecs else ({}, 0.0)
    return Verification(
        is_identical=not found,
        is_deterministic=not noise,
        differences=tuple(found),
        plan=plan,
        measured_peak_bytes=measured_peak_bytes,
        replayed_operators=remat.stats[-1].replayed_operators,
        recomputed_bytes=remat.stats[-1].recomputed_bytes,
        gradient_errors=errors,
        gradient_error=error,
    )


def _outcome(
    model: torch.nn.Module, batch: Any, loss_fn: LossFn, before: StateSnapshot, remat: Remat | None = None
) -> tuple[torch.Tensor, StateSnapshot]:
    before.restore(model)
    if remat is None:
        loss = run_step(model, batch, loss_fn)
    else:
        with remat:
            loss = run_step(model, batch, loss_fn)
        if not remat._session.is_plan_followed:
            raise PlanMismatch(
                "asked to verify a plan, the step took another path than the plan was made for: make a plan for this model and shape"
            )
    return loss, StateSnapshot.take(model)


def _differences(a: tuple[torch.Tensor, StateSnapshot], b: tuple[torch.Tensor, StateSnapshot]) -> list[str]:
    return ([] if bytes_equal(a[0], b[0]) else ["loss"]) + a[1].differences(b[1])


__all__ = [
    "Explanation",
    "Frontier",
    "FrontierPoint",
    "InfeasibleBudget",
    "Plan",
    "Profile",
    "Remat",
    "Timeline",
    "Verification",
    "explain",
    "frontier",
    "profile",
    "solve",
    "verify",
]
