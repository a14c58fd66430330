"""``Targets``: goals that a training step is checked against, by hand or in continuous integration."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Real
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from punar.api import profile, solve
from punar.arguments import EXACT, Budget, Compress, LossFn, Offloading, describe_type
from punar.errors import BudgetError, TargetError
from punar.remat import Remat
from punar.reporting.table import format_columns
from punar.torch.meter import device_of
from punar.torch.operators import tensors_in
from punar.torch.state import restored, run_step
from punar.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from punar.verification import Verification, verify

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WARM_UP = 5
"""Steps of either kind that run before those that are measured."""

Origin = Literal["measured", "predicted", "by construction", "not known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a step was found to do. Units: bytes, parts, nanoseconds; None where it is not known.

    Attributes:
        peak_bytes: the highest peak of the whole step.
        overhead: extra time in parts of the plain step's; ``is_overhead_measured``: or predicted.
        gradient_error: of all gradients together, in parts of their norm, by which they differ from the plain step's; 0.0 where they are it bit for bit.
        step_p95_ns: what 95 of 100 steps take at most.
    """

    peak_bytes: int | None = None
    overhead: float | None = None
    is_overhead_measured: bool = True
    gradient_error: float | None = None
    is_gradient_error_measured: bool = True
    step_p95_ns: int | None = None

    @classmethod
    def of_steps(cls, remat: Remat) -> Found:
        """What a ``Remat`` has measured of its steps that were not recorded ones, which run plain. What only a plain step would show is the plan's word."""
        steps = [stats for stats in remat.stats if not stats.is_traced]
        plans = [stats.plan for stats in steps if stats.plan is not None]
        peaks = [stats.measured_peak_bytes for stats in steps if stats.measured_peak_bytes is not None]
        return cls(
            peak_bytes=max(peaks, default=None),
            overhead=max((plan.overhead for plan in plans), default=None),
            is_overhead_measured=False,
            gradient_error=0.0 if steps and not any(plan.lossy_codecs for plan in plans) else None,
            is_gradient_error_measured=False,
            step_p95_ns=percentile([stats.time_ns for stats in steps], 95) if steps else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One goal, and what was found. ``target``, ``found``: bytes, parts or nanoseconds; ``found``: None where it is not known, which meets nothing.

    ``origin``: whether that was measured, predicted by the plan, or is so by construction.
    """

    name: str
    target: int | float
    found: int | float | None
    is_met: bool
    origin: Origin

    def row(self) -> tuple[str, str, str, str, str]:
        write = _WRITE[self.name]
        if not self.is_met and self.found is not None and write(self.found) == write(self.target):
            write = _WRITE_EXACTLY[self.name]
        return (
            self.name,
            f"at most {write(self.target)}",
            "-" if self.found is None else write(self.found),
            self.origin,
            "met" if self.is_met else "MISSED",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What of some targets is met; ``str()`` is a table."""

    outcomes: tuple[Outcome, ...]

    @property
    def is_met(self) -> bool:
        """Whether all are."""
        return all(outcome.is_met for outcome in self.outcomes)

    @property
    def missed(self) -> tuple[str, ...]:
        """The names of those that are not."""
        return tuple(outcome.name for outcome in self.outcomes if not outcome.is_met)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able data."""
        return {"is_met": self.is_met, "missed": list(self.missed), "outcomes": [asdict(outcome) for outcome in self.outcomes]}

    def __str__(self) -> str:
        return format_columns(("target", "asked", "found", "which is", ""), [outcome.row() for outcome in self.outcomes], left=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a step should reach; None for what does not matter.

    Args:
        peak: the most bytes of the whole step, as an int or a text such as ``"6 GiB"``.
        overhead: the most extra time, in parts of the plain step's: 0.2 is a fifth slower.
        gradient_error: the most that all gradients together may differ from the plain step's, in parts of their norm; 0.0 asks for the same bit for bit.
        step_p95: what 95 of 100 steps may take at most, as seconds or a text such as ``"300 ms"``.

    Raises:
        TargetError: one is none of these, or there is none at all.

    Example:
        >>> import punar
        >>> targets = punar.Targets(peak="6 GiB", overhead=0.2, step_p95="300 ms")
        >>> targets.peak_bytes, targets.step_p95_ns
        (6442450944, 300000000)
    """

    peak: str | int | None = None
    overhead: float | None = None
    gradient_error: float | None = None
    step_p95: str | float | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, field.name) is None for field in fields(self)):
            raise TargetError(f"asked to check targets, found none; give some of {', '.join(_NAMES)}")
        _ = self.peak_bytes, self.step_p95_ns  # which raise where they are none
        for name in ("overhead", "gradient_error"):
            ratio = getattr(self, name)
            if ratio is not None and not _is_number(ratio):
                raise TargetError(f"target {name} is {ratio!r}; give a number from 0 on, such as 0.2 for a fifth")

    @property
    def peak_bytes(self) -> int | None:
        """Units: bytes."""
        if self.peak is None or (type(self.peak) is int and self.peak > 0):
            return self.peak
        if not isinstance(self.peak, str):
            raise TargetError(f'target peak is {self.peak!r}; give a whole number of bytes above 0, or a text such as "6 GiB"')
        try:
            return parse_bytes(self.peak)
        except BudgetError as error:
            raise TargetError(
                f'target peak is {self.peak!r}; give bytes with a unit (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB), such as "6 GiB"'
            ) from error

    @property
    def step_p95_ns(self) -> int | None:
        """Units: nanoseconds."""
        asked = self.step_p95
        if asked is None:
            return None
        found = parse_seconds(asked) if isinstance(asked, str) else _in_ns(asked)
        if not found:
            raise TargetError(
                f'target step_p95 is {asked!r}; give seconds above 0, or a text with a unit (s, ms, us, µs, ns, min), such as "300 ms"'
            )
        return found

    @classmethod
    def load(cls, path: str | Path) -> Targets:
        """Reads a TOML file, whose keys are those of ``Targets``; of a ``pyproject.toml`` the table ``tool.punar.targets``.

        Raises:
            TargetError: the file cannot be read, is no TOML, has other keys, or what they say is no target.
        """
        try:
            body: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise TargetError(f"asked to read targets from {path}, which cannot be: {error}") from error
        if Path(path).name == "pyproject.toml":
            body = _table(path, body)
        if unknown := [key for key in body if key not in _NAMES]:
            raise TargetError(f"{path}: found the key {unknown[0]!r}, which is no target; known are {', '.join(_NAMES)}")
        try:
            return cls(**body)
        except TargetError as error:
            raise TargetError(f"{path}: {error}") from error

    def check(self, found: Remat | Found) -> Check:
        """Compares with what a ``Remat`` has measured so far, or with what was found otherwise.

        What is not known of a target, as the peak where no step was watched, misses it.
        """
        if not isinstance(found, (Remat, Found)):
            raise TargetError(f"asked to check targets against {describe_type(found)}; give a Remat, or what punar.targets.find returned")
        known = Found.of_steps(found) if isinstance(found, Remat) else found
        ratios: tuple[tuple[str, int | float | None, int | float | None, Origin], ...] = (
            ("peak", self.peak_bytes, known.peak_bytes, "measured"),
            ("overhead", self.overhead, known.overhead, "measured" if known.is_overhead_measured else "predicted"),
            (
                "gradient_error",
                self.gradient_error,
                known.gradient_error,
                "measured" if known.is_gradient_error_measured else "by construction",
            ),
            ("step_p95", self.step_p95_ns, known.step_p95_ns, "measured"),
        )
        return Check(
            outcomes=tuple(
                Outcome(
                    name=name,
                    target=target,
                    found=reached,
                    is_met=reached is not None and reached <= target,
                    origin="not known" if reached is None else origin,
                )
                for name, target, reached, origin in ratios
                if target is not None
            )
        )


