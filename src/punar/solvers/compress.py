"""Which values can be held in fewer bytes, and by what.

NOTE. Why these are safe to hold so.

1. ``bits``: truth values that an operator made, and what ``bernoulli_`` filled, scaled or not. ``int32``: whole numbers. Both are looked at when they are
   encoded; what does not fit is kept.
2. ``sign``: what ``relu`` made and autograd saved for its own backward alone, before any other operator ran: that asks only where it is above zero.
3. Rounding: values of which every reader in backward is known to tolerate it (``TOLERANT``) and applies it to a gradient. What only decides,
   as ReLU's backward does, is not among them, nor what divides; nor is what a replay starts from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from punar.ir import EventKind, Trace
from punar.ir.derived import derived
from punar.ir.lineage import lineage_of
from punar.plan.codecs import Codec, channel_name, codec_of, codecs_of
from punar.plan.moves import Channel, Move
from punar.solvers.movable import LEAST_BYTES, absent, movable, places_of

TOLERANT = frozenset(
    (
        *(
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "mul",
            "convolution_backward",
            "gelu_backward",
            "silu_backward",
            "sigmoid_backward",
            "tanh_backward",
        ),
        *("native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward", "_softmax_backward_data"),
        *("_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward"),
        *("_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward"),
    )
)
"""Operators of backward that are continuous in what was saved for them, without division by it."""


def codable(trace: Trace, options: Iterable[str], least_bytes: int = LEAST_BYTES) -> dict[str, tuple[int, ...]]:
    """For each channel of the codecs that are asked for the values, of at least so many bytes, that can go through it; those without any are left out."""
    found: dict[str, list[int]] = {}
    for codec in codecs_of(options):
        for v in _candidates(trace, codec):
            storage = trace.storages[trace.values[v].storage]
            dtype = storage.dtype
            if dtype in codec.dtypes and storage.bytes >= least_bytes:
                found.setdefault(channel_name(codec, dtype), []).append(v)
    return {name: tuple(values) for name, values in found.items()}


def _candidates(trace: Trace, codec: Codec) -> tuple[int, ...]:
    if codec.is_checked and trace.device != "cpu":
        return _truths(trace) if codec.name == "bits" else ()
    match codec.name:
        case "bits":
            return (*_truths(trace), *_random_masks(trace))
        case "sign":
            return _signs(trace)
        case "int32":
            return tuple(movable(trace, 0))
        case _:
            return _tolerated(trace)


def _truths(trace: Trace) -> tuple[int, ...]:
    return tuple(v for v in movable(trace, 0) if trace.storages[trace.values[v].storage].dtype == "bool" and not trace.values[v].version)


@derived
def _random_masks(trace: Trace) -> tuple[int, ...]:
    """What ``bernoulli_`` filled, or a number divided since, as dropout's noise is."""
    line = lineage_of(trace)
    found = []
    for v in absent(trace):
        op = trace.ops[line.producer[v]]
        if op.name.startswith("aten.div_.Scalar") and len(op.inputs) == 1 and line.producer[op.inputs[0]] >= 0:
            op = trace.ops[line.producer[op.inputs[0]]]
        if op.name.startswith("aten.bernoulli_."):
            found.append(v)
    return tuple(found)


@derived
def _signs(trace: Trace) -> tuple[int, ...]:
    """Rule 2."""
    line = lineage_of(trace)
    saves = Counter(save.value for save in trace.saves)
    saved_at_once = _saved_at_once(trace)
    return tuple(
        v
        for v in movable(trace, 0)
        if v in saved_at_once
        and saves[v] == 1
        and trace.ops[line.producer[v]].name in ("aten.relu.default", "aten.relu_.default")
        and trace.ops[line.producer[v]].has_grad_mode
    )


def _saved_at_once(trace: Trace) -> set[int]:
    """The values that autograd saved before any operator ran after the one that made them."""
    found, latest = set(), -1
    for kind, id in trace.events:
        if kind == EventKind.RUN:
            latest = id
        elif kind == EventKind.SAVE and trace.values[trace.saves[id].value].producer == latest:
            found.add(trace.saves[id].value)
    return found


@derived
def _tolerated(trace: Trace) -> tuple[int, ...]:
    """Rule 3."""
    factors = _made_of_saves(trace)
    readers: dict[int, set[str]] = {}
    for op in trace.ops:
        if op.is_backward and op.kind != "view":
            name = "" if factors.issuperset(op.inputs) else op.name.split(".")[1]
            for v in op.inputs:
                readers.setdefault(v, set()).add(name)
    return tuple(v for v in movable(trace, 0) if readers.get(v) and readers[v] <= TOLERANT)


def _made_of_saves(trace: Trace) -> set[int]:
    """What forward saved, and what backward makes of that alone, without a gradient: what becomes of such a factor later may be anything."""
    found = {save.value for save in trace.saves}
    found.update(value.id for value in trace.values if trace.storages[value.storage].is_source)
    for op in trace.ops:
        if op.is_backward and found.issuperset(op.inputs):
            found.update(op.outputs)
    return found


def coded(trace: Trace, channels: Sequence[Channel], codecs: Iterable[str]) -> tuple[Move, ...]:
    """Every value that can go through one of the codecs, each by the first that takes it, as moves."""
    moves: dict[int, Move] = {}
    for name in codecs:
        for tier, channel in enumerate(channels):
            known = codec_of(channel.name)
            if known is not None and known[0].name == name:
                values = codable(trace, (known[0].option,)).get(channel.name, ())
                moves.update({v: _move(trace, v, tier) for v in values if v not in moves and _land(trace, v) >= 0})
    return tuple(moves[v] for v in sorted(moves))


def _move(trace: Trace, value: int, tier: int) -> Move:
    return Move(value=value, land=_land(trace, value), fetch=trace.demand_rank[value], tier=tier)


def _land(trace: Trace, value: int) -> int:
    """The next operator after the step itself has let go of a value; -1 where forward ends before."""
    line, places = lineage_of(trace), places_of(trace)
    at = bisect_right(places.landings, places.gone(line.producer[value], line.storage[value]))
    return places.landing_ops[at] if at < len(places.landings) else -1


def first_bytes(trace: Trace, moves: Sequence[Move], part: float) -> tuple[Move, ...]:
    """Of some moves in the order of their values those of the first part of their bytes."""
    line = lineage_of(trace)
    left = part * sum(line.bytes[move.value] for move in moves)
    taken = []
    for move in moves:
        left -= line.bytes[move.value]
        if left < 0:
            break
        taken.append(move)
    return tuple(taken)


def is_dearer(trace: Trace, move: Move, channel: Channel) -> bool:
    """Whether making the value again would take longer than its coding."""
    line = lineage_of(trace)
    size = line.bytes[move.value]
    return line.times[line.producer[move.value]] > channel.write_ns(size) + channel.read_ns(size)
