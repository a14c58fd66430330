"""Does a step that is recorded under a budget compute what the plain step computes, within the budget, and is the same recorded of it?"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import punar
from punar import planning
from punar.demo.models import make_task
from punar.errors import SavedTensorModified
from punar.ir import Event, EventKind, Trace
from punar.plan import make_plan, plain_plan, simulate
from punar.units import format_bytes
from tests.torch.harness import assert_nothing_lives, bits, no_garbage_collection, train
from tests.torch.models import make_blocks, plain_step, stepping
from tests.torch.programs import Program, programs
from tests.torch.test_random_programs import Tampered, generator_state, maker
from tests.torch.test_simulator_agrees import autocast, convolutions, model_maker, recurrent, transformer
from tests.torch.test_with_block import STEPS, caught_exception, other_hooks_inside

EXAMPLES = int(os.environ.get("PUNAR_EXAMPLES", "30"))

Maker = Callable[[], tuple[nn.Module, Callable[[], Tensor]]]

counted: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _count() -> Iterator[None]:
    """The tests would say nothing if nothing were evicted."""
    yield
    if counted["programs"] >= EXAMPLES // 2:
        assert counted["programs that replayed"] > counted["programs"] // 3, dict(counted)


class OnlineRemat(punar.Remat):
    """Records each step, under so many bytes; plans nothing that drops anything. ``tracers``: who recorded."""

    def __init__(self, first_bytes: int | None) -> None:
        super().__init__()
        self.first_bytes = first_bytes
        self.traces: list[Trace] = []

    def _first_budget(self, device: torch.device, used_bytes: int) -> int | None:
        return self.first_bytes

    def _make_plan(self, trace: Trace, *rest: int) -> punar.Plan:
        self.traces.append(trace)
        return super()._make_plan(trace, *rest)


def canonical(trace: Trace) -> Trace:
    """A trace without what two plain steps differ in: times, and the order of what ends at one moment, as where autocast clears its cache."""
    events: list[Event] = []
    for is_end, group in groupby(trace.events, lambda event: event.kind in (EventKind.FREE, EventKind.RELEASE)):
        between = list(group)
        events += sorted(between, key=attrgetter("kind", "id")) if is_end else between
    return replace(trace, ops=tuple(replace(op, time_ns=0) for op in trace.ops), events=tuple(events))


def plain_peak(trace: Trace) -> int:
    """The plain step's peak."""
    return simulate(trace, (0,) * len(trace.values)).peak_bytes


def recorded(make: Maker, first_bytes: int | None, **kwargs) -> tuple[OnlineRemat, list]:
    remat = OnlineRemat(first_bytes)
    found = train(make, steps=1, remat=remat, **kwargs)
    return remat, found


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(program=programs(), share=st.sampled_from([0.3, 0.6, 0.9]))
def test_random_programs(program: Program, share: float) -> None:
    """Gradients and trace are the plain step's; what is above the budget is no more than an operator makes, or what nothing lowers."""
    try:
        expected = train(maker(program), steps=1, extra=generator_state)
    except RuntimeError:
        assume(False)
    with no_garbage_collection():
        trace = recorded(maker(program), None)[0].traces[0]
        budget_bytes = trace.resident_bytes + int(share * (plain_peak(trace) - trace.resident_bytes))
        peaks = []
        for first_bytes in (0, budget_bytes):
            remat, found = recorded(maker(program), first_bytes, extra=generator_state)
            stats = remat.stats[0]
            counted.update({"programs": 1, "programs that replayed": stats.replayed_operators > 0})
            note(f"{stats.evicted_bytes} B evicted, peak {stats.measured_peak_bytes} B under {first_bytes} B")
            assert not expected[0].differences(found[0])
            assert canonical(remat.traces[0]) == canonical(trace)
            peaks.append(stats.measured_peak_bytes)
            del found
            assert_nothing_lives(remat)
    assert peaks[1] <= max(budget_bytes, peaks[0]) + max(op.peak_bytes for op in trace.ops)


def is_same(make: Maker, first_bytes: int, *, compares: bool = True) -> OnlineRemat:
    """Checks that a step under so many bytes leaves what the plain one does, and has the same trace where that ``compares``."""
    expected = train(make, steps=1)
    trace = recorded(make, None)[0].traces[0]
    with no_garbage_collection():
        remat, found = recorded(make, first_bytes)
        assert not expected[0].differences(found[0])
        del found
        assert_nothing_lives(remat)
    assert not compares or canonical(remat.traces[0]) == canonical(trace)
    return remat


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_whatever_a_step_does(step: Callable[[nn.Module, Tensor], Tensor]) -> None:
    remat = is_same(stepping(step), 0)
    stats = remat.stats[0]
    assert stats.evicted_bytes > 0
    if step not in (other_hooks_inside, caught_exception):  # whose second forward pass obeys what was recorded of the first
        assert stats.replayed_operators > 0


