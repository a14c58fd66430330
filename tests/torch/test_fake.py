"""Is a step traced without data the step that runs, byte for byte, on a CPU where both can be had?"""

from __future__ import annotations

import copy
import functools
import random
import resource
import sys
import warnings
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import punar
from punar.demo import random_weights, unet
from punar.demo.task import Task
from punar.errors import DataDependentStep, UsageError
from punar.ir import Trace
from punar.plan import simulate
from punar.torch import leftovers
from tests.torch.models import WIDTH, make_blocks

Step = tuple[nn.Module, Any, Callable[[Any, Any], Tensor]]


def of_task(task: Task) -> Step:
    return task.model, task.batches[0], task.loss_fn


def mlp() -> Step:
    return make_blocks(3), torch.randn(64, WIDTH), lambda model, batch: model(batch).square().mean()


class Tied(nn.Module):
    """What is hard to get right: tied weights, views, in-place writes, running statistics, a path that looks at integers, several uses of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.norm(x.flatten(0, 1)).view_as(x).transpose(0, 1)
        if bool((mask == 0).any()):
            x = x.masked_fill(mask.t().unsqueeze(-1) == 0, 0.0)
        x = (x.sigmoid() + 1).relu_()
        return self.head(x[:, : int(mask.sum(1).max())]).logsumexp(-1) + x.exp().mean()


def tied() -> Step:
    mask = torch.ones(4, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    return Tied(), {"tokens": torch.randint(0, 50, (4, 8)), "mask": mask}, lambda model, batch: model(**batch).mean()


class Filling(nn.Module):
    """Writes into parts of what is there: before autograd knows of it and after, through one view and through several, again and again from one line."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape)
        for t in range(x.shape[1]):
            out[:, t] = self.first(x[:, t]).tanh()
        h = out * 1.0
        h[:, :2] = x.new_zeros(2, WIDTH)
        h[1:3, 4] = h[:2, 5].exp()
        h.view(-1, WIDTH)[3].mul_(2.0)
        for t in range(2):
            h[0, t].add_(1.0)
        return out + self.second(h).square()


def filling() -> Step:
    return Filling(), torch.randn(4, 6, WIDTH), lambda model, batch: model(batch).square().mean()


STEPS: dict[str, Callable[[], Step]] = {
    "mlp": mlp,
    "tied": tied,
    "filling": filling,
    "gpt2": lambda: of_task(random_weights.make_gpt2(steps=1, seed=0, batch=2, length=16, layers=2, width=32)),
    "llama": lambda: of_task(random_weights.make_llama(steps=1, seed=0, batch=2, length=16, layers=2, width=64)),
    "vit": lambda: of_task(random_weights.make_vit(steps=1, seed=0, batch=2, image=32, layers=2, width=48)),
    "unet": lambda: of_task(unet.make_task(steps=1, seed=0)),
}


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "l1_loss": F.l1_loss,
    "soft_margin_loss": lambda x, y, **options: F.soft_margin_loss(x, y.sign(), **options),
    "binary_cross_entropy": lambda x, y, **options: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **options),
    "binary_cross_entropy_with_logits": lambda x, y, **options: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **options),
    "cross_entropy": lambda x, y, **options: F.cross_entropy(x, y.argmax(1), **options),
    "kl_div": lambda x, y, reduction: F.kl_div(x.log_softmax(1), y.softmax(1), reduction=reduction.replace("mean", "batchmean")),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_take_what_they_take_where_the_step_runs(name: str, reduction: str) -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(WIDTH, WIDTH), (torch.randn(64, WIDTH), torch.randn(64, WIDTH))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return LOSSES[name](model(batch[0]), batch[1], reduction=reduction).sum()

    fake = punar.profile(model, batch, loss_fn, device="cpu").trace
    real = punar.profile(model, batch, loss_fn).trace
    assert without_costs(real, fake) == fake
    scratch = 3 * 64 * WIDTH * 4 if name in ("l1_loss", "huber_loss", "soft_margin_loss") else 64
    assert plain_peak(real) - scratch <= plain_peak(fake) <= plain_peak(real)


def without_costs(trace: Trace, like: Trace) -> Trace:
    """The trace with the times, the scratch and the notes of another."""
    ops = tuple(replace(op, time_ns=o.time_ns, peak_bytes=o.peak_bytes) for op, o in zip(trace.ops, like.ops, strict=True))
    return replace(trace, ops=ops, meta=like.meta)


def plain_peak(trace: Trace) -> int:
    return simulate(trace, (0,) * len(trace.values)).peak_bytes