def find(
    model: torch.nn.Module,
    batch: Any,
    loss_fn: LossFn,
    *,
    budget: Budget = "min",
    steps: int = 20,
    offload: Offloading = None,
    compress: Compress = EXACT,
) -> tuple[Found, Verification]:
    """Verifies a step under a budget, then runs it plain and under the plan in turn, ``steps`` times each after a few that do not count.

    The model, its gradients and the random state are put back. Peaks are the highest of all steps that were watched; times are those of forward and backward.

    Raises:
        TargetError: ``steps`` is no number from 1 on.
        UsageError: the loss is no scalar tensor, or nothing requires a gradient.
        InfeasibleBudget: no known plan fits the budget.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise TargetError(f"asked to measure {steps!r} steps; give a whole number from 1 on")
    plan = solve(profile(model, batch, loss_fn), budget=budget, offload=offload, compress=compress)
    verified = verify(model, batch, loss_fn, plan=plan, offload=offload)
    device = device_of(tensors_in((batch, *model.parameters())))
    remat = Remat(plan=plan, offload=offload)

    def planned() -> None:
        with remat:
            run_step(model, batch, loss_fn)

    times: dict[Callable[[], object], list[int]] = {planned: [], lambda: run_step(model, batch, loss_fn): []}
    with restored(model) as before:
        for _ in range(WARM_UP + steps):
            for run, taken in times.items():
                before.restore(model)
                taken.append(_timed(run, device))
    (own, plain), peaks = (taken[WARM_UP:] for taken in times.values()), [stats.measured_peak_bytes for stats in remat.stats]
    found = Found(
        peak_bytes=max(verified.measured_peak_bytes, *(peak for peak in peaks if peak is not None)),
        overhead=median(own) / median(plain) - 1,
        gradient_error=verified.gradient_error,
        step_p95_ns=percentile(own, 95),
    )
    return found, verified


def _timed(run: Callable[[], object], device: torch.device) -> int:
    """Nanoseconds until the device is done."""
    start = time.perf_counter_ns()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() - start


def percentile(times: Sequence[int], percent: int) -> int:
    """The least of some times that ``percent`` in a hundred of them do not exceed: the nearest rank, which is one that was measured.

    Source: Hyndman and Fan, 1996, "Sample Quantiles in Statistical Packages", definition 1, doi:10.1080/00031305.1996.10473566.
    """
    return sorted(times)[math.ceil(len(times) * percent / 100) - 1]


def _is_number(ratio: object) -> bool:
    return isinstance(ratio, Real) and not isinstance(ratio, bool) and float(ratio) >= 0


def _in_ns(seconds: object) -> int | None:
    return round(float(seconds) * 1e9) if isinstance(seconds, Real) and _is_number(seconds) and math.isfinite(seconds) else None


def _table(path: str | Path, body: dict[str, Any]) -> dict[str, Any]:
    """The table of targets in a ``pyproject.toml``."""
    for name in ("tool", "punar", "targets"):
        body = body.get(name, {})
        if not isinstance(body, dict) or not body:
            raise TargetError(f"asked to read targets from {path}, found no table [tool.punar.targets]; add it, or give another file")
    return body


_NAMES = tuple(field.name for field in fields(Targets))

_WRITE: dict[str, Callable[[Any], str]] = {
    "peak": format_bytes,
    "overhead": "{:.1%}".format,
    "gradient_error": "{:.2g}".format,
    "step_p95": format_seconds,
}

_WRITE_EXACTLY: dict[str, Callable[[Any], str]] = {
    "peak": "{} B".format,
    "overhead": "{:.6%}".format,
    "gradient_error": "{!r}".format,
    "step_p95": "{} ns".format,
}
