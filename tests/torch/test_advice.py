"""Is what an explanation advises true: does the step, changed so, keep to the peak that it was told?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import punar
from punar.reporting.explain.advice import CHUNKS

VOCABULARY, LENGTH = 2048, 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class LanguageModel(nn.Module):
    """``is_tied``: its head has the embedding's weight."""

    def __init__(self, width: int, depth: int, *, vocabulary: int = VOCABULARY, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.h = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.h:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def loss_fn(model: LanguageModel, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def chunked_loss_fn(model: LanguageModel, batch: Tensor) -> Tensor:
    hidden, targets = model.body(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
    parts = zip(hidden.chunk(CHUNKS), targets.chunk(CHUNKS), strict=True)
    return torch.stack([F.cross_entropy(model.head(h), t, reduction="sum") for h, t in parts]).sum() / targets.numel()


def in_bfloat16(model: LanguageModel, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_fn(model, batch)


def chunked_in_bfloat16(model: LanguageModel, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return chunked_loss_fn(model, batch)


def tokens(sentences: int, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(0, vocabulary, (sentences, LENGTH + 1))


def told(model: nn.Module, batch: Tensor, loss=loss_fn) -> dict[str, int]:
    """The peaks that are told, by the kind of advice; ``""`` is the least peak as it is."""
    found = punar.explain(punar.profile(model, batch, loss))
    return {advice.kind: advice.peak_bytes for advice in found.advice} | {"": found.least.bytes}


def keeps(model: nn.Module, batch: Tensor, loss, budget_bytes: int) -> bool:
    """Whether a real step under a plan for it reaches no more."""
    measured = punar.verify(model, batch, loss, budget=budget_bytes)
    return measured.is_identical and measured.measured_peak_bytes <= budget_bytes


@contextmanager
def stepped_in_backward(model: nn.Module) -> Iterator[None]:
    """As an optimizer does that takes each gradient as soon as it is complete."""

    def step(parameter: Tensor) -> None:
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize(
    ("plain", "chunked"), [(loss_fn, chunked_loss_fn), (in_bfloat16, chunked_in_bfloat16)], ids=["float32", "bfloat16"]
)
def test_a_chunked_loss_reaches_the_peak_told(plain, chunked, is_tied: bool) -> None:
    model, batch = LanguageModel(32, 2, is_tied=is_tied), tokens(8)
    peaks = told(model, batch, plain)
    assert peaks["chunked loss"] < peaks[""] / 2
    assert keeps(model, batch, chunked, peaks["chunked loss"])


def test_half_a_batch_beside_the_first_half_s_gradients_reaches_the_peak_told() -> None:
    model, batch = LanguageModel(64, 2, is_tied=True), tokens(8)
    peaks = told(model, batch)
    assert peaks["half batch"] < peaks[""]
    loss_fn(model, batch[:4]).backward()
    assert keeps(model, batch[4:], loss_fn, peaks["half batch"])
    assert told(model, batch[4:])["half batch"] < peaks["half batch"]  # what is added to gradients is not halved


def test_an_optimizer_in_backward_reaches_the_peak_told() -> None:
    model, batch = LanguageModel(256, 2), tokens(2)
    peaks = told(model, batch)
    with stepped_in_backward(model):
        assert keeps(model, batch, loss_fn, peaks["optimizer in backward"])


def test_gradients_from_before_cost_at_most_what_is_told() -> None:
    """Of one plan: the least one is searched for, and may be another."""
    model, batch = LanguageModel(32, 2), tokens(8)
    alone = punar.explain(punar.profile(model, batch, loss_fn))
    loss_fn(model, batch).backward()
    beside = punar.explain(punar.profile(model, batch, loss_fn))
    told_bytes = beside.least.bytes - next(advice.peak_bytes for advice in beside.advice if advice.kind == "no gradients before")
    assert told_bytes == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert 0 < beside.plain_peak_bytes - alone.plain_peak_bytes <= told_bytes


def no_head(last: nn.Module) -> nn.Module:
    """The last matrix product is amid the model: to cut all that follows it is no loss in chunks."""
    return nn.Sequential(nn.Linear(16, 1024), nn.Unflatten(1, (4, 16, 16)), last)


class Residual(nn.Module):
    """What follows its last matrix product reads what was before it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 2048), nn.Linear(2048, 2048)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return x + self.down(x)


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :, None].expand(-1, -1, 16))[0]


@pytest.mark.parametrize(
    "model",
    [
        no_head(nn.Sequential(nn.Conv2d(4, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 1, 3))),
        no_head(nn.Sequential(nn.BatchNorm2d(4), nn.GELU())),
        Residual(),
        Recurrent(16, 64, batch_first=True),
    ],
    ids=["convolutions", "norm", "residual", "recurrent"],
)
def test_a_model_that_ends_in_no_loss_head_is_told_of_none(model: nn.Module) -> None:
    batch = torch.randn(64, 16)
    for _ in range(2):
        peaks = told(model, batch, lambda model, batch: model(batch).square().mean())
        assert "chunked loss" not in peaks
        model(batch).sum().backward()  # the second time beside gradients


def test_scratch_that_may_be_a_parameter_s_is_not_halved() -> None:
    """An LSTM's backward packs its weights anew."""
    model, batch = Recurrent(16, 128, batch_first=True), torch.randn(64, 16)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    peaks = told(model, batch, loss)
    loss(model, batch[:32]).backward()
    assert keeps(model, batch[32:], loss, peaks["half batch"])
