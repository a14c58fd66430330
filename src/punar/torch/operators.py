"""What punar must know of each PyTorch operator: whether it can run again, what it writes, whether it draws random numbers.

Derived from the operator's schema and tags; the tables below hold only what schemas do not say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, KeysView, ValuesView
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PLAIN_TYPES: set[type] = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
"""Tensor types whose operators do exactly what their schema says; other subclasses dispatch on their own. While a step is traced on fake
tensors (``fake``), these are such a type too."""

_UNINITIALIZED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "empty_quantized", "lift_fresh", "lift"}
)
"""Allocated here, filled elsewhere, perhaps by a kernel that dispatches nothing."""

FILLED_FACTORIES = frozenset({"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"})

_NEVER_REPLAYED = frozenset(
    {"resize_", "set_", "_resize_output_", "lift", "lift_fresh", "lift_fresh_copy", "_local_scalar_dense", "record_stream"}
)

_MATMUL = frozenset(
    {
        "mm",
        "bmm",
        "addmm",
        "addmm_",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "linear",
        "matmul",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "_addmm_activation",
        "mkldnn_linear",
        "_int_mm",
        "einsum",
        "_trilinear",
    }
)
_CONVOLUTION = frozenset(
    {
        "convolution",
        "_convolution",
        "mkldnn_convolution",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "miopen_convolution",
        "convolution_overrideable",
        "_slow_conv2d_forward",
        "conv_tbc",
    }
)
_RECURRENT = frozenset({"_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer"})
_COPY = frozenset({"clone", "_to_copy", "copy_", "copy", "contiguous", "cat", "stack", "constant_pad_nd", "repeat"})

_HIDDEN_WRITES: dict[str, Callable[[tuple[Any, ...]], tuple[int, ...]]] = {
    "native_batch_norm": lambda args: (3, 4) if args[5] else (),
    "cudnn_batch_norm": lambda args: (3, 4) if args[5] else (),
    "miopen_batch_norm": lambda args: (3, 4) if args[5] else (),
}
"""Positions of arguments that a kernel overwrites though its schema does not say so: running statistics, in training.

