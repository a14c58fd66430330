"""Does a report say what was planned and measured?"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace

import pytest

from punar.plan import Plan, Skeleton
from punar.reporting import Report
from punar.reporting.report import count, measure

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Step:
    measured_peak_bytes: int
    time_ns: int
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    replayed_operators: int = 0
    moved_bytes: int = 0
    coded_bytes: int = 0
    evicted_bytes: int = 0
    is_traced: bool = False
    predicted_peak_bytes: int | None = None
    plan: Plan | None = None


PLAN = Plan(
    fingerprint="f" * 32,
    solver="greedy",
    budget_bytes=320 * MIB,
    peak_bytes=312 * MIB,
    plain_peak_bytes=900 * MIB,
    time_ns=5_500_000,
    plain_time_ns=5_000_000,
    kept_bytes=92 * MIB,
    recomputed_bytes=84 * MIB,
    replayed_ops=9,
    resident_bytes=100 * MIB,
    source_bytes=90 * MIB,
    bound_ns=5_200_000,
    gap_ns=400_000,
    hold_from=(0,),
    skeleton=Skeleton(**{field.name: "" if field.name == "signature" else () for field in fields(Skeleton)}),  # type: ignore[arg-type]
)


STEPS = (
    Step(measured_peak_bytes=900 * MIB, time_ns=9_000_000, is_traced=True),
    Step(measured_peak_bytes=310 * MIB, time_ns=5_000_000, kept_bytes=90 * MIB, recomputed_bytes=80 * MIB, replayed_operators=7, plan=PLAN),
    Step(measured_peak_bytes=300 * MIB, time_ns=4_000_000, kept_bytes=91 * MIB, recomputed_bytes=82 * MIB, replayed_operators=8, plan=PLAN),
    Step(measured_peak_bytes=305 * MIB, time_ns=6_000_000, kept_bytes=92 * MIB, recomputed_bytes=84 * MIB, replayed_operators=9, plan=PLAN),
)


def make_report(*, budget: object = 0.3, steps: tuple[Step, ...] = STEPS) -> Report:
    return Report.of_steps(steps, device="cpu", budget=budget, plan=PLAN)


def test_measured_is_highest_peak_median_time_and_last_counts() -> None:
    report = make_report()
    assert report.obeyed is not None
    assert report.traced is not None
    assert (report.obeyed.steps, report.traced.steps) == (3, 1)
    assert report.obeyed.peak_bytes == 310 * MIB
    assert report.obeyed.time_ns == 5_000_000
    assert (report.obeyed.kept_bytes, report.obeyed.recomputed_bytes, report.obeyed.replayed_operators) == (92 * MIB, 84 * MIB, 9)


@pytest.mark.parametrize(
    "line",
    [
        "punar report, device cpu, budget 0.3 = 320.0 MiB of the whole step, solver greedy",
        "peak, whole step    312.0 MiB  310.0 MiB",
        "time of a step        5.90 ms    5.00 ms",
        "operators, extra        10.0%          -",
        "operators replayed          9          9",
        "measured: highest peak and median time of 3 steps",
        "traced: 1 step, median 9.00 ms, not counted above",
        "no plan at this budget can be faster than 5.20 ms (proved)",
    ],
)
def test_text_says(line: str) -> None:
    assert line in str(make_report()).splitlines()


def test_report_before_any_step() -> None:
    text = str(Report.of_steps((), device="cpu", budget="min", plan=None))
    assert text == "punar report, device cpu, budget min\nno step has finished yet"


def test_dict_is_json() -> None:
    body = json.loads(json.dumps(make_report().to_dict()))
    assert body["plan"]["peak_bytes"] == 312 * MIB
    assert body["obeyed"]["peak_bytes"] == 310 * MIB
    assert "hold_from" not in body["plan"]


def test_nothing_measured_is_none() -> None:
    assert measure([]) is None


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps")])
def test_count(number: int, text: str) -> None:
    assert count(number, "step") == text


def test_steps_under_other_plans_are_not_mixed_in() -> None:
    """A short batch's plan predicts nothing of a long one."""
    short = replace(PLAN, fingerprint="0" * 32, peak_bytes=130 * MIB)
    other = Step(measured_peak_bytes=125 * MIB, time_ns=1_000, plan=short, predicted_peak_bytes=130 * MIB)
    report = make_report(steps=(other, *STEPS))
    assert report.obeyed is not None
    assert report.others is not None
    assert (report.obeyed.steps, report.others.steps) == (3, 1)
    assert "1 step under other plans, of other shapes or times: highest peak 125.0 MiB measured, 130.0 MiB predicted" in str(report)


def test_the_plan_shown_is_the_one_obeyed() -> None:
    """A plan made anew after the last step has been measured by none."""
    newest = replace(PLAN, peak_bytes=100 * MIB)
    report = Report.of_steps(STEPS, device="cpu", budget=0.3, plan=newest)
    assert report.plan == PLAN


def test_times_learned_anew_do_not_make_another_plan() -> None:
    learned = replace(PLAN, time_ns=6_000_000, plain_time_ns=5_200_000)
    report = make_report(steps=(*STEPS[:2], replace(STEPS[2], plan=learned)))
    assert report.obeyed is not None
    assert report.obeyed.steps == 2
    assert report.others is None


def test_a_plan_that_no_step_was_made_for_is_told() -> None:
    report = Report.of_steps((Step(measured_peak_bytes=9 * MIB, time_ns=1),), device="cpu", budget=None, plan=PLAN, is_plan_given=True)
    assert report.obeyed is None
    text = str(report)
    assert text.startswith("punar report, device cpu, budget of the plan = 320.0 MiB")
    assert "1 step without a plan made for it: nothing was recomputed, highest peak 9.0 MiB measured" in text
