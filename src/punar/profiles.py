"""``Profile``: one recorded step, and why it needs the memory it does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from punar.arguments import EXACT, describe_type
from punar.errors import UsageError
from punar.ir import Trace
from punar.ir.derived import forget_derived
from punar.plan import Plan
from punar.plan.plan import read_file, write_text
from punar.planning import codec_channels, plan_for
from punar.reporting.explain import Explanation, check_plan, explain_step
from punar.reporting.timeline import Timeline


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
        return Timeline.of(trace_of(self), plan)


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
    trace = trace_of(profile)
    check_plan(trace, plan)
    if plan is not None:  # a Remat's plan may count more than was there when its step was recorded
        trace = replace(trace, resident_bytes=max(trace.resident_bytes, plan.resident_bytes))
    try:
        return explain_step(trace, plan, plan_for(trace, "min", channels=codec_channels(trace, "min", "auto", EXACT)))
    finally:
        forget_derived()  # the altered steps' too


def trace_of(profile: Profile) -> Trace:
    if not isinstance(profile, Profile) or not isinstance(profile.trace, Trace):
        raise UsageError(
            f"asked for a profiled step, found {describe_type(profile)}; give what punar.profile or punar.Profile.load returned"
        )
    return profile.trace
