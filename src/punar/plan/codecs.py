"""Ways to hold a value in fewer bytes until backward asks for it.

NOTE. What each of them does; ``docs/offload.md`` says it to users.

1. ``bits``: elements of two values, as a dropout mask has: a bit each. ``sign``: of what only ReLU's backward reads, a bit: whether it is above
   zero. ``int32``: whole numbers of 64 bits that fit in 32. These are exact: gradients stay the same bit for bit.
2. ``bf16``, ``int8``, ``int4`` round: each element goes up or down at random, so that it is right on average (stochastic rounding). The last two keep
   the least and greatest of each ``BLOCK`` elements, as in ActNN (Chen et al., 2021, https://arxiv.org/abs/2104.14129).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BLOCK = 128
"""Elements that share a scale in ``int8`` and ``int4``."""

ITEM_BYTES = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int64": 8}
"""Of the dtypes that have a codec."""

_FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """``option``: which part of ``compress`` asks for it. Of each ``elements`` elements it keeps ``kept`` bytes.

    ``is_exact``: what comes back is what was there. ``is_replayable``: replays may start from what comes back. ``is_checked``: it looks
    at the elements first, and refuses what it cannot hold: on an accelerator that would wait for it. ``error``: the most by which an element differs.
    """

    name: str
    option: str
    dtypes: tuple[str, ...]
    elements: int
    kept: int
    is_exact: bool = True
    is_replayable: bool = True
    is_checked: bool = False
    error: str = "none"


CODECS = {
    codec.name: codec
    for codec in (
        Codec(name="bits", option="mask", dtypes=("bool", *_FLOATS, "float64"), elements=8, kept=1, is_checked=True),
        Codec(name="sign", option="mask", dtypes=(*_FLOATS, "float64"), elements=8, kept=1, is_replayable=False),
        Codec(name="int32", option="mask", dtypes=("int64",), elements=1, kept=4, is_checked=True),
        Codec(
            name="bf16",
            option="bf16",
            dtypes=("float32",),
            elements=1,
            kept=2,
            is_exact=False,
            is_replayable=False,
            error="2^-7 of the element, or 2^-133 where that is more",
        ),
        Codec(
            name="int8",
            option="int8",
            dtypes=_FLOATS,
            elements=BLOCK,
            kept=BLOCK + 8,
            is_exact=False,
            is_replayable=False,
            error=f"1/250 of the difference between the greatest and the least of its {BLOCK} elements",
        ),
        Codec(
            name="int4",
            option="int4",
            dtypes=_FLOATS,
            elements=BLOCK,
            kept=BLOCK // 2 + 8,
            is_exact=False,
            is_replayable=False,
            error=f"1/14 of the difference between the greatest and the least of its {BLOCK} elements",
        ),
    )
}

OPTIONS = tuple(dict.fromkeys(codec.option for codec in CODECS.values()))
"""What ``compress`` may be."""

LOSSY = tuple(option for option in OPTIONS if option != "mask")


def codecs_of(options: Iterable[str]) -> tuple[Codec, ...]:
    """The codecs that some options ask for."""
    wanted = set(options)
    return tuple(codec for codec in CODECS.values() if codec.option in wanted)


def channel_name(codec: Codec, dtype: str) -> str:
    """The name of the channel of values of one dtype that go through a codec."""
    return f"{codec.name}/{dtype}"


def codec_of(name: str) -> tuple[Codec, str] | None:
    """The codec and dtype that a channel's name names; None where it is a place off the device."""
    codec, _, dtype = name.partition("/")
    found = CODECS.get(codec)
    return None if found is None or dtype not in found.dtypes else (found, dtype)