In training the outputs do not depend on them, so that a replay passes None in their place."""

_WRITING_NAMESPACES = frozenset({"c10d", "fsdp"})
"""Collectives write into their arguments without saying so in the schema."""

_UNDECLARED_VIEWS = frozenset({"unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "_unsafe_view", "_reshape_alias"})
"""Views in all but their schema."""

_user_replayable: set[Any] = set()


@dataclass(slots=True)
class OperatorInfo:
    """One operator. ``writes``: positions or names of arguments written in place; ``is_view``: outputs alias inputs and nothing is written.

    ``makes``: outputs may be new storages. ``hidden_writes``: see above. ``is_factory``: fills what it allocates with one number.
    """

    func: Any
    name: str
    kind: str
    writes: tuple[int | str, ...]
    is_view: bool
    makes: bool
    is_random: bool
    is_replayable: bool
    is_uninitialized: bool
    is_factory: bool
    hidden_writes: Callable[[tuple[Any, ...]], tuple[int, ...]] | None

    @property
    def is_refill(self) -> bool:
        """Whether it writes a sharded parameter's contents back into storage that was freed meanwhile."""
        return self.name.startswith("fsdp.")

    @property
    def can_write(self) -> bool:
        """Whether a call may overwrite one of its arguments."""
        return bool(self.writes) or self.hidden_writes is not None

    def replay_args(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with which a replay calls the operator: without what the call overwrites in secret."""
        hidden = self.hidden_writes(args) if self.hidden_writes is not None else ()
        return tuple(None if place in hidden else arg for place, arg in enumerate(args)) if hidden else args

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that this call overwrites."""
        places: tuple[int | str, ...] = self.writes
        if self.hidden_writes is not None:
            places += self.hidden_writes(args)
        found = []
        for place in places:
            if isinstance(place, int):
                found += tensors_in(args[place : place + 1])
            elif place in kwargs:
                found += tensors_in((kwargs[place],))
        return found


_table: dict[Any, OperatorInfo] = {}


def operator_info(func: Any) -> OperatorInfo:
    """Looks an operator up, deriving it from its schema the first time."""
    info = _table.get(func)
    if info is None:
        info = _table[func] = _derive(func)
    return info


def mark_replayable(func: Any) -> None:
    """Declares a custom operator to be a pure function of its arguments, so that it may be run again."""
    _user_replayable.add(func)
    _table.pop(func, None)


def _derive(func: Any) -> OperatorInfo:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return _opaque(func)
    namespace, _, base = schema.name.partition("::")
    writes: list[int | str] = []
    for place, argument in enumerate(schema.arguments):
        is_tensor = "Tensor" in str(argument.type)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or (is_tensor and namespace in _WRITING_NAMESPACES):
            writes.append(argument.name if argument.kwarg_only else place)
    aliases = [r.alias_info is not None for r in schema.returns]
    if namespace == "aten" and base in _UNDECLARED_VIEWS:
        aliases = [True] * len(aliases)
    is_view = bool(aliases) and all(aliases) and not writes
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    is_uninitialized = namespace == "aten" and base in _UNINITIALIZED
    is_replayable = (namespace == "aten" or func in _user_replayable) and base not in _NEVER_REPLAYED
    return OperatorInfo(
        func=func,
        name=str(func),
        kind=_kind(namespace, base, is_view, is_random),
        writes=tuple(writes),
        is_view=is_view,
        makes=bool(aliases) and not all(aliases),
        is_random=is_random,
        is_replayable=is_replayable,
        is_uninitialized=is_uninitialized,
        is_factory=base in FILLED_FACTORIES,
        hidden_writes=_HIDDEN_WRITES.get(base) if namespace == "aten" else None,
    )


def _opaque(func: Any) -> OperatorInfo:
    """A higher-order operator, whose results are held, or a function that the user declared replayable."""
    return OperatorInfo(
        func=func,
        name=str(func),
        kind="other",
        writes=(),
        is_view=False,
        makes=True,
        is_random=False,
        is_replayable=getattr(func, "is_replayable", False),
        is_uninitialized=False,
        is_factory=False,
        hidden_writes=None,
    )


def _kind(namespace: str, base: str, is_view: bool, is_random: bool) -> str:
    if namespace in ("c10d", "_c10d_functional", "c10d_functional", "fsdp"):
        return "collective"
    if base in _MATMUL or base in _RECURRENT:
        return "matmul"
    if base.removesuffix("_backward") in _CONVOLUTION:
        return "convolution"
    if "scaled_dot_product" in base or base.startswith(("_flash_attention", "_efficient_attention")):
        return "attention"
    if is_view:
        return "view"
    if base in _UNINITIALIZED or base in FILLED_FACTORIES or base in ("arange", "eye", "scalar_tensor"):
        return "factory"
    if is_random:
        return "random"
    if "norm" in base:
        return "norm"
    return "copy" if base in _COPY else "other"


def tensors_in(items: Any) -> list[Tensor]:
    """The tensors among arguments or outputs, also those inside lists, tuples and dicts, in order."""
    found: list[Tensor] = []
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found.extend(tensors_in(item))
        elif isinstance(item, (dict, KeysView, ValuesView)):
            found.extend(tensors_in(item.values() if isinstance(item, dict) else item))
    return found


def outputs_in(out: Any) -> list[Tensor]:
    """The tensors that an operator returned."""
    if isinstance(out, Tensor):
        return [out]
    return tensors_in(out) if isinstance(out, (list, tuple)) else []


def in_backward() -> bool:
    """Whether autograd's engine is running in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def signature_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Names an operator with the shapes, dtypes and strides of its tensors and its plain arguments; equal names are one object."""
    parts = [_describe(arg) for arg in args] + [f"{key}={_describe(value)}" for key, value in kwargs.items()]
    return sys.intern(f"{name}({','.join(parts)})")


_DTYPES: dict[torch.dtype, str] = {}


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name, such as ``float32``; equal names are one object."""
    name = _DTYPES.get(dtype)
    if name is None:
        name = _DTYPES[dtype] = sys.intern(str(dtype).removeprefix("torch."))
    return name


def _describe(item: Any) -> str:
    if isinstance(item, Tensor):
        strides = "" if item.layout != torch.strided or item.is_contiguous() else f"/{list(item.stride())}"
        return f"{name_of(item.dtype)}{[int(n) for n in item.shape]}{strides}"
    if isinstance(item, (list, tuple)):
        return f"[{','.join(_describe(i) for i in item)}]"
    if isinstance(item, torch.Generator):
        return "generator"
    return str(item)
