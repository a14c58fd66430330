"""Is what fits what fits: found, confirmed by real steps, and ranked?"""

from __future__ import annotations

import functools
import json
from html import unescape
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import punar
from punar.costs import find_device
from punar.described import Spread, trace_on
from punar.errors import UsageError
from punar.fitting.record import Trial
from punar.fitting.steps import Steps
from punar.plan import Plan, simulate
from tests.torch.models import WIDTH, make_blocks


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def make_batch(size: int) -> Tensor:
    return torch.randn(size, WIDTH)


def fit(**options: Any) -> punar.Fit:
    return punar.fit(make_blocks(1), make_batch, loss_fn, **{"budget": "2 MiB", "multiple_of": 64, "start": 512, **options})


@pytest.fixture(scope="module")
def largest() -> punar.Fit:
    return fit(device="cpu")


def test_the_answer_fits_and_the_next_size_does_not(largest: punar.Fit) -> None:
    assert largest.size % 64 == 0
    assert largest.peak_bytes == largest.plan.peak_bytes <= largest.budget_bytes == 2 << 20
    assert largest.next_size == largest.size + 64
    for size, is_feasible in ((largest.size, True), (largest.size + 64, False)):
        profile = punar.profile(make_blocks(1), make_batch(size), loss_fn, device="cpu")
        if is_feasible:
            assert punar.solve(profile, budget="2 MiB").hold_from == largest.plan.hold_from
            continue
        with pytest.raises(punar.InfeasibleBudget) as caught:
            punar.solve(profile, budget="2 MiB")
        assert caught.value.least_bytes == largest.next_peak_bytes


def test_what_is_not_here_is_not_confirmed(largest: punar.Fit) -> None:
    assert (largest.is_confirmed, largest.is_measured, largest.candidates) == (False, False, ())
    assert all(trial.measured_peak_bytes is None for trial in largest.trials)


def test_texts_and_data(largest: punar.Fit) -> None:
    sentence, header, *rows = str(largest).splitlines()
    assert sentence in unescape(largest._repr_html_())
    assert largest._repr_html_().count("<tr>") == len(rows) + 1
    assert sentence.startswith(f"largest batch: {largest.size}, ")
    assert f"{largest.next_size} would need " in sentence
    assert header.split()[0] == "size"
    assert [int(row.split()[0]) for row in rows] == [trial.size for trial in largest.trials]
    body = json.loads(json.dumps(largest.to_dict()))
    assert (body["size"], body["trials"][0]["size"]) == (largest.size, 512)


