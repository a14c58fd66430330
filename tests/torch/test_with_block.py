"""Does whatever happens inside and around a ``with`` block leave what the plain step leaves?"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.utils.checkpoint import checkpoint

import punar
from punar.errors import NestedRemat, SavedTensorModified, UsageError
from punar.plan import make_plan
from punar.torch.session import Session
from tests.torch.harness import RandomRemat, assert_nothing_lives, no_garbage_collection, outcome, seed_all, train
from tests.torch.models import WIDTH, make_blocks, plain_step, stepping


def accumulate(model: nn.Module, x: Tensor) -> Tensor:
    total = torch.zeros(())
    for part in x.chunk(3):
        loss = model(part).square().mean() / 3
        loss.backward()
        total = total + loss.detach()
    return total


def evaluate_inside(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model(x[:7])
    loss = model(x).square().mean()
    with torch.no_grad():
        model(x)
    loss.backward()
    with torch.inference_mode():
        model(x)
    return loss


def retain_graph(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def two_losses(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model(x)
    hidden.square().mean().backward(retain_graph=True)
    loss = hidden.abs().mean()
    loss.backward()
    return loss


def double_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()
    return loss


def gradients_only(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        parameter.grad = gradient
    return loss


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    return loss


def autocast_around_backward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
        loss.backward()
    return loss


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    hidden = x.clone().requires_grad_()
    for place, block in enumerate(model):
        hidden = checkpoint(block, hidden, use_reentrant=bool(place % 2))
    loss = hidden.square().mean()
    loss.backward()
    return loss


def other_hooks_inside(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        hidden = model[:2](x)
    loss = model[2:](hidden).square().mean()
    loss.backward()
    return loss


def gradient_hook(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out.register_hook(lambda gradient: gradient * 2)
    loss = out.square().mean()
    loss.backward()
    return loss


def abandoned_forward(model: nn.Module, x: Tensor) -> Tensor:
    model(x[:5])
    return plain_step(model, x)


def caught_exception(model: nn.Module, x: Tensor) -> Tensor:
    try:
        model(x)
        raise KeyError
    except KeyError:
        return plain_step(model, x)


STEPS = [
    plain_step,
    accumulate,
    evaluate_inside,
    retain_graph,
    two_losses,
    double_backward,
    gradients_only,
    autocast,
    autocast_around_backward,
    checkpointed,
    other_hooks_inside,
    gradient_hook,
    abandoned_forward,
    caught_exception,
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("kind", ["min", "random"])
def test_steps_leave_what_the_plain_step_leaves(step, kind: str) -> None:
    plain = train(stepping(step), steps=4)
    for seed in range(1 if kind == "min" else 4):
        remat = punar.Remat(budget="min") if kind == "min" else RandomRemat(seed, 0.3)
        with no_garbage_collection():
            checked = train(stepping(step), steps=4, remat=remat)
            assert_nothing_lives(remat)
        assert [a.differences(b) for a, b in zip(plain, checked, strict=True)] == [[]] * 4
        if kind == "random" and step not in (other_hooks_inside,):
            assert sum(stats.replayed_operators for stats in remat.stats) > 0


def test_memory_falls_to_what_was_predicted() -> None:
    remat = punar.Remat(budget="min")
    train(stepping(plain_step), steps=3, remat=remat)
    traced, *obeyed = remat.stats
    assert traced.is_traced
    assert not any(stats.is_traced for stats in obeyed)
    assert remat.plan is not None
    for stats in obeyed:
        assert stats.measured_peak_bytes == remat.plan.peak_bytes < 0.75 * traced.measured_peak_bytes
        assert stats.replayed_operators == remat.plan.replayed_ops > 0
        assert stats.recomputed_bytes == remat.plan.recomputed_bytes


def test_backward_after_the_block() -> None:
    def run(remat: punar.Remat | None) -> list:
        seed_all(0)
        model, x = make_blocks(), torch.randn(64, 32)
        found = []
        for _ in range(3):
            model.zero_grad()
            if remat is None:
                loss = model(x).square().mean()
            else:
                with remat:
                    loss = model(x).square().mean()
            loss.backward()
            found.append(outcome(model, loss))
        return found

    remat = punar.Remat(budget="min")
    plain, checked = run(None), run(remat)
    assert [a.differences(b) for a, b in zip(plain, checked, strict=True)] == [[]] * 3
    assert remat.plan is not None
    assert remat.plan.replayed_ops > 0
    assert remat.stats[-1].measured_peak_bytes < remat.stats[0].measured_peak_bytes


def test_an_exception_passes_and_the_next_block_works() -> None:
    model, x = make_blocks(), torch.randn(64, 32)
    remat = punar.Remat(budget="min")

    def fail() -> None:
        with remat:
            model(x)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    for _ in range(2):
        model.zero_grad()
        with remat:
            plain_step(model, x)
    assert remat.stats[-1].replayed_operators > 0


def test_nesting_is_an_error_that_says_so() -> None:
    remat = punar.Remat()
    with remat:
        with pytest.raises(NestedRemat, match="while one is active in this thread"), punar.Remat():
            pass
        with pytest.raises(NestedRemat, match="while one is active in this thread"), remat:
            pass
    with remat:
        pass


def test_one_remat_in_two_threads_is_an_error() -> None:
    remat, found = punar.Remat(), []

    def enter() -> None:
        try:
            with remat:
                pass
        except NestedRemat as error:
            found.append(str(error))

    with remat:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert "in another thread" in found[0]


THREAD_SCRIPT = """
import threading
import torch
import punar

