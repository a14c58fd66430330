"""The traces that solvers are asked about."""

from __future__ import annotations

import random
from functools import cache

from hypothesis import strategies as st

from punar.ir import Trace
from tests.synthetic import Step, block, chain, trace_of, transformer

RANDOM = random.Random


@cache
def named(name: str) -> Trace:
    return BUILDERS[name]()


def ladder_net(depth: int = 4, width: int = 1 << 18) -> Trace:
    """An encoder and a decoder with skip connections across: halves the width at each level, and reads it again on the way up."""
    program: list[Step] = []

    def conv(reads: tuple[int, ...], bytes: int) -> int:
        program.append(Step(name="conv", reads=reads, bytes=bytes, time_ns=bytes // 20, kind="convolution", saves_inputs=True))
        program.append(Step(name="act", reads=(len(program) - 1,), bytes=bytes, time_ns=bytes // 400, saves_inputs=True))
        return len(program) - 1

    at, skips = -1, []
    for level in range(depth):
        at = conv((at,), width >> level)
        skips.append(at)
    for level in reversed(range(depth)):
        at = conv((at, skips[level]), width >> level)
    program.append(Step(name="loss", reads=(at,), bytes=4, time_ns=1000, saves_inputs=True))
    return trace_of(program)


def unrolled(steps: int = 24, width: int = 1 << 12) -> Trace:
    """A recurrent cell over time: a cheap chain of states, and dear gates read from them."""
    program: list[Step] = []
    state = -1
    for _ in range(steps):
        at = len(program)
        program += [
            Step(name="gates", reads=(state,), bytes=4 * width, time_ns=400_000, kind="matmul", saves_inputs=True),
            Step(name="tanh", reads=(at,), bytes=width, time_ns=20_000, saves_output=True),
            Step(name="mix", reads=(state, at + 1), bytes=width, time_ns=20_000, saves_inputs=True),
        ]
        state = at + 2
    return trace_of(program)


def alternating(pairs: int = 4, width: int = 1 << 18) -> Trace:
    """Two kinds of blocks in turn."""
    program = [Step(name="embed", reads=(-1,), bytes=width)]
    for index in range(2 * pairs):
        program += block(len(program), len(program) - 1, width, f"layers.{index}", attention=1 + 7 * (index % 2))
    return trace_of(program)


def irregular(seed: int = 3, steps: int = 60) -> Trace:
    """No two operators alike."""
    draw = RANDOM(seed)
    sizes = [draw.randrange(1 << 10, 1 << 16) for _ in range(steps)]
    return chain(sizes, [draw.randrange(1_000, 100_000) for _ in sizes], overhead_ns=500)


BUILDERS = {
    "transformer": lambda: transformer(8),
    "large head": lambda: transformer(4, vocabulary=64),
    "chain": lambda: chain([1000] * 36, overhead_ns=100),
    "skips": ladder_net,
    "recurrent": unrolled,
    "alternating": alternating,
    "irregular": irregular,
}


@st.composite
def small_traces(draw: st.DrawFn, most: int = 9, *, has_writes: bool = False) -> Trace:
    """Random graphs of a few operators, with unequal sizes and times, skips, scratch, and what cannot be replayed.

    With ``has_writes`` half of the operators write into what an earlier one made, of which several versions may be saved, and for some
    autograd saves what it never asks for.
    """
    program: list[Step] = []
    for index in range(draw(st.integers(2, most))):
        extra = draw(st.lists(st.integers(-1, index - 1), max_size=2))
        writes = draw(st.integers(0, index - 1)) if has_writes and index and draw(st.booleans()) else -1
        program.append(
            Step(
                name=f"op{draw(st.integers(0, 2))}",
                reads=tuple(sorted({index - 1, *extra, *([writes] if writes >= 0 else [])})),
                writes=writes,
                bytes=program[writes].bytes if writes >= 0 else draw(st.sampled_from([64, 128, 256, 1024])),
                time_ns=draw(st.sampled_from([1_000, 5_000, 20_000])),
                saves_inputs=draw(st.booleans()),
                saves_output=draw(st.booleans()),
                scratch=draw(st.sampled_from([0, 0, 128])),
                is_replayable=draw(st.integers(0, 9)) > 0,
                is_asked=not has_writes or draw(st.integers(0, 5)) > 0,
            )
        )
    return trace_of(program, overhead_ns=draw(st.sampled_from([0, 100])))
