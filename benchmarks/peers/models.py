"""The models: eight of about two seconds a step on one thread at scale 1, and a tiny one for the test.

A scale multiplies the batch (for language models the tokens), never width or depth, so that a model has the same operators at each scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with one batch of its training.

    Attributes:
        blocks: what users checkpoint: the repeated parts, in the order in which they run.
        is_chain: each block's one output is the first argument of the next, so that blocks can be joined to segments.
        has_attention: its blocks call ``scaled_dot_product_attention``.
    """

    name: str
    model: nn.Module
    batch: Tensor
    loss_of: Callable[[Tensor], Tensor]
    blocks: Sequence[nn.Module]
    is_chain: bool
    has_attention: bool = False

    def step(self) -> Tensor:
        """One forward and backward pass; gradients are added to those that are there."""
        loss = self.loss_of(self.model(self.batch))
        loss.backward()
        return loss.detach()


# -- GPT ---------------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shape_of_text(scale: float) -> tuple[int, int]:
    """Sequences and tokens in each: 2 of 512 at scale 1, one shorter sequence below a half."""
    batch = max(round(2 * scale), 1)
    return batch, min(512, max(round(1024 * scale / batch), 8))


def next_token_loss(targets: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda logits: F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def gpt(scale: float) -> Subject:
    batch, length = shape_of_text(scale)
    model = GPT(12, 512, 8, length)
    return text_subject("gpt", model, model.blocks, batch, length)


def tiny(scale: float) -> Subject:
    batch, length = shape_of_text(scale)
    model = GPT(4, 64, 2, length, 256)
    return text_subject("tiny", model, model.blocks, batch, length, 256)


def text_subject(name: str, model: nn.Module, blocks: Any, batch: int, length: int, vocabulary: int = VOCABULARY) -> Subject:
    tokens, targets = (torch.randint(0, vocabulary, (batch, length)) for _ in range(2))
    return Subject(
        name=name,
        model=model,
        batch=tokens,
        loss_of=next_token_loss(targets),
        blocks=list(blocks),
        is_chain=True,
        has_attention=True,
    )


# -- transformers' ---------------------------------------------------------------------------------------------------------------


class Logits(nn.Module):
    """A model of transformers reduced to its logits."""

    def __init__(self, model: nn.Module, argument: str, **fixed: Any) -> None:
        super().__init__()
        self.model, self.argument, self.fixed = model, argument, fixed

    def forward(self, x: Tensor) -> Tensor:
        return self.model(**{self.argument: x}, **self.fixed).logits


def gpt2(scale: float) -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    batch, length = shape_of_text(scale)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 512, "n_embd": 512, "n_layer": 12, "n_head": 8, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa"))
    return text_subject("gpt2", Logits(model, "input_ids", use_cache=False), model.transformer.h, batch, length)


def llama(scale: float) -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    batch, length = shape_of_text(scale)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, max_position_embeddings=512, attn_implementation="sdpa"))
    return text_subject("llama", Logits(model, "input_ids", use_cache=False), model.model.layers, batch, length)


def image_subject(name: str, model: nn.Module, blocks: Any, images: Tensor, *, has_attention: bool) -> Subject:
    targets = torch.randint(0, 1000, (images.shape[0],))
    return Subject(
        name=name,
        model=model,
        batch=images,
        loss_of=lambda logits: F.cross_entropy(logits, targets),
        blocks=list(blocks),
        is_chain=True,
        has_attention=has_attention,
    )


def vit(scale: float) -> Subject:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536, "num_labels": 1000}
    model = ViTForImageClassification(ViTConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == 12)
    images = torch.randn(max(round(8 * scale), 1), 3, 224, 224)
    return image_subject("vit", Logits(model, "pixel_values"), layers, images, has_attention=True)


def resnet50(scale: float) -> Subject:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))  # the defaults are ResNet-50
    blocks = [block for stage in model.resnet.encoder.stages for block in stage.layers]
    images = torch.randn(max(round(16 * scale), 2), 3, 128, 128)  # one image alone has no batch statistics
    return image_subject("resnet50", Logits(model, "pixel_values"), blocks, images, has_attention=False)


