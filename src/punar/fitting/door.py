"""The verb: from what a user asks for to the size that fits best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from punar.api import check_step
from punar.arguments import EXACT, Budget, Compress, LossFn, Offloading, check_budget, check_compress, check_offload, describe_type
from punar.costs import find_device
from punar.described import Spread
from punar.errors import BudgetError, InfeasibleBudget, PlanMismatch, PunarError, UsageError
from punar.fitting.record import GOALS, Fit, Goal, Trial
from punar.fitting.search import largest
from punar.fitting.steps import MakeBatch, Steps, description_of
from punar.torch.rescue import add_note
from punar.torch.state import RandomStates
from punar.units import format_apart, format_bytes

OnTrial = Callable[[Trial], object]

MOST = 1 << 20
"""No larger size is tried where nobody says how large one may be."""

_FIRST: dict[Goal, int] = {"batch": 1, "length": 64, "throughput": 1}
"""The size to begin with."""

_CONFIRMED = 3
"""How many of the fastest candidates are run."""

_CANDIDATES = 8
"""How many sizes are compared by their samples a second."""

_ATTEMPTS = 4
"""How often a size that did not hold what was predicted is followed by the search for a smaller one."""

_LOST = 0.05
"""The part of the budget that is taken to be lost where a real step ran out of memory: how much it would have needed, nobody knows."""


def fit(
    model: torch.nn.Module,
    make_batch: MakeBatch,
    loss_fn: LossFn,
    *,
    budget: Budget = "auto",
    maximize: Goal = "batch",
    device: str | Path | None = None,
    optimizer: str | float | None = None,
    shards: int = 1,
    zero_stage: int = 3,
    offload: Offloading = None,
    compress: Compress = EXACT,
    start: int | None = None,
    multiple_of: int = 1,
    most: int = MOST,
    total: int | None = None,
    optimizer_ns: int = 0,
    trials: int = 24,
    confirm: bool = True,
    on_trial: OnTrial | None = None,
) -> Fit:
    """The largest batch or length whose step fits a budget, or the batch, accumulation and plan of most samples a second.

    Steps are traced without running, as ``profile`` with a device does it, so that a size that is too large costs nothing. A few small sizes are traced, the least
    peak is extrapolated, and the answer and the next larger size have both been traced and planned for. Where the device is here, a real step of the size found
    runs under the plan, and its measured peak decides; the model, its gradients and the random state are put back. A step whose shapes or path depend on
    data runs instead, where the device is here, and is recorded within the budget.

    Args:
        make_batch: ``make_batch(size)`` returns the batch of so many samples, or for ``"length"`` of that length: what ``loss_fn(model, batch)`` takes.
        budget: bytes of the whole step, as an int or a text such as ``"6 GiB"``, or ``"auto"``.
        maximize: ``"batch"`` and ``"length"`` for the largest size, ``"throughput"`` for the most samples a second.
        device: a device that need not be here; None for the one that the model is on.
        optimizer: whose state is counted beside what is there; with or without a device. shards, zero_stage: as for ``profile``, with a device.
        offload, compress: as ``solve`` takes them.
        start: the size to begin with; 1 where nobody says, or a length of 64. multiple_of: what sizes are multiples of. most: the largest that may be.
        total: with ``"throughput"``, samples of an optimizer's step: only batches that divide it are compared, accumulated as often as needed. Without it, batches are
            compared alone and accumulated to at least the largest that fits.
        optimizer_ns: with ``"throughput"``, what an optimizer's step takes, which is added once for all batches that are accumulated.
        trials: how many sizes are traced at most in a search for the largest.
        confirm: whether to run a real step where the device is here.
        on_trial: called with each ``Trial`` when it is made.

    Returns:
        A ``Fit``.

    Raises:
        InfeasibleBudget: the smallest size does not fit; names the least budget that would do for it.
        BudgetError: the budget is no number of bytes, or more than the device has.
        UsageError: an argument is none of these, or two sizes give the same step.
        DataDependentStep: the step's shapes or its path depend on data, and ``device`` is given.

    Example:
        >>> import torch, punar
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1))
        >>> def make_batch(size):
        ...     return torch.empty(size, 1024, device="meta")
        >>> found = punar.fit(model, make_batch, lambda m, x: m(x).sum(), budget="1 GiB", device="h100-80gb", multiple_of=256)
        >>> found.size % 256, found.peak_bytes <= 2**30 < found.next_peak_bytes
        (0, True)
    """
    check_step(model, loss_fn)
    if not callable(make_batch):
        raise UsageError(
            f"asked what fits, found {describe_type(make_batch)} in the place of make_batch; give a function of the size that returns a batch"
        )
    if maximize not in GOALS:
        raise UsageError(f"asked to maximize {maximize!r}; give one of {', '.join(map(repr, GOALS))}")
    start = _FIRST[maximize] if start is None else start
    sizes = {"start": start, "multiple_of": multiple_of, "most": most, "trials": trials, "total": 1 if total is None else total}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"asked what fits with {name}={value!r}; give a whole number from 1 on")
    if most < multiple_of:
        raise UsageError(f"asked for multiples of {multiple_of}, found none up to most={most}; make them agree")
    if total is not None and total % multiple_of:
        raise UsageError(f"asked for multiples of {multiple_of}, which total={total} is not; make them agree")
    if isinstance(optimizer_ns, bool) or not isinstance(optimizer_ns, int) or optimizer_ns < 0:
        raise UsageError(f"asked what fits with optimizer_ns={optimizer_ns!r}; give a whole number of nanoseconds from 0 on")
    if on_trial is not None and not callable(on_trial):
        raise UsageError(f"asked to tell each trial to {on_trial!r}; give a function of a trial")
    if not isinstance(confirm, bool):
        raise UsageError(f"asked what fits with confirm={confirm!r}; give True or False")
    if maximize != "throughput" and (total is not None or optimizer_ns):
        raise UsageError(f'asked to maximize {maximize!r} with `total` or `optimizer_ns`, which are for "throughput"; leave them out')
    if device is None and (shards, zero_stage) != (1, 3):
        raise UsageError("asked what fits here with `shards` or `zero_stage`, which are for devices that are not here; give `device` too")
    spread = Spread(optimizer=optimizer, shards=shards, zero_stage=zero_stage)
    spread.check()
    check_offload(offload)
    place = _place_of(model)
    steps = Steps(
        model=model,
        make_batch=make_batch,
        loss_fn=loss_fn,
        spread=spread,
        offload=offload,
        compress=check_compress(compress),
        device=description_of(place) if device is None else find_device(device),
        is_here=device is None,
        place=str(place),
        optimizer_ns=optimizer_ns,
    )
    fitting = _Fitting(
        steps=steps,
        goal=maximize,
        budget=_check_bytes(budget),
        unit=multiple_of,
        first=-(-start // multiple_of),
        most=(most if total is None else min(most, total)) // multiple_of,
        total=total,
        looks=trials,
        is_confirming=confirm and device is None,
        on_trial=on_trial,
    )
    random_states = RandomStates.take()  # make_batch may draw
    try:
        return fitting.answered()
    finally:
        random_states.restore()


def _check_bytes(budget: Budget) -> str | int:
    """The budget, which must not depend on the size.

    Raises:
        BudgetError: it is a share of a step's own peak, or no budget at all.
    """
    asked = check_budget(budget)
    if isinstance(asked, float) or asked is None or asked == "min":
        raise BudgetError(f'asked what fits the budget {budget!r}, which grows with the step; give bytes such as "6 GiB", or "auto"')
    return asked


def _place_of(model: torch.nn.Module) -> torch.device:
    """The device of a model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@dataclass(slots=True, kw_only=True)