def test_a_real_step_confirms_it_and_leaves_no_trace() -> None:
    model, seen = make_blocks(1), list[Trial]()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = punar.fit(model, make_batch, loss_fn, budget="2 MiB", multiple_of=512, start=512, on_trial=seen.append)
    assert found.measured_peak_bytes is not None
    assert 0 <= found.peak_bytes - found.measured_peak_bytes <= 4  # the loss
    assert found.is_confirmed
    assert seen[-1].measured_peak_bytes == found.measured_peak_bytes
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("CUDA out of memory")])
def test_where_a_real_step_needs_more_than_was_predicted_less_is_tried(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    more_bytes = 200_000
    sizes: list[int] = []
    promised: list[int] = []

    def ran(self: Steps, trial: Trial, plan: Plan, steps: int) -> tuple[int, int]:
        sizes.append(trial.size)
        promised.append(plan.peak_bytes - self.excess_bytes(trial.size))
        if error is not None and len(sizes) == 1:
            raise error
        return promised[-1] + (more_bytes * trial.size // sizes[0] if error is None else 0), 1

    monkeypatch.setattr(Steps, "ran", ran)
    found = fit()
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 2
    assert promised[1] <= found.budget_bytes - (more_bytes if error is None else found.budget_bytes // 20) * sizes[1] // sizes[0]
    assert found.next_size == found.size + 64  # what a smaller step has less is not given away
    assert found.size == sizes[-1]
    assert found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= found.budget_bytes


def test_other_errors_of_a_real_step_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(*_: object) -> tuple[int, int]:
        raise RuntimeError("a hook failed")

    monkeypatch.setattr(Steps, "ran", ran)
    with pytest.raises(RuntimeError, match="a hook failed"):
        fit(multiple_of=512)


def test_most_samples_a_second_of_batches_that_divide_the_total() -> None:
    found = fit(maximize="throughput", total=512, device="cpu", optimizer_ns=10**9)
    assert {(trial.size, trial.micro_batches) for trial in found.candidates} == {(64, 8), (128, 4), (256, 2), (512, 1)}
    rates = [trial.per_second for trial in found.candidates]
    assert rates == sorted(rates, reverse=True)
    assert (found.size, found.per_second) == (found.candidates[0].size, rates[0])
    for trial in found.candidates:
        assert trial.plan is not None
        assert trial.time_ns == trial.micro_batches * trial.plan.time_ns + 10**9  # the optimizer once
        assert trial.per_second == pytest.approx(512e9 / trial.time_ns)
        assert trial.plan.peak_bytes <= found.budget_bytes


def test_the_fastest_are_run_and_ranked_by_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: dict[int, int] = {}

    def ran(self: Steps, trial: Trial, plan: Plan, steps: int) -> tuple[int, int]:
        measured[trial.size] = 1000 * (len(measured) + 1) ** -2 if measured else 10**9  # the one predicted to be the fastest is the slowest
        return plan.peak_bytes, max(1, int(measured[trial.size]))

    monkeypatch.setattr(Steps, "ran", ran)
    found = fit(maximize="throughput", total=512)
    assert len(measured) == 3
    assert found.is_measured
    assert found.size != next(iter(measured))
    assert [trial.measured_ns is not None for trial in found.candidates] == [True] * 3 + [False]


def test_gradients_that_are_accumulated_are_there_before_the_step() -> None:
    model, device = make_blocks(1), find_device("cpu")
    accumulating = trace_on(device, model, make_batch(64), loss_fn, Spread(), is_accumulating=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert punar.profile(model, make_batch(64), loss_fn, device="cpu").trace.events == accumulating.events
    first = trace_on(device, make_blocks(1), make_batch(64), loss_fn, Spread())
    assert accumulating.resident_bytes - first.resident_bytes == sum(parameter.nbytes for parameter in model.parameters())
    spread = Spread(shards=4)
    plain, added = (trace_on(device, make_blocks(1), make_batch(64), loss_fn, spread, is_accumulating=flag) for flag in (False, True))
    assert added.resident_bytes - plain.resident_bytes == sum(parameter.nbytes for parameter in model.parameters()) // 4
    assert simulate(added, (0,) * len(added.values)).peak_bytes > simulate(plain, (0,) * len(plain.values)).peak_bytes


class Attention(nn.Module):
    """Scores of all pairs of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.project(x)
        return (keys @ keys.transpose(1, 2)).softmax(-1) @ keys


def test_the_longest_text_of_a_step_that_is_quadratic_in_it() -> None:
    found = punar.fit(Attention(), lambda n: torch.randn(1, n, WIDTH), loss_fn, budget="4 MiB", maximize="length", device="cpu")
    assert found.next_size == found.size + 1
    assert len(found.trials) <= 9
    assert found.peak_bytes > 2 * 4 * found.size**2


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a goal that is none": ({"maximize": "speed"}, UsageError, "give one of 'batch'"),
    "a share of the peak": ({"budget": 0.5}, punar.BudgetError, "which grows with the step"),
    "the least": ({"budget": "min"}, punar.BudgetError, "which grows with the step"),
    "too little": ({"budget": "1 KiB"}, punar.InfeasibleBudget, "size 64 needs"),
    "no steps": ({"multiple_of": 0}, UsageError, "multiple_of=0"),
    "no multiples": ({"most": 63}, UsageError, "make them agree"),
    "a total of a batch": ({"total": 64}, UsageError, 'are for "throughput"'),
    "shards of this device": ({"shards": 2, "device": None}, UsageError, "give `device` too"),
    "no such device": ({"device": "h100"}, UsageError, "give one of v100-32gb"),
    "more than it has": ({"budget": "100 GiB", "device": "h100-80gb"}, punar.BudgetError, "above what h100-80gb has"),
    "optimizer's time": ({"maximize": "throughput", "optimizer_ns": -5}, UsageError, "optimizer_ns=-5; give a whole number"),
    "confirm": ({"confirm": "no"}, UsageError, "confirm='no'; give True or False"),
    "on_trial": ({"on_trial": 5}, UsageError, "tell each trial to 5; give a function"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    options, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        fit(**{"device": "cpu", **options})


def test_a_batch_that_does_not_grow_is_said() -> None:
    with pytest.raises(UsageError, match=r"make_batch\(1\) and make_batch\(2\) give the same step"):
        punar.fit(make_blocks(1), lambda size: torch.ones(8, WIDTH), loss_fn, budget="8 MiB", device="cpu")
    with pytest.raises(UsageError, match="in the place of make_batch"):
        punar.fit(make_blocks(1), make_batch(8), loss_fn, budget="8 MiB")  # type: ignore[arg-type]


def test_the_largest_that_may_be_ends_the_search() -> None:
    found = fit(device="cpu", most=128)
    assert (found.size, found.next_size) == (128, None)
    assert "larger ones were not tried" in found.sentence


class Experts(nn.Module):
    """Routes each row to an expert, in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.gate.weight[0])
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out.index_put(((chosen == number).nonzero().squeeze(1),), expert(x[chosen == number]))
        return out


def reading_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """What data says is read, and changes nothing."""
    loss = loss_fn(model, batch)
    assert loss.item() >= 0
    return loss


def state_of(model: nn.Module) -> list[Tensor | None]:
    return [torch.get_rng_state(), *model.state_dict().values(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_a_step_that_reads_data_fits_as_the_one_that_does_not(optimizer: str | None) -> None:
    options: dict[str, Any] = {"budget": "2 MiB", "multiple_of": 64, "start": 512, "optimizer": optimizer}
    model = make_blocks(1)
    before = state_of(model)
    found = punar.fit(model, make_batch, reading_loss, **options)
    assert all(a is b or torch.equal(a, b) for a, b in zip(before, state_of(model), strict=True) if a is not None and b is not None)
    traced = punar.fit(model, make_batch, loss_fn, **options)
    assert found.unknown == "aten._local_scalar_dense.default"
    assert (traced.unknown, found.size) == ("", traced.size)
    assert found.next_peak_bytes is not None
    assert traced.next_peak_bytes is not None
    assert abs(found.next_peak_bytes - traced.next_peak_bytes) <= 8  # the number that was read
    assert found.is_confirmed
    assert "since aten._local_scalar_dense.default depends on data" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["unknown"] == found.unknown


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", [{"maximize": "batch"}, {"maximize": "throughput", "total": 1024}])
def test_a_step_whose_shapes_depend_on_data_runs_within_the_budget(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Experts()
    found = punar.fit(model, make_batch, loss_fn, budget="3 MiB", multiple_of=256, start=256, **options)
    assert found.unknown.startswith("aten.")
    assert found.size >= 256
    assert found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= found.budget_bytes
    assert found.next_size is not None or "total" in options
    if "total" in options:
        assert any(trial.micro_batches > 1 for trial in found.candidates)
        assert found.is_measured
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_size_that_runs_out_of_memory_when_it_is_recorded_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_rows(size: int) -> Tensor:
        return torch.randn(size, WIDTH)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if len(batch) > 640:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return reading_loss(model, batch)

    found = punar.fit(make_blocks(1), make_rows, loss, budget="64 MiB", multiple_of=64, start=512)
    assert (found.size, found.next_size, found.next_peak_bytes) == (640, 704, None)
    assert "704 ran out of memory" in found.sentence
    assert "no, out of memory" in str(found)


def test_where_no_size_can_be_recorded_within_the_budget_that_is_said() -> None:
    with pytest.raises(punar.InfeasibleBudget, match=r"size 64 ran out of memory when it was recorded\. Give more"):
        punar.fit(make_blocks(1), make_batch, reading_loss, budget="32 KiB", multiple_of=64, start=128)


def test_sizes_that_would_read_the_same_are_said_to_the_byte() -> None:
    with pytest.raises(punar.InfeasibleBudget) as caught:
        fit(device="cpu", budget=1, start=64)
    least_bytes = caught.value.least_bytes
    with pytest.raises(punar.InfeasibleBudget, match=rf"fits {least_bytes - 1} B, found that size 64 needs {least_bytes} B at least"):
        fit(device="cpu", budget=least_bytes - 1, start=64)


def test_a_device_that_is_not_here_cannot_run_it() -> None:
    with pytest.raises(punar.errors.DataDependentStep):
        punar.fit(make_blocks(1), make_batch, reading_loss, budget="2 MiB", device="cpu")


@pytest.mark.filterwarnings("error")
def test_accumulated_batches_are_confirmed_with_their_gradients() -> None:
    found = fit(maximize="throughput", total=1024, multiple_of=256)
    accumulated = [trial for trial in found.trials if trial.micro_batches > 1]
    confirmed = [trial for trial in accumulated if trial.measured_peak_bytes is not None]
    assert confirmed
    for trial in confirmed:
        assert trial.is_feasible
        assert trial.plan is not None
        assert abs(trial.plan.peak_bytes - (trial.measured_peak_bytes or 0)) <= 8


def test_what_kernels_take_for_a_moment_counts_where_the_step_runs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())

    def images(size: int) -> Tensor:
        return torch.randn(size, 3, 48, 48)

    traced = punar.profile(model, images(6), loss_fn, device="cpu").trace
    real = punar.profile(model, images(6), loss_fn).trace
    assert max(op.peak_bytes for op in real.ops) > max(op.peak_bytes for op in traced.ops)  # else there would be nothing to see
    found = punar.fit(model, images, loss_fn, budget="16 MiB")
    assert found.is_confirmed
    plan = punar.solve(punar.profile(model, images(found.size), loss_fn), budget="16 MiB")
    assert plan.peak_bytes <= 16 << 20
    assert abs(found.peak_bytes - (found.measured_peak_bytes or 0)) <= 8


def test_an_error_of_the_step_says_at_which_size() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert len(batch) < 600
        return loss_fn(model, batch)

    with pytest.raises(AssertionError) as caught:
        punar.fit(make_blocks(1), make_batch, loss, budget="2 MiB", start=512, multiple_of=64)
    assert "had come to size 1024" in "".join(caught.value.__notes__)


@functools.lru_cache
def kept_mask(size: int) -> Tensor:
    return torch.ones(size, WIDTH).tril()


def test_a_step_that_keeps_what_it_makes_is_recorded_where_it_runs() -> None:
    """The traced step makes its mask, and of the real ones only the first of a size does."""
    kept_mask.cache_clear()
    found = punar.fit(
        make_blocks(1),
        make_batch,
        lambda model, batch: (model(batch) * kept_mask(len(batch))).square().mean(),
        budget="2 MiB",
        multiple_of=256,
        start=512,
    )
    assert found.unknown == "its path"
    assert found.is_confirmed
    assert found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= found.budget_bytes