@pytest.mark.parametrize("name", STEPS)
def test_the_trace_is_that_of_the_step_that_runs(name: str) -> None:
    model, batch, loss_fn = STEPS[name]()
    fake = punar.profile(model, batch, loss_fn, device="cpu").trace
    real = punar.profile(model, batch, loss_fn).trace
    assert without_costs(real, fake) == fake
    assert all(f.peak_bytes <= r.peak_bytes for f, r in zip(fake.ops, real.ops, strict=True))
    if name != "unet":  # whose convolutions take scratch at the peak
        assert plain_peak(fake) == plain_peak(real)


@pytest.mark.parametrize("name", STEPS)
def test_a_plan_made_without_data_is_obeyed_to_the_byte(name: str) -> None:
    model, batch, loss_fn = STEPS[name]()
    plan = punar.solve(punar.profile(model, batch, loss_fn, device="cpu"), budget="min")
    found = punar.verify(model, batch, loss_fn, plan=plan)
    assert found.is_identical, str(found)
    assert found.measured_peak_bytes == plan.peak_bytes - 4  # the loss of the step before is not there in the first one
    assert plan.recomputed_bytes


def test_gradients_from_before_count() -> None:
    model, batch, loss_fn = mlp()
    loss_fn(model, batch).backward()
    fake = punar.profile(model, batch, loss_fn, device="cpu").trace
    real = punar.profile(model, batch, loss_fn).trace
    assert without_costs(real, fake) == fake
    assert fake.resident_bytes == batch.nbytes + 2 * sum(p.nbytes for p in model.parameters()) + 4


def test_weights_do_not_matter() -> None:
    model, batch, loss_fn = STEPS["llama"]()
    traces = [punar.profile(model, batch, loss_fn, device="h100-80gb").trace]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    traces.append(punar.profile(model, batch, loss_fn, device="h100-80gb").trace)
    traces.append(punar.profile(model.to("meta"), batch, loss_fn, device="h100-80gb").trace)
    assert traces[0] == traces[1] == traces[2]


def test_the_model_and_the_random_state_are_as_before() -> None:
    model, batch, loss_fn = STEPS["tied"]()
    model.calls, draws = 0, []
    random.seed(0), np.random.seed(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identities, state = [id(tensor) for tensor in (*model.parameters(), *model.buffers())], torch.get_rng_state()

    def counting(model: Any, batch: Any) -> Tensor:
        draws.append((random.random(), np.random.rand()))
        model.calls += 1
        model.last = loss_fn(model, batch)
        return model.last

    punar.profile(model, batch, counting, device="a100-80gb")
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == identities
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    random.seed(0), np.random.seed(0)
    assert draws == [(random.random(), np.random.rand())]
    assert model.calls == 0
    assert not hasattr(model, "last")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_allocated() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1 << 15, 1 << 15), nn.GELU()) for _ in range(8)))
    profile = punar.profile(model, torch.empty(1 << 16, 1 << 15, device="meta"), lambda model, batch: model(batch).sum(), device="cpu")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    assert plain_peak(profile.trace) > 1 << 37
    assert grown < 200 << 20


# -- what cannot be traced -----------------------------------------------------------------------------------------------


def picks(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch[batch > 0].view(1, -1)[:, :WIDTH]).mean()


def reads(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).mean()
    return loss if loss.item() > 0 else -loss


def branches(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).mean()
    return loss if loss > 0 else -loss


@pytest.mark.parametrize(
    ("loss_fn", "operator"),
    [(picks, "aten.nonzero.default"), (reads, "aten._local_scalar_dense.default"), (branches, "aten._local_scalar_dense.default")],
)
def test_a_step_whose_path_depends_on_data_is_refused_with_the_operator(loss_fn: Callable[..., Tensor], operator: str) -> None:
    model, batch, _ = mlp()
    with pytest.raises(DataDependentStep, match="Replace it for this trace") as caught:
        punar.profile(model, batch, loss_fn, device="cpu")
    assert (caught.value.operator, caught.value.module) == (operator, "")
    assert operator in str(caught.value)
    punar.verify(model, batch, mlp()[2], budget="min").raise_if_different()  # nothing is left behind


def test_the_module_that_depends_on_data_is_named() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x.sum(-1).topk(3).indices.bincount(minlength=len(x)) > 0]

    model, batch, loss_fn = nn.Sequential(nn.Linear(WIDTH, WIDTH), Router()), torch.randn(8, WIDTH), mlp()[2]
    with pytest.raises(DataDependentStep, match=r"aten\.bincount\.default in Sequential\.1") as caught:
        punar.profile(model, batch, loss_fn, device="cpu")
    assert caught.value.module == "Sequential.1"


