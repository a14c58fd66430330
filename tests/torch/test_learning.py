"""What does a session learn of times and of bytes from the steps that obey a plan?"""

from __future__ import annotations

import gc
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import punar
from punar.costs import Ledger
from punar.errors import InfeasibleBudget
from punar.plan import Plan
from punar.torch import script as scripts
from punar.torch.script import Script
from punar.torch.session import judged_anew
from tests.torch.models import make_blocks, plain_step


def run(remat: punar.Remat, model: nn.Module, x: Tensor, steps: int) -> None:
    for _ in range(steps):
        model.zero_grad()
        with remat:
            plain_step(model, x)


@pytest.fixture
def trained() -> punar.Remat:
    remat = punar.Remat(budget="min")
    run(remat, make_blocks(), torch.randn(64, 32), 5)
    return remat


def script_of(remat: punar.Remat) -> Script:
    (script,) = remat._session.scripts
    return script


def test_first_passes_are_timed_and_later_ones_ever_more_seldom(trained: punar.Remat) -> None:
    script, timed = script_of(trained), []
    script.timed_ns.extend([1] * 3)
    for script.passes in range(3, 40):
        timed += [script.passes + 1] if script.is_timed else []
    assert timed == [4, 8, 16, 32]


def test_another_plan_is_timed_anew_but_not_the_same_one_beside_other_bytes(trained: punar.Remat) -> None:
    script = script_of(trained)
    script.passes = 4
    script.timed_ns.extend([1] * 3)
    assert not script.replanned(script.plan, 64).is_timed
    assert script.replanned(replace(script.plan, hold_from=(0,) * len(script.plan.hold_from)), 0).is_timed


def test_a_pass_left_before_its_end_teaches_nothing() -> None:
    """An exception between two layers leaves times of a part of the step."""
    model, x = make_blocks(), torch.randn(64, 32)
    remat = punar.Remat(budget="min")
    run(remat, model, x, 2)
    before = script_of(remat).passes

    def fail() -> None:
        with remat:
            model(x)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert script_of(remat).passes == before


