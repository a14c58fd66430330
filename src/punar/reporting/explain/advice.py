"""What would lower the least peak, beyond what any plan can: each with the peak that it would come to.

NOTE. How the numbers are come by.

1. Unless it says otherwise, a peak is the simulator's, of the same plan on an altered trace: the plan still holds there, so that it is a
   peak that can be reached, if the step can be changed so.
2. Arithmetic on what is resident, and the least that one operator needs, are proved: they say "at most" and "no plan".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from punar.ir.trace import Event, EventKind, Op, Storage, Trace
from punar.plan.moves import GRAIN
from punar.plan.plan import Plan
from punar.plan.playback import Peak
from punar.reporting.explain.gradients import gradients_before, gradients_of, made_by, of_parameters, size_of, touched_by
from punar.reporting.explain.places import title_of
from punar.units import format_apart, format_bytes

CHUNKS = 8
"""Into how many pieces a loss is thought to be cut."""

_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul"))
"""What a head is: a layer of an LSTM counts as matrix products too, and its steps cannot be taken in chunks."""

_LEAST_GAIN = 0.01
"""What lowers the peak by less than this part of it is not worth a sentence."""

_MOSTLY = 0.5
"""From this part of the resident bytes on, something is most of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change of the step, not of the plan. Units: bytes of the whole step, predicted.

    Attributes:
        kind: ``chunked loss``, ``optimizer in backward``, ``half batch``, ``fewer bytes a state``, ``no gradients before`` or ``replayable``.
        text: as a sentence. peak_bytes: the least peak with it.
        is_bound: the peak is no lower than this, rather than this.
    """

    kind: str
    text: str
    peak_bytes: int
    is_bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least that any plan needs: what one operator reads and allocates is there at once. ``op``: that one."""

    bytes: int
    op: int


def floor_of(trace: Trace) -> Floor:
    """The operator that needs the most bytes on its own, beside what is resident (proved: Rule 2)."""

    def needs(op: Op) -> int:
        there = touched_by(trace, op) - made_by(trace, op)
        return op.peak_bytes + size_of(trace, (storage for storage in there if not trace.storages[storage].is_source))

    worst = max(trace.ops, key=needs)
    return Floor(bytes=trace.resident_bytes + needs(worst), op=worst.id)


def advise(trace: Trace, plan: Plan, peak: Peak) -> tuple[Advice, ...]:
    """All that would lower the peak of ``plan`` by enough to be worth a sentence, the most first. ``peak``: of it."""
    found = (
        *_chunked_loss(trace, plan, peak),
        *_optimizer_in_backward(trace, plan, peak),
        *_half_batch(trace, plan, peak),
        *_resident_states(trace, peak),
        *_replayable(trace, peak),
    )
    most_bytes = peak.bytes * (1 - _LEAST_GAIN)
    return tuple(sorted((advice for advice in found if advice.peak_bytes <= most_bytes), key=lambda advice: advice.peak_bytes))


def _peak_of(trace: Trace, plan: Plan) -> int:
    return plan.judged(trace).peak_bytes


def _share(size: int, whole: int) -> str:
    return f"{size / max(whole, 1):.0%}"


# -- the loss ------------------------------------------------------------------------------------------------------------


def _chunked_loss(trace: Trace, plan: Plan, peak: Peak) -> list[Advice]:
    head = loss_head(trace)
    if head is None:
        return []
    ops = loss_of(trace, head)
    at_peak = sum(holding.bytes for holding in peak.holdings if holding.op in ops) + peak.own_bytes * (peak.op in ops)
    lower = _peak_of(chunked(trace, head, CHUNKS), plan)
    text = (
        f"Compute the loss in {CHUNKS} chunks: what {title_of(trace, head.id)} makes, and what the loss makes of it, are {format_bytes(at_peak)} "
        f"at the least peak ({_share(at_peak, peak.bytes)}). With a chunked loss it would be {_lowered(lower, peak)}, or lower still."
    )
    return [Advice(kind="chunked loss", text=text, peak_bytes=lower)]


