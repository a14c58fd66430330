"""A step of a transformers model, from its configuration alone: random weights or none, nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from punar.cli.output import WrongArgument
from punar.errors import MissingDependency, UsageError

PREFIX = "hf:"


def load_hf(path: Path, *, batch: int, length: int, dtype: str | None, has_weights: bool) -> tuple[Any, Any, Any]:
    """A causal language model in training, a batch of tokens, and the loss of the next token.

    Shapes: the batch is [batch, length], int64.

    Args:
        dtype: of the weights; None for what the configuration says.
        has_weights: whether the weights are made, at random, or only their shapes.

    Raises:
        WrongArgument: the file cannot be read, or there is no such dtype.
        UsageError: it is no configuration of a causal language model of transformers.
        MissingDependency: transformers is not installed.
    """
    import torch

    config = _config_in(path)
    try:
        import transformers

        with torch.device("cpu" if has_weights else "meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=_dtype_of(dtype or config.dtype)).train()
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise UsageError(
            f"asked for a causal language model as {path} describes it, which transformers refuses: {error}; "
            "for other models give a Python function, `FILE.py` or `module:function`"
        ) from error
    return model, make_tokens(batch, length, config.get_text_config().vocab_size), next_token_loss


def make_tokens(batch: int, length: int, vocabulary: int) -> Any:
    """A batch of tokens.

    Shapes: [batch, length], int64.
    """
    import torch

    return torch.arange(batch * length).view(batch, length) % vocabulary


def next_token_loss(model: Any, tokens: Any) -> Any:
    """Cross-entropy of the next token, as transformers computes it."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _config_in(path: Path) -> Any:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WrongArgument(
            f"asked to read a model's configuration from {path}, which failed: {error}; give the config.json of a transformers model"
        ) from error
    if not isinstance(body, dict) or not isinstance(body.get("model_type"), str):
        raise UsageError(
            f"asked to read a model's configuration from {path}, which names no model_type; give the config.json of a transformers model"
        )
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"asked for the model that {path} describes, but the package 'transformers' is not installed; install it with `pip install \"punar[demo]\"`"
        ) from error
    kind = body.pop("model_type")
    try:
        return transformers.AutoConfig.for_model(kind, **body)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"asked for the model that {path} describes, which transformers refuses: {error}; check its model_type") from error


def _dtype_of(asked: Any) -> Any:
    import torch

    if asked is None or isinstance(asked, torch.dtype):
        return asked
    found = getattr(torch, asked, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise WrongArgument(f"asked for weights in {asked!r}; give bfloat16, float16 or float32")
    return found
