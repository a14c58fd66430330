"""A step of a transformers model, from its configuration alone: random weights or none, nothing is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from punar.cli.output import WrongArgument
from punar.errors import MissingDependency, UsageError

PREFIX = "hf:"

_SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
"""What a device has a share of where layers are split over several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a pipeline, counted from 1."""

    number: int
    of: int

    @property
    def in_flight(self) -> int:
        """How many micro-batches it has run forward and not yet backward, at most, where one forward and one backward pass take turns."""
        return self.of - self.number + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is asked for of a transformers model.

    ``batch``: texts; ``length``: tokens each; ``tensor``: over how many devices each layer is split; ``stage``: that of a pipeline, None for the whole
    model; ``has_weights``: whether they are made, at random, or only their shapes.
    """

    batch: int | None = None
    length: int | None = None
    dtype: str | None = None
    tensor: int = 1
    stage: Stage | None = None
    has_weights: bool = True


def parse_stage(text: str) -> Stage:
    """Reads a stage such as ``1/4``.

    Raises:
        WrongArgument: it is none.
    """
    number, _, of = text.partition("/")
    if number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of):
        return Stage(number=int(number), of=int(of))
    raise WrongArgument(
        f"asked for the stage {text!r} of a pipeline; give its number and how many there are, such as 1/4 for the first of four"
    )


def load_hf(path: Path, sizes: Sizes) -> tuple[Any, Any, Any]:
    """A causal language model in training, a batch of tokens, and the loss of the next token; or a stage of it, with what it gets and gives.

    Shapes: tokens are [batch, length], int64; what a stage gets and gives is [batch, length, hidden], in the weights' dtype.

    Raises:
        WrongArgument: the file cannot be read, there is no such dtype, no length, or the model cannot be split so.
        UsageError: it is no configuration of a causal language model of transformers.
        MissingDependency: transformers is not installed.
    """
    import torch

    if sizes.length is None:
        raise WrongArgument(f"asked for a step of {path}, of texts of unknown length; give --length, and --batch for more than one text")
    config = _config_in(path)
    if sizes.tensor > 1:
        _split(config.get_text_config(), sizes.tensor, path)
    stage = sizes.stage or Stage(number=1, of=1)
    if stage.of > 1:
        _divide(config.get_text_config(), "num_hidden_layers", stage.of, path, "stages")
    try:
        import transformers

        kind: Any = transformers.AutoModelForCausalLM if stage.number == stage.of else transformers.AutoModel
        with torch.device("cpu" if sizes.has_weights else "meta"):
            model = kind.from_config(config, dtype=_dtype_of(sizes.dtype or config.dtype)).train()
            if stage.number > 1:
                model.set_input_embeddings(torch.nn.Identity())
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise UsageError(
            f"asked for a causal language model as {path} describes it, which transformers refuses: {error}; "
            "for other models give a Python function, `FILE.py` or `module:function`"
        ) from error
    tokens = make_tokens(sizes.batch or 1, sizes.length, config.get_text_config().vocab_size)
    if stage.of == 1:
        return model, tokens, next_token_loss
    with torch.device("cpu" if sizes.has_weights else "meta"):
        hidden = torch.zeros(*tokens.shape, config.get_text_config().hidden_size, dtype=model.dtype)
    batch = {"input_ids": tokens} if stage.number == 1 else {"inputs_embeds": hidden.clone().requires_grad_()}
    if stage.number == stage.of:
        return model, batch | {"labels": tokens}, stage_loss
    return model, (batch, hidden), stage_product


def make_tokens(batch: int, length: int, vocabulary: int) -> Any:
    """A batch of tokens.

    Shapes: [batch, length], int64.
    """
    import torch

    return torch.arange(batch * length).view(batch, length) % vocabulary


def next_token_loss(model: Any, tokens: Any) -> Any:
    """Cross-entropy of the next token, as transformers computes it."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def stage_loss(model: Any, batch: Any) -> Any:
    """The last stage's loss."""
    return model(**batch, use_cache=False).loss


def stage_product(model: Any, batch: Any) -> Any:
    """A number whose gradient by what a stage gives is the one that the next stage sends back: their product, summed."""
    inputs, gradient = batch
    return (model(**inputs, use_cache=False).last_hidden_state * gradient).sum()


def _split(config: Any, devices: int, path: Path) -> None:
    """Leaves of each layer what one of several devices has: heads, the width inside of feed-forward layers, and the vocabulary.

    Source:
        Shoeybi et al., 2019, Megatron-LM: training multi-billion parameter language models using model parallelism, arXiv:1909.08053.
    """
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "head_dim", None) or (heads and config.hidden_size // heads)
    if heads is None or "head_dim" not in dir(config) or "intermediate_size" not in dir(config):
        raise WrongArgument(
            f"asked to split the layers of {path} over {devices} devices; a {config.model_type} configuration has no head_dim of its own, so that one "
            "device's share cannot be written as such: give a Python function that builds it"
        )
    config.head_dim = width
    for name in _SPLIT:
        if getattr(config, name, None) is not None:
            _divide(config, name, devices, path, "devices")


def _divide(config: Any, name: str, parts: int, path: Path, what: str) -> None:
    whole = getattr(config, name)
    if whole % parts:
        raise WrongArgument(
            f"asked to split {path} over {parts} {what}, found {name} = {whole}, which that does not divide; give a divisor"
        )
    setattr(config, name, whole // parts)


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
    except Exception as error:  # it validates by classes of its own, which derive from nothing narrower
        raise UsageError(
            f"asked for the model that {path} describes, which transformers refuses: {error}; check its model_type and its sizes"
        ) from error


def _dtype_of(asked: Any) -> Any:
    import torch

    if asked is None or isinstance(asked, torch.dtype):
        return asked
    found = getattr(torch, asked, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise WrongArgument(f"asked for weights in {asked!r}; give bfloat16, float16 or float32")
    return found
