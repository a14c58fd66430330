"""A small language model with mixture-of-experts layers whose routing bias moves during the forward pass.

It is the case that re-running a module's forward gets wrong: the second run would route by a bias that the first one has
already moved, and would move it again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from punar.demo.random_weights import VOCABULARY, text_batches
from punar.demo.task import Batch, Task


class Experts(nn.Module):
    """Top-k routing with balance by bias instead of by an auxiliary loss.

    Source:
        Wang, Gao, Zhao, Sun and Dai, 2024, Auxiliary-loss-free load balancing strategy for mixture-of-experts, arXiv:2408.15664,
        algorithm 1.
    """

    load_bias: Tensor
    tokens_seen: Tensor

    def __init__(self, width: int, *, experts: int, active: int, rate: float = 0.01) -> None:
        super().__init__()
        self.active, self.rate = active, rate
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(experts)
        )
        self.register_buffer("load_bias", torch.zeros(experts))
        self.register_buffer("tokens_seen", torch.zeros(experts, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [tokens, width] to [tokens, width]."""
        scores = self.router(x).sigmoid()
        chosen = (scores + self.load_bias).topk(self.active, dim=-1).indices
        gates = scores.gather(-1, chosen)
        gates = gates / gates.sum(-1, keepdim=True)
        if self.training:
            self._balance(chosen)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            mixed.index_add_(0, token, expert(x[token]) * gates[token, slot].unsqueeze(-1))
        return mixed

    @torch.no_grad()
    def _balance(self, chosen: Tensor) -> None:
        load = torch.bincount(chosen.flatten(), minlength=len(self.experts))
        self.tokens_seen += load
        self.load_bias += self.rate * torch.sign(load.float().mean() - load)


class Block(nn.Module):
    def __init__(self, width: int, *, heads: int, experts: int, active: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.experts_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.experts = Experts(width, experts=experts, active=active)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [batch, length, width] to the same."""
        x = x + self._attend(self.attention_norm(x))
        mixed: Tensor = self.experts(self.experts_norm(x).flatten(0, 1))
        return x + mixed.view_as(x)

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.query_key_value(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return attended


class MoE(nn.Module):
    def __init__(self, *, width: int, layers: int, length: int, heads: int = 8, experts: int = 8, active: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads=heads, experts=experts, active=active) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Shapes: [batch, length] to [batch, length, vocabulary]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_task(*, steps: int, seed: int, batch: int = 8, length: int = 192, layers: int = 6, width: int = 192) -> Task:
    """A byte-level language model, 8 experts of which 2 are active, routing bias and counters as buffers, dropout on."""
    torch.manual_seed(seed)
    return Task(
        name="moe",
        description=f"mixture of experts, {layers} layers, width {width}, random weights, {batch} texts of {length} bytes, dropout on",
        model=MoE(width=width, layers=layers, length=length).train(),
        batches=text_batches(steps, batch, length, seed),
        loss_fn=next_byte_loss,
    )


def next_byte_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the next byte. Shapes: ``batch["tokens"]`` is [batch, length + 1]."""
    tokens = batch["tokens"]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