def test_an_operator_of_unknown_shapes_is_named() -> None:
    with torch.library._scoped_library("punar_tests", "FRAGMENT") as library:
        library.define("opaque(Tensor x) -> Tensor")
        library.impl("opaque", lambda x: x.clone(), "CPU")
        model, batch, _ = mlp()
        with pytest.raises(UsageError, match=r"punar_tests\.opaque.*register_fake"):
            punar.profile(model, batch, lambda model, batch: torch.ops.punar_tests.opaque(model(batch)).sum(), device="cpu")


def test_sparse_tensors_are_refused() -> None:
    model, _, _ = mlp()
    batch = torch.eye(WIDTH).to_sparse()
    with pytest.raises(UsageError, match=r"layout torch\.sparse_coo, which has no storage"):
        punar.profile(model, batch, lambda model, batch: model(batch.to_dense()).sum(), device="cpu")


def test_cuda_autocast_is_refused() -> None:
    model, batch, _ = mlp()

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(batch).square().mean()

    with pytest.raises(UsageError, match=r'found torch\.autocast\("cuda"\).*build the model in the dtype'):
        punar.profile(model, batch, loss_fn, device="h100-80gb")


def test_cpu_autocast_is_traced() -> None:
    model, batch, _ = mlp()

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch).square().mean()

    fake = punar.profile(model, batch, loss_fn, device="cpu").trace
    real = without_costs(punar.profile(model, batch, loss_fn).trace, fake)
    assert replace(real, events=()) == replace(fake, events=())
    assert sorted(real.events) == sorted(fake.events)  # the casts' cache lets go of them in the order of their addresses
    assert plain_peak(real) == plain_peak(fake)


# -- ways to write a step --------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Has a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mask = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).exp() * self.mask).sum()


class Record(UserDict[str, Tensor]):
    """A batch as some libraries have it: a mapping whose entries are attributes too."""

    def __getattr__(self, name: str) -> Tensor:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, batch: model(batch.to("cuda")).sum(),
        lambda model, batch: model(batch.to(torch.device("cuda:1"), non_blocking=True)).sum(),
        lambda model, batch: model(batch.to(0)).sum(),
        lambda model, batch: model(batch.cuda()).sum(),
        lambda model, batch: model(batch.to(device="cuda")).sum(),
        lambda model, batch: torch.compile(model, backend="eager")(batch).sum(),
    ],
    ids=["to", "to a device", "to a number", "cuda", "to by name", "compiled"],
)
def test_the_device_need_not_be_here(loss_fn: Callable[..., Tensor]) -> None:
    model, batch, _ = mlp()
    found = punar.profile(model, batch, loss_fn, device="h100-80gb").trace
    plain = punar.profile(model, batch, lambda model, batch: model(batch).sum(), device="h100-80gb").trace
    assert (found.resident_bytes, plain_peak(found)) == (plain.resident_bytes, plain_peak(plain))


def test_tensors_made_on_the_device_are_counted() -> None:
    model, batch, _ = mlp()

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.device("cuda"):
            noise = torch.ones(64, WIDTH)
        return (model(batch) * noise * torch.ones(64, WIDTH, device="cuda:0")).sum()

    trace = punar.profile(model, batch, loss_fn, device="h100-80gb").trace
    made = next(op for op in trace.ops if op.name == "aten.ones.default")
    sizes = [trace.storages[trace.values[v].storage].bytes for v in (*trace.ops[0].outputs, *made.outputs)]
    assert sizes == [64 * WIDTH * 4] * 2  # the first one was made before the step's first operator that saves


def test_other_tensors_of_a_module_are_counted_wherever_they_are() -> None:
    batch = torch.randn(4, WIDTH)
    real = punar.profile(Masked(), batch, lambda model, batch: model(batch), device="cpu").trace
    with torch.device("meta"):
        model = Masked()
    mask = model.mask
    assert punar.profile(model, batch, lambda model, batch: model(batch), device="cpu").trace == real
    assert real.resident_bytes == 4 * (WIDTH * WIDTH + 2 * WIDTH + 4 * WIDTH + 1)
    assert model.mask is mask


def test_a_meta_tensor_that_nobody_has_is_refused() -> None:
    model, batch, _ = mlp()
    stray = torch.ones(WIDTH, device="meta")
    with pytest.raises(UsageError, match=r"that is on the meta device and no parameter.*pass it in the batch"):
        punar.profile(model, batch, lambda model, batch: (model(batch) * stray).sum(), device="cpu")


def test_batches_keep_their_type() -> None:
    model, batch, _ = mlp()
    record = Record(x=batch)
    trace = punar.profile(model, [record, 5], lambda model, batch: model(batch[0].x).sum() * batch[1], device="cpu").trace
    alone = punar.profile(model, record, lambda model, batch: model(batch.x).sum() * 5, device="cpu").trace
    assert trace.resident_bytes == alone.resident_bytes
    assert record.x is batch