def step():
    with punar.Remat(budget="min"):
        torch.nn.Linear(8, 8)(torch.ones(4, 8)).sum().backward()

thread = threading.Thread(target=step)
thread.start()
thread.join()
"""


def test_recording_in_a_thread_prints_nothing() -> None:
    """The profiler complains, when the process ends, that it was not the main thread that began."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", THREAD_SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout + ran.stderr == ""


def test_a_remat_in_each_of_two_threads() -> None:
    plain = train(stepping(plain_step), steps=1)
    models = [copy.deepcopy(stepping_model()) for _ in range(2)]
    found = {}

    def run(place: int) -> None:
        model, x = models[place]
        remat = punar.Remat(budget="min")
        for _ in range(3):
            model.zero_grad()
            with remat:
                loss = model.eval()(x).square().mean()
                loss.backward()
        found[place] = ([p.grad.clone() for p in model.parameters()], remat.stats[-1].replayed_operators)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert plain
    assert found[0][1] > 0
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))


def stepping_model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return make_blocks(), torch.randn(64, 32)


def test_backward_in_the_block_of_another_remat() -> None:
    model, x = make_blocks(), torch.randn(64, 32)
    first, second = punar.Remat(budget="min"), punar.Remat()
    with first:
        loss = model(x).sum()
    with pytest.raises(UsageError, match="a graph that another Remat recorded"), second:
        loss.backward()
    loss.backward()


def test_weights_changed_before_backward_raise_as_in_eager() -> None:
    model, x = make_blocks(), torch.randn(64, 32)
    remat = punar.Remat(budget="min")
    with remat:
        plain_step(model, x)
    for inside in (True, False):
        with remat:
            loss = model(x).square().mean()
            if inside:
                with torch.no_grad():
                    model[0].up.weight.add_(1)
        if not inside:
            with torch.no_grad():
                model[0].up.weight.add_(1)
        with pytest.raises(SavedTensorModified, match="has been modified by an inplace operation"):
            loss.backward()


def test_nothing_about_the_model_changes() -> None:
    model, x = make_blocks(), torch.randn(64, 32)
    before = (repr(model), list(model.state_dict()), [list(vars(m)) for m in model.modules()], [type(p) for p in model.parameters()])
    remat = punar.Remat(budget="min")
    for _ in range(2):
        with remat:
            out = model(x)
            copy.deepcopy(model)
            out.square().mean().backward()
            for clone in (copy.deepcopy(out.detach()), pickle.loads(pickle.dumps(out.detach()))):
                assert torch.equal(clone, out)
    assert before == (
        repr(model),
        list(model.state_dict()),
        [list(vars(m)) for m in model.modules()],
        [type(p) for p in model.parameters()],
    )
    assert not any(vars(p) for p in model.parameters())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True).keys() == model.state_dict().keys()
    copy.deepcopy(model)(x).sum().backward()


def test_a_dropped_loss_frees_everything_at_once() -> None:
    model, x = make_blocks(), torch.randn(64, 32)
    remat = punar.Remat(budget="min")
    with no_garbage_collection():
        with remat:
            plain_step(model, x)
        model.zero_grad()
        for _ in range(2):
            with remat:
                loss = model(x).square().mean()
                del loss
                assert remat._session.meter.live == 0