class _Fitting:
    """One search. Sizes are ``unit`` times what the bracket counts; ``first`` and ``most`` are such counts."""

    steps: Steps
    goal: Goal
    budget: str | int
    unit: int
    first: int
    most: int
    total: int | None
    looks: int
    is_confirming: bool
    on_trial: OnTrial | None
    trials: dict[tuple[int, int], Trial] = field(default_factory=dict)
    fingerprints: dict[str, int] = field(default_factory=dict)

    def answered(self) -> Fit:
        """What was asked for. Where real steps take another path than those that were traced, as where a mask is made once and kept, by steps that run."""
        find = self.throughput if self.goal == "throughput" else self.largest
        try:
            return find()
        except PlanMismatch:
            if self.steps.unknown:
                raise
            self.steps.unknown = "its path"
            self.trials.clear()
            self.fingerprints.clear()
            return find()

    def largest(self) -> Fit:
        """The largest size that fits."""
        best = self.search()
        for _ in range(_ATTEMPTS if self.is_confirming else 0):
            ran = self.run(best, is_timed=False)
            if ran.is_feasible:
                return self.answer(ran)
            self.learn_excess(ran)
            self.trials = {key: trial for key, trial in self.trials.items() if trial.plan is None}
            best = self.search()
        if self.is_confirming:
            raise InfeasibleBudget(
                f"asked what fits {format_bytes(self.steps.budget_bytes)}, found that real steps need more than is predicted, at {_ATTEMPTS} sizes in turn: "
                "others may be using the device; give a lower budget, or leave out the real step (confirm=False)",
                budget_bytes=self.steps.budget_bytes,
                least_bytes=self.steps.budget_bytes + self.steps.excess_bytes(best.size),
            )
        return self.answer(best)

    def throughput(self) -> Fit:
        """The trial of most samples a second, of sizes up to the largest that fits."""
        widest = self.search(learns_times=True)
        found = [self.trial(size, micro_batches) for size, micro_batches in self.candidates(widest.size)]
        ranked = _ranked(found)
        for candidate in ranked[:_CONFIRMED] if self.is_confirming else ():
            self.run(candidate, is_timed=True)
        ranked = _ranked([self.trials[trial.size, trial.micro_batches] for trial in ranked])
        if not ranked:
            raise InfeasibleBudget(
                f"asked for the most samples a second within {format_bytes(self.steps.budget_bytes)}, found no batch whose real step stayed within: "
                "give a lower budget, so that more is left for what is not predicted",
                budget_bytes=self.steps.budget_bytes,
                least_bytes=min(trial.least_peak_bytes for trial in self.trials.values() if trial.least_peak_bytes is not None),
            )
        return self.answer(ranked[0], tuple(ranked))

    def search(self, *, learns_times: bool = False) -> Trial:
        """The trial of the largest size that fits, by prediction.

        Raises:
            InfeasibleBudget: none does.
        """
        if not self.steps.budget_bytes:
            self.begin(learns_times=learns_times)
        bracket = largest(
            lambda count: self.least_peak(count * self.unit),
            budget_bytes=self.steps.budget_bytes,
            first=self.first,
            most=self.most,
            degree=2 if self.goal == "length" else 1,
            trials=self.looks,
        )
        if bracket.fits:
            return self.trials[bracket.fits * self.unit, 1]
        smallest = min(self.trials.values(), key=lambda trial: trial.size)
        least_bytes = smallest.least_peak_bytes
        budget_bytes = self.steps.budget_bytes
        if least_bytes is None:
            asked, found, give = format_bytes(budget_bytes), "ran out of memory when it was recorded", "more"
            least_bytes = budget_bytes + 1
        else:
            asked, needed = format_apart(budget_bytes, least_bytes)
            found = f"needs {needed} at least, under the plan of least peak that is known"
            give = f"at least {least_bytes} B"
        smaller = ", or a smaller `start` or `multiple_of`" if smallest.size > 1 else ""
        raise InfeasibleBudget(
            f"asked what fits {asked}, found that size {smallest.size} {found}. Give {give}{smaller}",
            budget_bytes=budget_bytes,
            least_bytes=least_bytes,
        )

    def begin(self, *, learns_times: bool) -> None:
        """Reads the budget at the first size, and measures it where times matter."""
        size = min(self.first, self.most) * self.unit
        self.steps.learns_times = learns_times
        with _at(size):
            trace = self.steps.traced(size)
        assert trace is not None
        self.steps.set_budget(trace, self.budget)
        if learns_times:
            self.steps.learn_times(size, trace)

    def least_peak(self, size: int) -> int:
        """What the search looks at."""
        peak_bytes = self.trial(size, 1).least_peak_bytes
        return self.steps.budget_bytes + 1 if peak_bytes is None else peak_bytes

    def trial(self, size: int, micro_batches: int) -> Trial:
        """The trial of a size, made once."""
        known = self.trials.get((size, micro_batches))
        if known is not None:
            return known
        with _at(size):
            trace = self.steps.traced(size, is_accumulating=micro_batches > 1)
        other = size if trace is None else self.fingerprints.setdefault(trace.fingerprint, size)
        if other != size:
            raise UsageError(
                f"asked what fits, found that make_batch({other}) and make_batch({size}) give the same step: it must return a batch of the size it is given; "
                "where it pads to a multiple, give that as `multiple_of`"
            )
        return self.keep(self.steps.trial(size, trace, micro_batches=micro_batches))

    def run(self, trial: Trial, *, is_timed: bool) -> Trial:
        """The trial once a real step of it has run."""
        with _at(trial.size):
            return self.keep(self.steps.run(trial, is_timed=is_timed))

    def keep(self, trial: Trial) -> Trial:
        self.trials[trial.size, trial.micro_batches] = trial
        if self.on_trial is not None:
            self.on_trial(trial)
        return trial

    def learn_excess(self, ran: Trial) -> None:
        """A real step had more than was predicted: so have others, in proportion to their size."""
        assert ran.plan is not None
        measured_bytes = ran.measured_peak_bytes
        more_bytes = int(_LOST * self.steps.budget_bytes) if measured_bytes is None else measured_bytes - ran.plan.peak_bytes
        self.steps.excess_of_one = (self.steps.excess_bytes(ran.size) + more_bytes) / ran.size

    def candidates(self, widest: int) -> list[tuple[int, int]]:
        """What is compared by samples a second: sizes, and how many batches of each are accumulated."""
        if self.total is not None:
            shares = [size for size in range(self.unit, widest + 1, self.unit) if self.total % size == 0]
            return [(size, self.total // size) for size in shares[-_CANDIDATES:]]
        halves = {widest // 2**times // self.unit * self.unit for times in range(_CANDIDATES - 1)} - {0}
        sizes = {*halves, *({self.widest_plain()} - {0})}
        return [(size, count) for size in sorted(sizes) for count in sorted({1, -(-widest // size)})]

    def widest_plain(self) -> int:
        """About the largest size that fits as it is, by the plain peaks of two sizes; 0 where none does."""
        known = sorted(
            (trial.size, trial.plain_peak_bytes)
            for trial in self.trials.values()
            if trial.micro_batches == 1 and trial.plain_peak_bytes is not None
        )
        (small, low), (large, high) = known[0], known[-1]
        if high <= low:
            return 0
        size = small + (self.steps.budget_bytes - low) * (large - small) // (high - low)
        return min(max(size, 0), large) // self.unit * self.unit

    def answer(self, best: Trial, candidates: tuple[Trial, ...] = ()) -> Fit:
        """All that was found, around the best trial."""
        assert best.plan is not None
        larger = self.trials.get((best.size + self.unit, 1))
        is_last = larger is not None and not larger.is_feasible
        return Fit(
            maximize=self.goal,
            device=self.steps.place if self.steps.is_here else self.steps.device.name,
            budget_bytes=self.steps.budget_bytes,
            size=best.size,
            micro_batches=best.micro_batches,
            plan=best.plan,
            peak_bytes=best.plan.peak_bytes,
            measured_peak_bytes=best.measured_peak_bytes,
            per_second=best.per_second,
            is_measured=best.measured_ns is not None,
            next_size=larger.size if larger is not None and is_last else None,
            next_peak_bytes=larger.least_peak_bytes if larger is not None and is_last else None,
            trials=tuple(sorted(self.trials.values(), key=lambda trial: (trial.size, trial.micro_batches))),
            candidates=candidates,
            unknown=self.steps.unknown,
        )


@contextmanager
def _at(size: int) -> Iterator[None]:
    """Adds to an error of the user's code which size it was."""
    try:
        yield
    except PunarError:
        raise
    except Exception as error:
        add_note(
            error, f"punar.fit had come to size {size}. Sizes that the step cannot take are left out by `start`, `multiple_of` and `most`."
        )
        raise


def _ranked(trials: list[Trial]) -> list[Trial]:
    """Those that fit, measured ones first, the most a second first; of equal ones the one of less memory."""
    feasible = [trial for trial in trials if trial.is_feasible]
    return sorted(feasible, key=lambda trial: (trial.measured_ns is None, -trial.per_second, trial.plan.peak_bytes if trial.plan else 0))