def second_order_of_leaf(model: nn.Module, x: Tensor) -> Tensor:
    """The gradient of the batch is part of the loss: backward saves what it was lent."""
    x = x.clone().requires_grad_()
    out = model(x).square().sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    loss = out + gradient.square().sum()
    loss.backward()
    return loss


def kept_by_the_user(model: nn.Module, x: Tensor) -> Tensor:
    """What the user still has is not dropped, and what was made from it may be."""
    kept = []
    for block in model:
        x = block(x)
        kept.append(x)
    loss = sum(each.square().mean() for each in kept)
    kept.clear()
    loss.backward()
    return loss


def overwritten_activations(model: nn.Module, x: Tensor) -> Tensor:
    """What a lineage reads is overwritten after it was read."""
    for block in model:
        x = block(x)
        y = x * 2
        x = x + y.tanh()
        y.add_(1).mul_(x.detach()).clamp_(max=2)
        x = x + y.sigmoid()
    loss = x.square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("step", [second_order_of_leaf, kept_by_the_user, overwritten_activations], ids=lambda step: step.__name__)
def test_what_backward_and_users_do_with_values(step: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert is_same(stepping(step), 0).stats[0].replayed_operators > 0


@pytest.mark.parametrize("build", [transformer, convolutions, recurrent, autocast], ids=lambda build: build.__name__)
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_models(build: Callable[[], tuple[nn.Module, Tensor]], share: float) -> None:
    make = model_maker(build)
    trace = recorded(make, None)[0].traces[0]
    remat = is_same(make, trace.resident_bytes + int(share * (plain_peak(trace) - trace.resident_bytes)))
    assert remat.stats[0].replayed_operators > 0 or build is recurrent  # of which all is one operator


@pytest.mark.parametrize("name", ["unet", "gpt2"])
def test_a_budget_in_bytes_holds_from_the_first_step_on(name: str) -> None:
    pytest.importorskip("transformers")
    task = make_task(name, steps=1, seed=0)

    def run(remat: punar.Remat) -> list[bytes | None]:
        model = copy.deepcopy(task.model)
        for _ in range(2):
            torch.manual_seed(0)
            model.zero_grad()
            with remat:
                task.loss_fn(model, task.batches[0]).backward()
        return [bits(parameter.grad) for parameter in model.parameters()]

    kept = punar.Remat()
    expected = run(kept)
    assert kept.trace is not None
    peak_bytes, resident_bytes = plain_peak(kept.trace), kept.trace.resident_bytes
    budget_bytes = resident_bytes + int(0.7 * (peak_bytes - resident_bytes))
    remat = punar.Remat(budget=budget_bytes)
    assert run(remat) == expected
    first, second = remat.stats
    assert first.is_traced
    assert first.evicted_bytes > 0
    assert first.measured_peak_bytes <= budget_bytes + max(op.peak_bytes for op in kept.trace.ops)
    assert second.measured_peak_bytes <= budget_bytes
    assert second.evicted_bytes == 0
    assert remat.plan.plain_peak_bytes == peak_bytes  # the plan is of the plain step
    assert f"{format_bytes(first.evicted_bytes)} evicted" in str(first)


class HeavyAtTheEnd(nn.Module):
    """Activations come first, and a weight as large as they are last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = make_blocks(3)
        self.last = nn.Linear(32, 2048)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x).mean(0))


def test_parameters_that_are_read_later_are_counted_from_the_beginning() -> None:
    make = stepping(plain_step, HeavyAtTheEnd)
    trace = recorded(make, None)[0].traces[0]
    budget_bytes = trace.resident_bytes + (plain_peak(trace) - trace.resident_bytes) * 3 // 4
    peak_bytes = is_same(make, budget_bytes).stats[0].measured_peak_bytes
    assert peak_bytes <= budget_bytes + max(op.peak_bytes for op in trace.ops if not op.is_backward)


@pytest.mark.parametrize("budget", ["min", 0.9, None])
def test_a_budget_that_depends_on_the_step_drops_nothing_in_the_first(budget: str | float | None) -> None:
    remat = punar.Remat(budget=budget)
    train(stepping(plain_step), steps=1, remat=remat)
    assert remat.stats[0].evicted_bytes == remat.stats[0].replayed_operators == 0


def test_what_the_device_has_free_is_a_budget_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "device_memory", lambda device: (1 << 30, 300_000))
    remat = punar.Remat(budget="auto")
    train(stepping(plain_step), steps=1, remat=remat)
    assert remat.stats[0].evicted_bytes > 0


def test_a_budget_below_all_is_exceeded_without_an_error_and_told() -> None:
    remat = OnlineRemat(1)
    train(stepping(plain_step), steps=1, remat=remat)
    assert remat.stats[0].measured_peak_bytes > 1
    assert f"evicted {format_bytes(remat.stats[0].evicted_bytes)}" in str(remat.report())


@pytest.mark.parametrize("place", range(5))
def test_raises_where_eager_raises_because_a_saved_tensor_was_modified(place: int) -> None:
    def gradients(remat: punar.Remat | None) -> list[bytes | None] | None:
        torch.manual_seed(0)
        model, batch = Tampered(place), torch.randn(4, 8)
        model.is_tampering = True
        try:
            with remat or nullcontext():
                model(batch).backward()
        except RuntimeError as error:
            if "has been modified by an inplace operation" not in str(error):
                raise
            return None
        return [bits(parameter.grad) for parameter in model.parameters()]

    assert gradients(OnlineRemat(0)) == gradients(None)


def test_weights_changed_before_backward_raise_as_in_eager() -> None:
    model, x = make_blocks(), torch.randn(16, 32)
    remat = OnlineRemat(0)
    with remat:
        loss = model(x).square().mean()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    with pytest.raises(SavedTensorModified, match="modified by an inplace operation"):
        loss.backward()


def test_an_exception_in_backward_leaves_nothing() -> None:
    class Fails(Exception):
        pass

    def fail(gradient: Tensor) -> Tensor:
        raise Fails

    def step(model: nn.Module, x: Tensor) -> None:
        with remat:
            hidden = model[:2](x)
            hidden.register_hook(fail)
            model[2:](hidden).sum().backward()

    remat = OnlineRemat(0)
    with no_garbage_collection():
        with pytest.raises(Fails):
            step(make_blocks(), torch.randn(16, 32))
        assert remat.stats[0].replayed_operators > 0
        assert_nothing_lives(remat)


def test_backward_after_the_block() -> None:
    model, x = make_blocks(), torch.randn(16, 32)
    model.eval()
    model(x).square().mean().backward()
    expected = [bits(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    remat = OnlineRemat(0)
    with remat:
        loss = model(x).square().mean()
    loss.backward()
    assert [bits(parameter.grad) for parameter in model.parameters()] == expected
    assert remat._session.count.operators > 0


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("writes_before_backward", [False, True])
def test_what_numpy_writes_into_the_batch_is_never_a_wrong_gradient(is_recorded: bool, writes_before_backward: bool) -> None:
    """Autograd saves what is made of the batch, and a replay reads the batch: an error where it is another one by then."""
    model, array = make_blocks(3), np.zeros((64, 32), dtype=np.float32)
    x = torch.from_numpy(array)

    def step() -> list[Tensor | None]:
        model.zero_grad()
        torch.manual_seed(0)
        losses = []
        for seed in range(3):  # what comes before the first operator with a gradient is not made again
            array[:] = np.random.default_rng(seed).standard_normal(array.shape)
            losses.append(model((x * 1.5).sin()).square().mean())
            if not writes_before_backward:
                losses.pop().backward()
        if losses:
            torch.stack(losses).sum().backward()
        return [p.grad for p in model.parameters()]

    expected = [gradient.clone() for gradient in step()]
    recorded = punar.Remat()
    for _ in range(2):
        with recorded:
            step()
    trace = recorded.trace
    plan = make_plan(trace, [1] * len(trace.values), solver="none held", budget_bytes=0)
    remat = OnlineRemat(0) if is_recorded else punar.Remat(plan=plan)
    if writes_before_backward:
        with pytest.raises(SavedTensorModified, match="numpy"), remat:
            step()
    else:
        with remat:
            found = step()
        assert remat.stats[0].replayed_operators > 0
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("share", [0.95, 0.7, 0.5])
def test_a_planned_step_of_another_remat_does_not_read_what_a_recorded_one_may_drop(share: float) -> None:
    """Both graphs are alive, and the recorded one has the weights as values that its evictor lets go of at any time."""
    torch.manual_seed(0)
    model, recorded, planned = make_blocks(6), torch.randn(200, 32), torch.randn(256, 32)

    def forward(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return model(x).square().mean()  # type: ignore[no-any-return]

    def backward(*losses: Tensor) -> list[Tensor | None]:
        for loss in losses:
            loss.backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    trace = punar.profile(model, recorded, lambda model, x: model(x).square().mean()).trace
    follower, evicting = punar.Remat(budget="min"), punar.Remat(budget=int(share * plain_plan(trace).peak_bytes))
    for _ in range(3):
        with follower:
            backward(forward(planned))
    with evicting:
        first = forward(recorded)
    with follower:
        second = forward(planned)
    assert evicting.stats[0].evicted_bytes > 0
    found = backward(first, second)
    expected = backward(forward(recorded), forward(planned))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None)
