"""Holds values in fewer bytes: the codecs of ``punar.plan.codecs`` on tensors.

The order of a value's life is that of the NOTE in ``punar.plan.moves``. Everything is done in chunks, so that what is needed for a moment stays small.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import lru_cache
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from punar.plan.codecs import BLOCK, CODECS, ITEM_BYTES, Codec, channel_name
from punar.plan.moves import Channel
from punar.torch.meter import Meter
from punar.torch.offload import MoveCount
from punar.torch.operators import name_of
from punar.torch.streams import bytes_of, unseen

CHUNK, ACCELERATOR_CHUNK = 1 << 15, 1 << 21
"""Elements that are encoded at a time, on a CPU and elsewhere."""

SCRATCH_PER_ELEMENT = 20
"""Bytes that coding an element needs for a moment, at most."""

_MEASURED_BYTES, _REPEATS = 4 << 20, 3
_SEED = 0x70756E6172

_UNLIMITED = 1 << 50

_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""For elements of so many bytes, whole numbers to compare them by: zeros of both signs differ, and equal NaNs do not."""


class Coder(Protocol):
    """One codec on flat tensors. ``note``: what else decoding needs to know."""

    def encode(self, flat: Tensor, out: Tensor) -> Any:
        """Fills ``out``; returns the note, or None where the elements are none that it can hold."""

    def decode(self, data: Tensor, out: Tensor, note: Any) -> None:
        """Fills ``out`` with what was encoded."""


class CodecTier:
    """One codec for values of one dtype, as somewhere for them to go."""

    def __init__(self, channel: Channel, codec: Codec, dtype: str, meter: Meter) -> None:
        self.channel, self.dtype, self.meter = channel, dtype, meter
        self.takes_one_save = codec.name == "sign"
        self.coder = coder_of(codec)

    def send(self, base: Tensor, count: MoveCount) -> CodedCopy | None:
        """Will encode a tensor's whole storage; None where it is empty, or of another dtype than was traced."""
        nbytes = base.untyped_storage().nbytes()
        if name_of(base.dtype) != self.dtype or not nbytes or nbytes % base.element_size():
            return None
        return CodedCopy(self, base, count)


class CodedCopy:
    """One storage's bytes, before they are encoded, encoded, and back. ``tensor``: on the storage itself, while there is one."""

    def __init__(self, tier: CodecTier, base: Tensor, count: MoveCount) -> None:
        self.tier, self.count = tier, count
        self.takes_one_save = tier.takes_one_save
        self.is_saved = False
        self.tensor: Tensor | None = base
        self.dtype, self.device, self.nbytes = base.dtype, base.device, base.untyped_storage().nbytes()
        self.data: Tensor | None = None
        self.note: Any = None

    def land(self) -> bool:
        """Encodes them; False where the codec cannot hold them, so that the storage must be kept."""
        assert self.tensor is not None
        with _uncounted(self.count), unseen():
            data = torch.empty(self.tier.channel.kept(self.nbytes), dtype=torch.uint8, device=self.device)
            self.charge(data)
            self.note = self.tier.coder.encode(bytes_of(self.tensor).view(self.dtype), data)
        self.tensor = None
        if self.note is None:
            self.count.kept += 1
            return False
        self.data = data
        self.count.coded_bytes += self.nbytes
        return True

    def fetch(self) -> Tensor:
        """Decodes them, if that is not done: returns a flat tensor of them."""
        if self.tensor is None:
            assert self.data is not None
            with _uncounted(self.count), unseen():
                self.tensor = torch.empty(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)
                self.charge(self.tensor)
                self.tier.coder.decode(self.data, self.tensor, self.note)
            self.data = None
        return self.tensor

    def arrive(self) -> None:
        """They are back as soon as they are fetched."""

    def charge(self, made: Tensor) -> None:
        """Counts what is made here, and the scratch beside it."""
        self.tier.meter.record_created(made)
        self.tier.meter.charge(self.tier.channel.scratch(self.nbytes))


