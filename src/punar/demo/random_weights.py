"""Small transformers models with random weights: GPT-2, Llama and ViT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from punar.demo.task import Batch, Task, offline
from punar.demo.text import text_bytes
from punar.errors import MissingDependency

VOCABULARY = 256  # one token a byte


def make_gpt2(*, steps: int, seed: int, batch: int = 4, length: int = 128, layers: int = 6, width: int = 256) -> Task:
    """A small GPT-2 that learns to continue English text byte by byte, dropout on."""
    transformers = _transformers("gpt2")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=length, n_embd=width, n_layer=layers, n_head=8, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(seed)
    return Task(
        name="gpt2",
        description=f"GPT-2, {layers} layers, width {width}, random weights, {batch} texts of {length} bytes, dropout on",
        model=transformers.GPT2LMHeadModel(config).train(),
        batches=text_batches(steps, batch, length, seed),
        loss_fn=next_byte_loss,
    )


def make_llama(*, steps: int, seed: int, batch: int = 6, length: int = 192, layers: int = 6, width: int = 256) -> Task:
    """A small Llama (grouped-query attention, SwiGLU, rotary positions) that learns to continue English text byte by byte."""
    transformers = _transformers("llama")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=length,
        use_cache=False,
    )
    torch.manual_seed(seed)
    return Task(
        name="llama",
        description=f"Llama, {layers} layers, width {width}, random weights, {batch} texts of {length} bytes",
        model=transformers.LlamaForCausalLM(config).train(),
        batches=text_batches(steps, batch, length, seed),
        loss_fn=next_byte_loss,
    )


def make_vit(*, steps: int, seed: int, batch: int = 8, image: int = 96, layers: int = 8, width: int = 192) -> Task:
    """A small vision transformer on random images and labels, dropout on."""
    transformers = _transformers("vit")
    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=6,
        intermediate_size=4 * width,
        image_size=image,
        patch_size=8,
        num_labels=10,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    torch.manual_seed(seed)
    return Task(
        name="vit",
        description=f"ViT, {layers} layers, width {width}, random weights, {batch} random images of {image}x{image}, dropout on",
        model=transformers.ViTForImageClassification(config).train(),
        batches=image_batches(steps, batch, image, seed, classes=10),
        loss_fn=class_loss,
    )


def next_byte_loss(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy of the next byte. Shapes: ``batch["tokens"]`` is [batch, length + 1]."""
    tokens = batch["tokens"]
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def class_loss(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy of the label. Shapes: ``batch["images"]`` is [batch, 3, image, image]."""
    return F.cross_entropy(model(pixel_values=batch["images"]).logits, batch["labels"])


def text_batches(steps: int, batch: int, length: int, seed: int) -> tuple[Batch, ...]:
    """Random places of the English text. Shapes: [batch, length + 1], int64."""
    text = torch.frombuffer(bytearray(text_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - length - 1, (steps, batch), generator=generator)
    places = starts.unsqueeze(-1) + torch.arange(length + 1)
    return tuple({"tokens": text[rows]} for rows in places)


def image_batches(steps: int, batch: int, image: int, seed: int, *, classes: int) -> tuple[Batch, ...]:
    """Random images and labels. Shapes: images [batch, 3, image, image], labels [batch]."""
    generator = torch.Generator().manual_seed(seed)

    def make() -> Batch:
        images = torch.randn(batch, 3, image, image, generator=generator)
        return {"images": images, "labels": torch.randint(0, classes, (batch,), generator=generator)}

    return tuple(make() for _ in range(steps))


def _transformers(asked: str) -> Any:
    try:
        with offline():
            import transformers
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"asked for the {asked} demo, but the package 'transformers' is not installed; "
            'install the demo\'s packages with `pip install "punar[demo]"`, or choose `--model moe` or `--model unet`, which need none'
        ) from error
    return transformers