# -- U-Net, a deep MLP, an unrolled LSTM -----------------------------------------------------------------------------------------


def double_convolution(channels: int, out: int) -> nn.Sequential:
    first = (nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU())
    return nn.Sequential(*first, nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, channels: int = 24, depth: int = 4) -> None:
        super().__init__()
        sizes = [channels * 2**level for level in range(depth + 1)]
        self.enter = double_convolution(3, sizes[0])
        self.down = nn.ModuleList(double_convolution(sizes[i], sizes[i + 1]) for i in range(depth))
        self.up = nn.ModuleList(nn.ConvTranspose2d(sizes[i + 1], sizes[i], 2, 2) for i in reversed(range(depth)))
        self.join = nn.ModuleList(double_convolution(2 * sizes[i], sizes[i]) for i in reversed(range(depth)))
        self.leave = nn.Conv2d(sizes[0], 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.enter(x), []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return self.leave(x)


def unet(scale: float) -> Subject:
    batch, model = max(round(6 * scale), 1), UNet()
    targets = torch.randint(0, 4, (batch, 128, 128))
    return Subject(
        name="unet",
        model=model,
        batch=torch.randn(batch, 3, 128, 128),
        loss_of=lambda logits: F.cross_entropy(logits, targets),
        blocks=[model.enter, *model.down, *model.join],
        is_chain=False,
    )


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


def mlp(scale: float) -> Subject:
    rows, width = max(round(2048 * scale), 1), 256
    model, targets = nn.Sequential(*(Layer(width) for _ in range(100))), torch.randn(rows, width)
    return Subject(
        name="mlp",
        model=model,
        batch=torch.randn(rows, width),
        loss_of=lambda out: F.mse_loss(out, targets),
        blocks=list(model),
        is_chain=True,
    )


class Chunk(nn.Module):
    """Some time steps of a cell that all chunks share."""

    def __init__(self, cell: nn.LSTMCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, inputs: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = []
        for x in inputs.unbind(0):
            hidden, state = self.cell(x, (hidden, state))
            outputs.append(hidden)
        return torch.stack(outputs), hidden, state


class Unrolled(nn.Module):
    def __init__(self, width: int, chunks: int) -> None:
        super().__init__()
        cell = nn.LSTMCell(width, width)
        self.chunks = nn.ModuleList(Chunk(cell) for _ in range(chunks))

    def forward(self, x: Tensor) -> Tensor:
        hidden = state = x.new_zeros(x.shape[1:])
        outputs = []
        for chunk, inputs in zip(self.chunks, x.chunk(len(self.chunks)), strict=True):
            out, hidden, state = chunk(inputs, hidden, state)
            outputs.append(out)
        return torch.cat(outputs)


def lstm(scale: float) -> Subject:
    rows, width, length = max(round(64 * scale), 1), 256, 256
    model, targets = Unrolled(width, chunks=16), torch.randn(length, rows, width)
    return Subject(
        name="lstm",
        model=model,
        batch=torch.randn(length, rows, width),
        loss_of=lambda out: F.mse_loss(out, targets),
        blocks=list(model.chunks),
        is_chain=False,
    )


MODELS: dict[str, Callable[[float], Subject]] = {
    "gpt": gpt,
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
    "resnet50": resnet50,
    "unet": unet,
    "mlp": mlp,
    "lstm": lstm,
    "tiny": tiny,
}

COMPARED = tuple(name for name in MODELS if name != "tiny")
"""The models that ``--all`` runs."""


def make_subject(name: str, scale: float) -> Subject:
    """Builds a model with its batch, the same ones each time, and gives it gradients of zero: they are there before a step that is measured."""
    torch.manual_seed(0)
    subject = MODELS[name](scale)
    subject.model.train()
    for parameter in subject.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return subject