class _uncounted:
    """Adds to a count how long the computation was kept by coding."""

    def __init__(self, count: MoveCount) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.start = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self.count.coding_ns += time.perf_counter_ns() - self.start


# -- the codecs ----------------------------------------------------------------------------------------------------------


class Bits:
    """Elements of two values: a bit each. The note: both, as whole numbers of the elements' bits."""

    def encode(self, flat: Tensor, out: Tensor) -> tuple[int, int] | None:
        if flat.dtype == torch.bool:
            for start, part in _chunks(flat):
                _pack(part, out[start // 8 :])
            return 0, 1
        numbers = flat.view(_NUMBERS[flat.element_size()])
        low, high = (int(end) for end in torch.aminmax(numbers))
        for start, part in _chunks(numbers):
            elements = part.numpy()
            is_high = elements == high
            _pack(torch.from_numpy(is_high), out[start // 8 :])
            if not np.logical_or(is_high, elements == low, out=is_high).all():
                return None
        return low, high

    def decode(self, data: Tensor, out: Tensor, note: tuple[int, int]) -> None:
        _unpack(data, out, *note)


class Sign:
    """What ReLU's backward asks of ReLU's result: whether it lets a gradient through, as it does where the result is not at most zero."""

    def encode(self, flat: Tensor, out: Tensor) -> bool:
        for start, part in _chunks(flat):
            _pack((part <= 0).logical_not_(), out[start // 8 :])
        return True

    def decode(self, data: Tensor, out: Tensor, note: bool) -> None:
        one = torch.ones(1, dtype=out.dtype).view(_NUMBERS[out.element_size()])
        _unpack(data, out, 0, int(one))


class Int32:
    """Whole numbers that fit in 32 bits."""

    def encode(self, flat: Tensor, out: Tensor) -> bool | None:
        low, high = (int(end) for end in torch.aminmax(flat))
        if low < -(1 << 31) or high >= 1 << 31:
            return None
        out[: 4 * flat.numel()].view(torch.int32).copy_(flat)
        return True

    def decode(self, data: Tensor, out: Tensor, note: bool) -> None:
        out.copy_(data[: 4 * out.numel()].view(torch.int32))


class Noise:
    """Random numbers in [0, 1) of which each chunk takes other ones. The default generator is left alone: the model draws from it."""

    def __init__(self) -> None:
        self.tables: dict[torch.device, Tensor] = {}
        self.starts = random.Random(_SEED)

    def draw(self, part: Tensor) -> Tensor:
        table = self.tables.get(part.device)
        if table is None:
            generator = torch.Generator(part.device)
            generator.manual_seed(_SEED)
            table = self.tables[part.device] = torch.rand(
                2 * _chunk(part) + BLOCK, generator=generator, device=part.device, dtype=torch.float32
            )
        start = self.starts.randrange(table.numel() - part.numel() + 1)
        return table[start : start + part.numel()]


class BFloat16:
    """Floats of 32 bits in 16, each rounded up or down at random; what is not finite stays so, and what is finite too."""

    def __init__(self) -> None:
        self.noise = Noise()

    def encode(self, flat: Tensor, out: Tensor) -> bool:
        halves = out[: 2 * flat.numel()].view(torch.int16)
        for start, part in _chunks(flat):
            bits = part.view(torch.int32)
            rounded = self.noise.draw(part).mul(1 << 16).to(torch.int32).add_(bits).bitwise_right_shift_(16)
            cut = bits >> 16
            is_special = _is_special(cut).logical_or_(_is_special(rounded))
            torch.where(is_special, cut, rounded, out=rounded)
            halves[start : start + part.numel()].copy_(rounded.masked_fill_(part.isnan(), 0x7FC0))
        return True

    def decode(self, data: Tensor, out: Tensor, note: bool) -> None:
        out.copy_(data[: 2 * out.numel()].view(torch.bfloat16))


def _is_special(halves: Tensor) -> Tensor:
    """Whether the upper halves of floats are of an infinity or none at all."""
    return (halves & 0x7F80) == 0x7F80


class Levels:
    """Each ``BLOCK`` elements on so many even steps from their least to their greatest, each rounded up or down at random.

    What is encoded begins with (least, step) of each block. Two codes of four bits share a byte: those of a block's halves.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.noise = Noise()

    def encode(self, flat: Tensor, out: Tensor) -> bool | None:
        scales, codes = self.parts(flat, out)
        for start, part in _chunks(flat):
            x = part.float() if part.dtype != torch.float32 else part
            if x.numel() % BLOCK:
                x = torch.cat((x, x[-1:].expand(-x.numel() % BLOCK)))
            noise = self.noise.draw(x).view(-1, BLOCK)
            x = x.view(-1, BLOCK)
            low, high = torch.aminmax(x, dim=1)
            step = (high - low).div_(self.steps)
            if step.device.type == "cpu" and not bool(step.isfinite().all()):
                return None
            at = slice(start // BLOCK, start // BLOCK + len(x))
            scales[at, 0], scales[at, 1] = low, step
            inverse = torch.where(step > 0, 1 / step, step)
            code = (x - low[:, None]).mul_(inverse[:, None]).add_(noise).clamp_(0, self.steps).to(torch.uint8)
            codes[at] = code if self.steps > 15 else code[:, : BLOCK // 2] | code[:, BLOCK // 2 :] << 4
        return True

    def decode(self, data: Tensor, out: Tensor, note: bool) -> None:
        scales, codes = self.parts(out, data)
        for start, part in _chunks(out):
            at = slice(start // BLOCK, start // BLOCK - (-part.numel() // BLOCK))
            code = codes[at] if self.steps > 15 else torch.cat((codes[at] & 15, codes[at] >> 4), 1)
            x = code.float().mul_(scales[at, 1:]).add_(scales[at, :1])
            part.copy_(x.view(-1)[: part.numel()])

    def parts(self, flat: Tensor, data: Tensor) -> tuple[Tensor, Tensor]:
        blocks = -(-flat.numel() // BLOCK)
        width = BLOCK if self.steps > 15 else BLOCK // 2
        return data[: 8 * blocks].view(torch.float32).view(-1, 2), data[8 * blocks : (8 + width) * blocks].view(-1, width)


def coder_of(codec: Codec) -> Coder:
    """What a codec of the table does to tensors."""
    match codec.name:
        case "bits":
            return Bits()
        case "sign":
            return Sign()
        case "int32":
            return Int32()
        case "bf16":
            return BFloat16()
        case "int8":
            return Levels(255)
        case "int4":
            return Levels(15)
        case _:
            raise AssertionError(codec.name)


# -- bits ----------------------------------------------------------------------------------------------------------------

_GATHER, _SPREAD, _PLACES = 0x8040201008040201 - (1 << 64), 0x0101010101010101, 0x0102040810204080
"""Eight truth values as the bytes of a whole number, times ``_GATHER``, have theirs as its highest byte; a byte times ``_SPREAD``, masked by
``_PLACES``, has its bits as bytes that are zero or not."""

_BITS_OF_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
"""``[byte, place]``."""


def _pack(truth: Tensor, out: Tensor) -> None:
    """Writes truth values as bits to the beginning of ``out``, the first one highest."""
    (pack_by_octets if truth.device.type == "cpu" else pack_by_words)(truth, out)


def _unpack(data: Tensor, out: Tensor, low: int, high: int) -> None:
    """Fills ``out`` with elements of whose bits, as whole numbers, there are two."""
    numbers = out.view(_NUMBERS[out.element_size()])
    for start, part in _chunks(numbers):
        (unpack_by_octets if out.device.type == "cpu" else unpack_by_words)(data[start // 8 :], part, low, high)


def pack_by_octets(truth: Tensor, out: Tensor) -> None:
    """On a CPU, where numpy has a routine for it."""
    packed = np.packbits(truth.numpy().view(np.uint8))
    out.numpy()[: len(packed)] = packed


def unpack_by_octets(data: Tensor, out: Tensor, low: int, high: int) -> None:
    """On a CPU: by a table of what each byte stands for."""
    numbers, codes, whole = out.numpy(), data.numpy(), out.numel() // 8
    octets = np.where(_BITS_OF_BYTES, high, low).astype(numbers.dtype)
    np.take(octets, codes[:whole], axis=0, out=numbers[: 8 * whole].reshape(-1, 8), mode="clip")
    if out.numel() % 8:
        numbers[8 * whole :] = octets[codes[whole], : out.numel() % 8]


def pack_by_words(truth: Tensor, out: Tensor) -> None:
    """On an accelerator, by operators that all of them have."""
    whole = truth.view(torch.uint8)
    if whole.numel() % 8:
        whole = torch.cat((whole, whole.new_zeros(-whole.numel() % 8)))
    words = whole.view(torch.int64)
    out[: words.numel()] = (words * _GATHER).bitwise_right_shift_(56)


def unpack_by_words(data: Tensor, out: Tensor, low: int, high: int) -> None:
    """On an accelerator."""
    words = data[: -(-out.numel() // 8)].to(torch.int64).mul_(_SPREAD).bitwise_and_(_PLACES)
    truth = words.view(torch.uint8)[: out.numel()] != 0
    torch.where(truth, out.new_tensor(high), out.new_tensor(low), out=out)


def _chunk(tensor: Tensor) -> int:
    return CHUNK if tensor.device.type == "cpu" else ACCELERATOR_CHUNK


def _chunks(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    step = _chunk(flat)
    for start in range(0, flat.numel(), step):
        yield start, flat[start : start + step]


# -- how fast they are ---------------------------------------------------------------------------------------------------


def measured(codec: Codec, dtype: str, device: torch.device) -> Channel:
    """A codec's channel, with its speed on a device as it computes now; measured once a process."""
    return _measured(codec.name, dtype, device, torch.get_num_threads())


@lru_cache(maxsize=128)
def _measured(name: str, dtype: str, device: torch.device, threads: int) -> Channel:
    codec, item = CODECS[name], ITEM_BYTES[dtype]
    chunk = CHUNK if device.type == "cpu" else ACCELERATOR_CHUNK
    with unseen():
        numbers = torch.arange(_MEASURED_BYTES // item, device=device) % 2
        flat = numbers.to(getattr(torch, dtype))
        large = _times(coder_of(codec), flat)
        small = _times(coder_of(codec), flat[:BLOCK].clone())
    return Channel(
        name=channel_name(codec, dtype),
        capacity_bytes=_UNLIMITED,
        write_bytes_per_s=max(1, int(_MEASURED_BYTES / large[0])),
        read_bytes_per_s=max(1, int(_MEASURED_BYTES / large[1])),
        latency_ns=int(max(small) * 1e9),
        block_bytes=codec.elements * item,
        block_kept=codec.kept,
        scratch_bytes=SCRATCH_PER_ELEMENT * chunk,
    )


def _times(coder: Coder, flat: Tensor) -> tuple[float, float]:
    """Seconds of encoding and of decoding, medians."""
    data = torch.empty(2 * flat.numel() * flat.element_size(), dtype=torch.uint8, device=flat.device)
    back = torch.empty_like(flat)
    encodes, decodes = [], []
    for _ in range(_REPEATS + 1):
        start = _now(flat)
        note = coder.encode(flat, data)
        between = _now(flat)
        coder.decode(data, back, note)
        encodes.append(between - start)
        decodes.append(_now(flat) - between)
    return median(encodes[1:]), median(decodes[1:])


def _now(tensor: Tensor) -> float:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
