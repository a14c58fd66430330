"""``verify``: what a step under a plan computes, beside the plain one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from punar.api import check_step, profile, solve
from punar.arguments import EXACT, Budget, Compress, LossFn, Offloading, check_compress
from punar.errors import PlanMismatch, UsageError, VerificationError
from punar.markup import html_table
from punar.plan import Plan
from punar.remat import Remat
from punar.reporting.report import count
from punar.torch.state import StateSnapshot, bytes_equal, gradient_errors, restored, run_step
from punar.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Whether a step under a plan computes what the plain step does.

    ``differences``: what is not equal bit for bit. ``is_deterministic``: two plain steps agree; where they do not, a difference
    shows nothing about the plan. ``gradient_errors``: of a plan that rounds values, which is never identical, for each parameter how far its gradient is
    from the plain step's, as the norm of the difference in parts of the norm; ``gradient_error``: of all together.
    ``not_used``: the ways to round that were asked for and that the plan does not go, since they would not pay.
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
    not_used: tuple[str, ...] = ()

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
            "not_used": list(self.not_used),
            "predicted_peak_bytes": self.plan.peak_bytes,
            "budget_bytes": self.plan.budget_bytes,
            "text": str(self),
        }

    def __str__(self) -> str:
        peaks = f"peak {format_bytes(self.measured_peak_bytes)} measured, {format_bytes(self.plan.peak_bytes)} predicted"
        replays = f"{count(self.replayed_operators, 'operator')} replayed, {format_bytes(self.recomputed_bytes)} recomputed"
        if self.is_identical:
            unused = f"; nothing is rounded: {', '.join(self.not_used)} would not pay" if self.not_used else ""
            return f"identical: loss, gradients, buffers and random state are the plain step's bit for bit ({peaks}; {replays}{unused})"
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

    def _repr_html_(self) -> str:
        rows = [
            ("identical bit for bit", "yes" if self.is_identical else "NO"),
            ("as promised", "yes" if self.is_as_promised else "NO"),
            ("deterministic", "yes" if self.is_deterministic else "NO"),
            ("peak, measured", format_bytes(self.measured_peak_bytes)),
            ("peak, predicted", format_bytes(self.plan.peak_bytes)),
            ("operators replayed", str(self.replayed_operators)),
        ]
        return html_table("Verification", ("", "step under the plan"), rows, notes=(str(self),))

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
    asked: tuple[str, ...] = ()
    if plan is None:
        asked = tuple(option for option in check_compress(compress) if option not in EXACT)
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
        not_used=tuple(option for option in asked if option not in plan.lossy_codecs),
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