def test_integers_are_known_as_arrays_too() -> None:
    model, batch, _ = mlp()
    lengths = torch.tensor([3, 5])
    trace = punar.profile(model, (batch, lengths), lambda model, b: model(b[0][: int(b[1].numpy().max())]).sum(), device="cpu").trace
    assert "[5, 32]" in next(op.signature for op in trace.ops if "layer_norm" in op.name)
    with pytest.raises(DataDependentStep, match=r"Tensor\.numpy in the loss function"):
        punar.profile(model, batch, lambda model, batch: model(batch).sum() * batch.numpy().max(), device="cpu")


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="parameter of a lazy module"):
        punar.profile(nn.LazyLinear(4), torch.ones(2, 3), lambda model, batch: model(batch).sum(), device="cpu")


def test_sparse_gradients_are_traced() -> None:
    model = nn.Embedding(50, 8, sparse=True)
    assert punar.profile(model, torch.arange(4), lambda model, batch: model(batch).exp().sum(), device="cpu").trace.saves


def test_warnings_of_the_step_stay_what_they_are() -> None:
    model, batch, _ = mlp()

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        warnings.warn("mine", UserWarning, stacklevel=1)
        return model(batch).sum()

    with pytest.raises(UserWarning, match="mine"):
        punar.profile(model, batch, loss_fn, device="cpu")


class Remembering(nn.Module):
    """Has tensors, and puts some, in all sorts of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH)
        self.seen: list[Tensor] = []
        self.last: dict[str, dict[str, Tensor]] = {"inner": {"x": torch.zeros(1)}}
        self.queue: deque[Tensor] = deque([torch.zeros(1)], maxlen=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.scale
        self.seen.append(y)
        self.last["inner"]["x"] = y
        self.queue.append(y)
        return y


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn", "remembering"])
def test_nothing_fake_is_left_in_what_modules_hold(kind: str) -> None:
    makers = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
    model = makers[kind](WIDTH, WIDTH, num_layers=2) if kind in makers else Remembering()
    x = torch.randn(3, 2, WIDTH)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    before = loss(model, x)
    held = {name: copy.copy(each) for name, each in vars(model).items()}
    punar.profile(model, x, loss, device="cpu")
    found = punar.fit(model, lambda size: torch.randn(3, size, WIDTH), loss, budget="300 KiB", multiple_of=4, most=8)
    assert found.is_confirmed
    for name in ("_flat_weights", "seen"):
        assert [id(each) for each in getattr(model, name, ())][:1] == [id(each) for each in held.get(name, ())][:1]
    assert not any(isinstance(each, FakeTensor) for each in everything_in(list(vars(model).values())))
    assert torch.equal(loss(model, x), before)


def everything_in(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        yield item
        if isinstance(item, (list, tuple, deque)):
            yield from everything_in(item)
        elif isinstance(item, dict):
            yield from everything_in(item.values())


TABLE: dict[int, Tensor] = {}


@functools.lru_cache
def cached_mask(size: int) -> tuple[str, list[Tensor]]:
    return "mask", [torch.ones(size, size).tril()]


def masked_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * cached_mask(x.shape[0])[1][0].sum()).square().mean()


def test_caches_of_functions_are_emptied_of_what_is_fake() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    expected = masked_loss(model, x)
    cached_mask.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        punar.profile(model, x, masked_loss, device="cpu")
    assert cached_mask.cache_info().currsize == 0
    assert torch.equal(masked_loss(model, x), expected)
    punar.profile(model, x, masked_loss, device="cpu")
    assert cached_mask.cache_info().currsize == 1  # what is real stays


def test_an_error_of_an_operator_without_data_says_which() -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) @ torch.zeros(WIDTH + 1, 2)).sum()

    with pytest.raises(RuntimeError) as caught:
        punar.profile(nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH), loss_fn, device="cpu")
    assert "This is aten.mm.default in the loss function, for tensors without data" in "".join(caught.value.__notes__)


def test_what_a_cache_made_is_no_leftover_in_whatever_order_objects_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    find = leftovers._alive
    monkeypatch.setattr(leftovers, "_alive", lambda: sorted(find(), key=lambda each: type(each) is FakeTensor))
    cached_mask.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        punar.profile(nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH), masked_loss, device="cpu")


def test_fakes_that_are_kept_elsewhere_are_told() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        scale = TABLE.setdefault(len(x), torch.ones(1))
        return (model(x) * scale).square().mean()

    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    TABLE.clear()
    with pytest.warns(UserWarning, match="1 of the tensors that it made, which have none, are still kept somewhere"):
        punar.profile(model, x, loss, device="cpu")
    TABLE.clear()
    loss(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        punar.profile(model, x, loss, device="cpu")