def loss_head(trace: Trace) -> Op | None:
    """The last matrix product of forward, where only a loss follows it: then what it makes are the logits.

    It is no loss that follows where that reads more of what was made before than whole numbers, such as targets, or where another module than
    the product's has parameters in it.
    """
    products = [op for op in trace.forward_ops if op.kind == "matmul" and op.has_grad_mode]
    if not products or products[-1].name not in _PRODUCTS:
        return None
    head = products[-1]
    loss = [op for op in trace.forward_ops if op.id > head.id]
    within = {storage for op in (head, *loss) for storage in made_by(trace, op)}
    read = {trace.values[value].storage for op in loss for value in op.inputs} - within
    if any(not trace.storages[storage].is_source and not _is_whole_number(trace.storages[storage]) for storage in read):
        return None
    parameters = of_parameters(trace)
    makers = {trace.ops[op.forward] for op in trace.ops if op.forward > head.id and made_by(trace, op) & parameters}
    return None if any(op.module != head.module for op in makers) else head


def _is_whole_number(storage: Storage) -> bool:
    return storage.dtype.startswith(("int", "uint", "bool"))


def loss_of(trace: Trace, head: Op) -> set[int]:
    """The head, what follows it in forward, and the backward of what follows it."""
    forward = {op.id for op in trace.forward_ops if op.id >= head.id}
    return forward | {op.id for op in trace.ops if op.forward > head.id}


def chunked(trace: Trace, head: Op, parts: int) -> Trace:
    """The same step with its loss computed in parts."""
    common = size_of(trace, (storage for storage in common_to_chunks(trace, head) if not trace.storages[storage].is_source))
    ops = loss_of(trace, head)
    beside = ops | {op.id for op in trace.ops if op.forward == head.id}
    cut = shrunk(trace, ops, parts)
    return replace(cut, ops=tuple(replace(op, peak_bytes=op.peak_bytes + common) if op.id in beside else op for op in cut.ops))


def common_to_chunks(trace: Trace, head: Op) -> set[int]:
    """What is there in full while one chunk of the loss runs.

    What the head reads, or was cast to be read, since the other chunks need it; and the sums of the gradients that the head's backward makes,
    with what those of activations are cast to.
    """
    found = {trace.values[value].storage for value in head.inputs}
    found |= {storage for op in trace.ops if op.forward == head.id for storage in made_by(trace, op)}
    parameters = of_parameters(trace)
    for op in trace.ops:
        if op.kind == "copy" and not touched_by(trace, op).isdisjoint(found):
            found |= made_by(trace, op) - parameters if op.is_backward else touched_by(trace, op) if op.id < head.id else set()
    return found


