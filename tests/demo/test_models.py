"""Are the demo's models and batches what they say?"""

from __future__ import annotations

import pytest
import torch

from punar.demo.models import MODELS, make_task
from punar.demo.moe import Experts
from punar.demo.text import paragraphs, sentence_pairs, sentences
from punar.errors import UsageError


@pytest.mark.parametrize("name", sorted(MODELS))
def test_task_has_a_scalar_loss_and_batches_of_one_shape(name: str) -> None:
    task = make_task(name, steps=2, seed=0)
    shapes = [{key: (tensor.shape, tensor.dtype) for key, tensor in batch.items()} for batch in task.batches]
    assert len(shapes) == 2
    assert shapes[0] == shapes[1]
    assert task.model.training
    with torch.no_grad():
        loss = task.loss_fn(task.model, task.batches[0])
    assert loss.shape == ()
    assert torch.isfinite(loss)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_same_seed_makes_the_same_task(name: str) -> None:
    first, second = make_task(name, steps=1, seed=3), make_task(name, steps=1, seed=3)
    for left, right in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(left, right)
    for key, tensor in first.batches[0].items():
        assert torch.equal(tensor, second.batches[0][key])


def test_unknown_model_is_an_error_of_ours() -> None:
    with pytest.raises(UsageError, match="'bert', which does not exist; choose one of gpt2"):
        make_task("bert", steps=1, seed=0)


def test_minilm_has_its_real_weights_and_dropout() -> None:
    task = make_task("minilm", steps=1, seed=0)
    assert sum(p.numel() for p in task.model.parameters()) == pytest.approx(22e6, rel=0.05)
    assert any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in task.model.modules())
    task.model.eval()
    with torch.no_grad():
        loss = task.loss_fn(task.model, task.batches[0])
    assert loss.item() < 1  # neighbours are found; random weights give about ln(8) = 2.1


def test_neighbouring_sentences_follow_each_other_in_the_text() -> None:
    pairs = sentence_pairs()
    assert len(pairs) > 400
    assert all(len(first.split()) >= 6 and len(second.split()) >= 6 for first, second in pairs)


def test_sentences_of_a_paragraph() -> None:
    text = "This is the first of two sentences.  Here is the second one of them. No."
    assert sentences(text) == ["This is the first of two sentences.", "Here is the second one of them."]


def test_paragraphs_leave_out_headings_and_code() -> None:
    text = "Title\n*****\n\nSome *running*\ntext.\n\n   code()\n\nrule ::= x"
    assert paragraphs(text) == ["Some running text."]


def test_routing_bias_moves_once_a_forward() -> None:
    torch.manual_seed(0)
    experts = Experts(8, experts=4, active=2)
    experts(torch.randn(16, 8))
    assert experts.tokens_seen.sum().item() == 32
    assert experts.load_bias.abs().max().item() == pytest.approx(0.01)