def test_what_replays_and_the_rest_cost_is_learned(trained: punar.Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    """From operators of 1 us each, replays of 3 us each, and 70 us that nothing accounts for."""
    monkeypatch.setattr(scripts, "_FEWEST_REPLAYED", 1)  # how many a plan replays depends on the times it was made with
    script, plan = script_of(trained), trained.plan
    assert plan is not None
    rows = [*script.rows[:-1], *script.backward_rows]
    for row in rows:
        row.time_ns = 1_000
    ledger = Ledger()
    script.timed_ns.clear()
    script.replays_ns.clear()
    script.learn(1_000 * len(rows) + 3_000 * plan.replayed_ops + 70_000, 3_000 * plan.replayed_ops, ledger, is_resized=False)
    trace = script.retimed_trace(ledger)
    assert trace.overhead_ns == 2_000
    known = judged_anew(plan, trace)
    assert known.gap_ns == 70_000
    assert known.plain_time_ns == 1_000 * len(rows)
    assert known.step_time_ns == 1_000 * len(rows) + 3_000 * plan.replayed_ops + 70_000


def test_the_plan_of_a_block_is_the_one_it_obeyed(trained: punar.Remat) -> None:
    """Also where the block's own times led to another plan."""
    assert trained.stats[0].plan is None
    for stats in trained.stats[1:]:
        assert stats.plan is not None
        assert stats.measured_peak_bytes == stats.predicted_peak_bytes == stats.plan.peak_bytes


def test_steps_beside_more_gradients_each_time_are_not_recorded_for_ever() -> None:
    """As where the gradients of inputs are collected: after four numbers of bytes the nearest recorded step stands for all."""
    model, remat, kept = make_blocks(), punar.Remat(budget="min"), []
    for _ in range(8):
        model.zero_grad()
        x = torch.randn(64, 32, requires_grad=True)
        with remat:
            plain_step(model, x)
        kept.append(x.grad)
    assert [stats.is_traced for stats in remat.stats] == [True] * 4 + [False] * 4
    assert remat.stats[-1].replayed_operators > 0


def test_gradients_of_steps_that_obey_a_plan_count_for_the_next_ones() -> None:
    """Accumulation: also where the earlier backward pass was not recorded."""
    model, x, remat = make_blocks(), torch.randn(64, 32), punar.Remat(budget="min")
    for _ in range(3):
        model.zero_grad()
        for _ in range(3):
            with remat:
                plain_step(model, x)
    assert [stats.is_traced for stats in remat.stats] == [True] * 2 + [False] * 7
    for stats in remat.stats[2:]:
        assert stats.measured_peak_bytes in (None, stats.predicted_peak_bytes)  # None: backward ran unwatched


@pytest.mark.parametrize("is_counted_elsewhere", [False, True])
def test_gradients_that_were_made_outside_count(is_counted_elsewhere: bool) -> None:
    """By a step in no ``with`` block, or in another one's: the next is another step than that beside none, and its peak is no lower than what is there."""
    model, x, remat = make_blocks(), torch.randn(64, 32), punar.Remat(budget=0.9)
    for makes_gradients_first in (False, False, True, True):
        model.zero_grad()
        if makes_gradients_first:
            with punar.Remat() if is_counted_elsewhere else nullcontext():
                plain_step(model, x)
        with remat:
            plain_step(model, x)
    assert [stats.is_traced for stats in remat.stats] == [True, False, True, False]
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    assert remat.stats[2].measured_peak_bytes > remat.stats[0].measured_peak_bytes
    assert remat.stats[3].measured_peak_bytes == remat.stats[3].predicted_peak_bytes >= 2 * gradient_bytes


class Routed(nn.Module):
    """Tokens above zero go through a wide expert, so that the bytes of a step depend on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = make_blocks(2)
        self.expert = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(x)
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        return h.index_add(0, rows, self.expert(h[rows]))


def batch_with(routed: int) -> Tensor:
    x = torch.randn(64, 32)
    x[:, 0] = -1.0
    x[:routed, 0] = 1.0
    return x


def test_a_step_that_needs_more_than_predicted_is_given_room_the_next_time() -> None:
    """The budget holds for the greatest step seen, where bytes depend on data."""
    torch.manual_seed(0)
    model, remat = Routed(), punar.Remat(budget="440 KiB")
    run(remat, model, batch_with(20), 3)
    run(remat, model, batch_with(40), 1)
    assert remat.stats[-1].measured_peak_bytes > remat.stats[-1].predicted_peak_bytes
    run(remat, model, batch_with(40), 3)
    assert remat.stats[-1].measured_peak_bytes <= remat.stats[-1].predicted_peak_bytes <= 440 << 10
    assert remat.stats[-1].replayed_operators > 0


def test_room_that_no_plan_leaves_is_told_once_and_training_goes_on() -> None:
    torch.manual_seed(0)
    model, remat = Routed(), punar.Remat(budget="360 KiB")
    run(remat, model, batch_with(2), 2)
    script_of(remat).is_retraced = True  # as when its path was found to vary before
    with pytest.warns(UserWarning, match="operators or sizes differ from step to step, and no plan leaves that room") as told:
        run(remat, model, batch_with(60), 4)
    assert len(told) == 1
    run(remat, model, batch_with(2), 1)
    assert remat.stats[-1].replayed_operators > 0


def test_steps_of_other_sizes_teach_what_they_take_themselves_and_nothing_of_operators() -> None:
    """Where bytes depend on data no step has the sizes of the recorded one, whose times are cold ones."""
    torch.manual_seed(0)
    model, remat = nn.Sequential(Routed(), Routed(), make_blocks(1)), punar.Remat(budget="min")
    for routed in (32, 32, 32, 30, 34, 29, 35, 31):  # the step of 30 is timed, and leaves its script: it is recorded anew, at 34
        run(remat, model, batch_with(routed), 1)
    assert [stats.is_traced for stats in remat.stats] == [True, *[False] * 3, True, *[False] * 3]
    script = script_of(remat)
    assert script.own_times is not None
    op = next(op for op in script.trace.ops if "gelu" in op.signature and "[34, 256]" in op.signature)
    assert len(script.own_times.times_of(op)) >= 3
    assert len(remat._session.ledger.times_of(op)) == 1


def test_backward_is_watched_where_peaks_vary() -> None:
    """Also where the plan holds what varies."""
    torch.manual_seed(0)
    model, remat = Routed(), punar.Remat(budget=0.95)
    for step in range(12):
        run(remat, model, batch_with((24, 48)[step % 2]), 1)
    assert all(stats.measured_peak_bytes is not None for stats in remat.stats)


def test_planning_inside_a_step_is_no_part_of_its_time(trained: punar.Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is made anew at the first operator of a step where more or less is resident than before."""
    session, script = trained._session, script_of(trained)
    script.passes = 0
    script.timed_ns.clear()
    script.drift_bytes += 64
    planner = session.planner

    def slow(*args: Any) -> Plan:
        time.sleep(2.0)
        return planner(*args)

    monkeypatch.setattr(session, "planner", slow)
    run(trained, make_blocks(), torch.randn(64, 32), 1)
    assert 0 < max(script_of(trained).timed_ns) < 1e9


def test_a_step_that_no_plan_keeps_in_its_budget_is_counted_before_that_is_told() -> None:
    model, x, told = make_blocks(), torch.randn(64, 32), []
    remat = punar.Remat(budget="1 KiB", on_step=told.append)
    for _ in range(2):
        with pytest.raises(InfeasibleBudget), remat:
            plain_step(model, x)
    assert len(remat.stats) == len(told) == 2
    assert all(stats.is_traced and stats.evicted_bytes > 0 and stats.measured_peak_bytes > 0 for stats in told)


def test_a_remat_may_end_while_an_optimizer_steps() -> None:
    """torch iterates over the hooks of all optimizers then: it must not find one gone."""
    model, x = make_blocks(2), torch.randn(8, 32)
    ending = [punar.Remat()]
    with ending[0]:
        plain_step(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def end(*_: object) -> None:
        ending.clear()
        gc.collect()

    handle = register_optimizer_step_post_hook(end)
    last = punar.Remat()
    try:
        optimizer.step()
    finally:
        handle.remove()
    assert not ending
    del last


def test_another_thread_may_begin_and_end_steps_that_are_repeated_while_an_optimizer_steps() -> None:
    model, x, steps = make_blocks(2), torch.randn(8, 32), []

    def train_beside(*_: object) -> None:
        thread = threading.Thread(target=lambda: steps.append(punar.Remat().step(plain_step, make_blocks(2), x)))
        thread.start()
        thread.join()

    plain_step(model, x)
    registers = (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    handles = [register(hook) for register in registers for hook in (train_beside, lambda *_: None)]  # one comes after it
    try:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    finally:
        for handle in handles:
            handle.remove()
    assert len(steps) == 2


def test_what_is_said_of_an_infeasible_budget_counts_the_optimizers_state() -> None:
    """Beside what Adam keeps from its first step on; the numbers are those of the whole step, as the budget is."""
    x, least = torch.randn(64, 32), punar.Remat(budget="min")
    run(least, make_blocks(), x, 2)
    assert least.plan is not None
    budget = least.plan.peak_bytes + 1024
    remat, model = punar.Remat(budget=budget), make_blocks()
    optimizer = torch.optim.Adam(model.parameters())
    run(remat, model, x, 2)
    optimizer.step()
    with pytest.raises(InfeasibleBudget) as caught:
        run(remat, model, x, 1)
    assert caught.value.budget_bytes == budget
    assert caught.value.least_bytes > budget
    assert f"({budget} B)" in str(caught.value)
    assert f"Give at least {caught.value.least_bytes} B" in str(caught.value)