def test_kept_outputs_keep_no_lineage_alive() -> None:
    model, x = make_blocks(), torch.randn(64, 32)
    remat, kept = punar.Remat(budget="min"), []
    for _ in range(4):
        model.zero_grad()
        with remat:
            out = model(x)
            out.square().mean().backward()
        kept.append(out.detach())
    del out
    model.zero_grad()
    assert remat._session.meter.live == sum(t.untyped_storage().nbytes() for t in kept)


def write_through_data(model: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.nn.functional.gelu(model[0](x))
    squashed = hidden.sigmoid()
    squashed.data[0].zero_()
    again = torch.nn.functional.gelu(hidden)
    hidden.data.mul_(0.5)
    loss = model(again + squashed).square().mean()
    loss.backward()
    return loss


def test_writes_that_autograd_does_not_see_reach_backward_as_in_eager() -> None:
    plain = train(stepping(write_through_data), steps=3)
    remats = [punar.Remat(budget="min"), *(RandomRemat(seed, 0.2) for seed in range(4))]
    for remat in remats:
        checked = train(stepping(write_through_data), steps=3, remat=remat)
        assert [a.differences(b) for a, b in zip(plain, checked, strict=True)] == [[]] * 3
        assert remat.stats[-1].replayed_operators > 0
        assert remat.stats[-1].measured_peak_bytes <= remat.plan.peak_bytes


def test_a_write_that_only_a_later_step_makes_reaches_backward_as_in_eager() -> None:
    """The plan was made from a step without it."""

    def make():
        model, x, steps = make_blocks(), torch.randn(64, 32), [0]

        def run() -> Tensor:
            model.zero_grad()
            squashed = model[0](x).sigmoid()
            steps[0] += 1
            if steps[0] > 2:
                squashed.data[0].zero_()
            loss = model(squashed).square().mean()
            loss.backward()
            return loss

        return model, run

    plain = train(make, steps=4)
    for seed in range(6):
        checked = train(make, steps=4, remat=RandomRemat(seed, 0.2))
        assert [a.differences(b) for a, b in zip(plain, checked, strict=True)] == [[]] * 4


@pytest.mark.parametrize("budget", ["min", 0.7])
def test_parameters_change_while_a_graph_of_an_earlier_step_is_alive(budget: str | float) -> None:
    """An output kept for logging, or the loss of a skipped batch: its graph still reads the parameters as they were before the optimizer stepped."""

    def run(remat: punar.Remat | None) -> list:
        seed_all(0)
        model, x, found, kept = make_blocks(), torch.randn(64, 32), [], []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            optimizer.zero_grad()
            with remat or contextlib.nullcontext():
                loss = plain_step(model, x)
                kept.append(model(x).mean())
            found.append(outcome(model, loss))
            optimizer.step()
        return found

    plain, checked = run(None), run(punar.Remat(budget=budget))
    assert [a.differences(b) for a, b in zip(plain, checked, strict=True)] == [[]] * 6


def test_an_unseen_write_is_not_taken_for_what_a_graph_read() -> None:
    """Written first outside of the block and then within: what is saved from the second write is not what the first one found."""
    model, x = make_blocks(), torch.randn(64, 32)
    remat = punar.Remat(budget="min")
    for _ in range(2):
        with remat:
            plain_step(model, x)
    with remat:
        loss = model(x).square().mean()
    bias = model[0].up.bias
    with torch.no_grad():
        bias.add_(1)
        with remat:
            bias.add_(1)
    with pytest.raises(SavedTensorModified):
        loss.backward()


def test_a_write_between_block_and_backward_into_what_only_a_replay_reads_is_an_error() -> None:
    """Never a wrong gradient: the addend is saved by nobody, and what was made from it is dropped."""
    model, x, addend = make_blocks(), torch.randn(64, 32), torch.randn(64, 32)

    def step() -> Tensor:
        return model[2:](nn.functional.gelu(model[:2](x) + addend)).square().mean()

    recorded = punar.Remat()
    for _ in range(2):
        with recorded:
            step().backward()
    trace = recorded.trace
    assert trace is not None
    remat = punar.Remat(plan=make_plan(trace, [1] * len(trace.values), solver="none held", budget_bytes=0))
    with remat:
        loss = step()
    addend.add_(1)
    with pytest.raises(SavedTensorModified):
        loss.backward()


def two_passes(model: nn.Module, x: Tensor) -> None:
    plain_step(model, x)
    model(x)


def a_graph_that_goes_without_backward(model: nn.Module, x: Tensor) -> None:
    model(x)
    plain_step(model, x)


@pytest.mark.parametrize("step", [two_passes, a_graph_that_goes_without_backward])
def test_profiling_never_ends_inside_an_operator(step: Callable[[nn.Module, Tensor], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler would write, when the operator returns, into what it had freed."""
    depth, ended = [0], []
    dispatch, end = Session.__torch_dispatch__, profiler.profile.__exit__

    def counted(*args: Any, **kwargs: Any) -> Any:
        depth[0] += 1
        try:
            return dispatch(*args, **kwargs)
        finally:
            depth[0] -= 1

    def noted(*args: Any) -> Any:
        ended.append(depth[0])
        return end(*args)

    plain_remat = punar.Remat()
    with plain_remat:  # the first profile of a process is another matter
        plain_step(make_blocks(), torch.randn(64, 32))
    monkeypatch.setattr(Session, "__torch_dispatch__", counted)
    monkeypatch.setattr(profiler.profile, "__exit__", noted)
    with punar.Remat(budget="min"):
        step(make_blocks(), torch.randn(64, 32))
    assert ended
    assert set(ended) == {0}


def test_an_operator_that_fails_and_is_caught_is_no_part_of_the_step() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        hidden = model(x)
        with contextlib.suppress(RuntimeError):
            hidden @ torch.zeros(hidden.shape[-1] + 1, 3)
        hidden.square().mean().backward()

    plain, remat = make_blocks(), punar.Remat(budget="min")
    model, x = copy.deepcopy(plain), torch.randn(64, 32)
    for _ in range(3):
        plain.zero_grad()
        model.zero_grad()
        seed_all(1)
        step(plain, x)
        seed_all(1)
        with remat:
            step(model, x)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    assert remat.plan is not None
    assert remat.stats[-1].measured_peak_bytes == remat.plan.peak_bytes


def test_a_remat_explains_its_plan() -> None:
    model, x = make_blocks(4), torch.randn(64, 32)
    remat = punar.Remat(budget=0.6)
    with pytest.raises(UsageError, match="none has been recorded"):
        remat.explain()
    for _ in range(2):
        with remat:
            model(x).square().mean().backward()
        model.zero_grad()
    assert remat.plan is not None
    assert remat.explain().peak.bytes == remat.timeline().playback.peak.bytes == remat.plan.peak_bytes
    with pytest.raises(UsageError, match="where a plan was given to obey"):
        punar.Remat(plan=remat.plan).timeline()


def test_where_no_plan_fits_the_step_is_explained_all_the_same() -> None:
    model, x = make_blocks(4), torch.randn(64, 32)
    remat = punar.Remat(budget="1 KiB")
    with pytest.raises(punar.InfeasibleBudget, match=r"`explain\(\)` of the Remat or of the profile says") as caught, remat:
        model(x).square().mean().backward()
    assert remat.explain().least.bytes >= caught.value.least_bytes


def gradients_made(where: str, model: nn.Module, batch: Tensor) -> None:
    model.zero_grad()
    if where == "outside":
        mean_square(model, batch).backward()


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_gradients_that_a_plan_was_made_beside_count_once_wherever_they_are_made(where: str) -> None:
    torch.manual_seed(0)
    model, batch = make_blocks(3), torch.randn(256, WIDTH)
    mean_square(model, batch).backward()
    plan = punar.solve(punar.profile(model, batch, mean_square), budget=0.6)
    gradients_made(where, model, batch)
    remat = punar.Remat(plan=plan)
    for _ in range(3):
        with remat:
            mean_square(model, batch).backward()
    peaks = [stats.measured_peak_bytes for stats in remat.stats]
    assert peaks[1:] == [plan.peak_bytes - 4] * 2  # the loss of the step before is gone
    assert peaks[0] is not None
    assert peaks[0] <= peaks[1]
    assert (peaks[0] < peaks[1]) == (where == "inside")


@pytest.mark.filterwarnings("error")
def test_gradients_that_are_made_inside_after_others_were_there_count_once() -> None:
    torch.manual_seed(0)
    model, batch = make_blocks(3), torch.randn(256, WIDTH)
    mean_square(model, batch).backward()
    remat = punar.Remat(0.6)
    for step in range(7):
        if step == 3:
            model.zero_grad()
        with remat:
            mean_square(model, batch).backward()
    assert not remat.drifts
    obeyed = [stats for stats in remat.stats if not stats.is_traced]
    assert len(obeyed) >= 5
    assert all((stats.measured_peak_bytes or 0) <= (stats.predicted_peak_bytes or 0) for stats in obeyed)