def shrunk(trace: Trace, ops: Collection[int], parts: int, whole: Collection[int] = ()) -> Trace:
    """The same step, in which what some operators allocate is cut to one of ``parts``; ``whole``: storages that are not.

    Nor is the scratch of an operator that touches one of these, or what was there before the step: it may be as large as a parameter.
    """
    made = {storage for op in ops for storage in made_by(trace, trace.ops[op])}
    cut = {storage for storage in made.difference(whole) if trace.storages[storage].bytes > GRAIN}  # a scalar is no smaller in parts
    sizes = [-(-storage.bytes // parts) if storage.id in cut else storage.bytes for storage in trace.storages]

    def allocates(op: Op) -> int:
        own = made_by(trace, op)
        scratch = max(0, op.peak_bytes - size_of(trace, own))
        is_whole = any(storage in whole or trace.storages[storage].is_source for storage in touched_by(trace, op))
        return sum(sizes[storage] for storage in own) + (scratch if is_whole else -(-scratch // parts))

    return replace(
        trace,
        storages=tuple(replace(storage, bytes=size) for storage, size in zip(trace.storages, sizes, strict=True)),
        ops=tuple(replace(op, peak_bytes=allocates(op)) if op.id in ops else op for op in trace.ops),
    )


# -- gradients and the batch ---------------------------------------------------------------------------------------------


def _lowered(lower_bytes: int, peak: Peak) -> str:
    """What a peak would be; with the part that this is less, since both may read the same when they are rounded."""
    lower, higher = format_apart(lower_bytes, peak.bytes)
    return f"{lower} instead of {higher}, {1 - lower_bytes / peak.bytes:.0%} less"


def _optimizer_in_backward(trace: Trace, plan: Plan, peak: Peak) -> list[Advice]:
    gradients = gradients_of(trace)
    lower = _peak_of(freed_early(trace, gradients), plan)
    text = (
        f"Step the optimizer inside backward, on each gradient as soon as it is complete, and free it then: the gradients are "
        f"{format_bytes(size_of(trace, gradients))} when backward ends. The least peak would be {_lowered(lower, peak)}, and what the optimizer allocates itself."
    )
    return [Advice(kind="optimizer in backward", text=text, peak_bytes=lower)]


def freed_early(trace: Trace, storages: Collection[int]) -> Trace:
    """The same step, in which some storages are freed after the last operator that reads or writes them."""
    last = {}
    for place, (kind, id) in enumerate(trace.events):
        if kind == EventKind.RUN:
            last.update(dict.fromkeys(touched_by(trace, trace.ops[id]).intersection(storages), place))
    ends: dict[int, list[Event]] = {}
    for storage, place in last.items():
        ends.setdefault(place, []).append(Event(EventKind.FREE, storage))
    return replace(trace, events=tuple(event for place, found in enumerate(trace.events) for event in (found, *ends.get(place, ()))))


def _half_batch(trace: Trace, plan: Plan, peak: Peak) -> list[Advice]:
    halved = shrunk(trace, range(len(trace.ops)), 2, of_parameters(trace))
    # in the second half the gradients of the first are there from the start
    lower = _peak_of(halved, plan) + size_of(trace, gradients_of(trace))
    text = (
        f"Halve the batch and accumulate gradients over two: where all that is allocated but gradients is proportional to the batch, the least peak would be "
        f"at most {_lowered(lower, peak)}."
    )
    return [Advice(kind="half batch", text=text, peak_bytes=lower)]


# -- what is resident ----------------------------------------------------------------------------------------------------


def _resident_states(trace: Trace, peak: Peak) -> list[Advice]:
    found = []
    optimizer, gradients = int(trace.meta.get("optimizer_bytes", 0)), gradients_before(trace)
    if optimizer:
        most = ", not activations, are most of the resident bytes" if optimizer >= _MOSTLY * trace.resident_bytes else " are resident"
        saved = optimizer * 3 // 4
        text = (
            f"The optimizer's states{most}: {format_bytes(optimizer)}, {_share(optimizer, trace.resident_bytes)} of what is resident, and no plan changes that. "
            f"Where they are in 32 bits, an optimizer that holds them in 8 takes at most {format_bytes(saved)} less: "
            f"a least peak of {format_bytes(peak.bytes - saved)} at best."
        )
        found.append(Advice(kind="fewer bytes a state", text=text, peak_bytes=peak.bytes - saved, is_bound=True))
    if gradients:
        text = (
            f"Gradients from before the step are {format_bytes(gradients)} of what is resident. Unless they are accumulated, `optimizer.zero_grad()` before the "
            f"forward pass frees them until backward makes them anew: at most that much less than {format_bytes(peak.bytes)}."
        )
        found.append(Advice(kind="no gradients before", text=text, peak_bytes=peak.bytes - gradients, is_bound=True))
    return found


def _replayable(trace: Trace, peak: Peak) -> list[Advice]:
    """Operators that are not the framework's and whose results are held since nobody said that they are pure."""
    held: dict[str, int] = {}
    for holding in peak.holdings:
        op = trace.ops[holding.op]
        if not (op.is_backward or op.is_replayable or op.kind == "prelude" or op.name.startswith("aten.")):
            held[op.name] = held.get(op.name, 0) + holding.bytes
    if not held:
        return []
    text = (
        f"{', '.join(sorted(held))} {'is' if len(held) == 1 else 'are'} not known to be pure, so that what they made is held: {format_bytes(sum(held.values()))} "
        f"at the least peak. If they are, declare it with `punar.replayable`: at most that much less than {format_bytes(peak.bytes)}."
    )
    return [Advice(kind="replayable", text=text, peak_bytes=peak.bytes - sum(held.values()), is_bound=True)]
