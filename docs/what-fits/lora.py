"""Llama 2 7B with low-rank adapters of rank 16 on all of its projections, one text of 4096 tokens, or of 8192: weights frozen, in bfloat16.

Source:
    Hu et al., 2021, LoRA: low-rank adaptation of large language models, arXiv:2106.09685.
"""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

RANK, ALPHA = 16, 32


class Adapted(nn.Module):
    """A frozen projection with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(RANK, base.out_features, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * (ALPHA / RANK)


def make(length=4096):
    body = json.loads((Path(__file__).parent / "llama-7b.json").read_text())
    with torch.device("meta"):  # shapes alone: no weights are made
        config = AutoConfig.for_model(body.pop("model_type"), **body)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train().requires_grad_(False)
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, child in list(part.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(part, name, Adapted(child))
    tokens = torch.arange(length).view(1, length)
    return model, tokens, lambda model, tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def make_long():
    return make(8192)
