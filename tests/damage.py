"""Damages one of our files at one place, as a disk, an editor or another program might."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.integers(-2, 3),
    st.floats(),
    st.sampled_from(["", "0", "1.5", "false", "aten.add.Tensor", "aten", "__class__", "a b", "\ud800", "\0", "cuda:0", "meta"]),
    st.text(max_size=5),
    st.sampled_from([[], {}, [[]], [0], [0, 0], [0, 0, 0], {"a": 1}]),
)


@st.composite
def damaged(draw: st.DrawFn, body: Any) -> Any:
    """A copy of ``body``, JSON-able data, in which one thing at any depth is replaced, lost, doubled or moved."""
    body = copy.deepcopy(body)
    inside = body
    while True:
        keys = list(inside) if isinstance(inside, dict) else range(len(inside))
        key = draw(st.sampled_from(keys))
        if not (isinstance(inside[key], (dict, list)) and inside[key] and draw(st.integers(0, 3))):
            break
        inside = inside[key]
    _damage(draw, inside, key)
    return body


def _damage(draw: st.DrawFn, inside: Any, key: Any) -> None:
    match draw(st.sampled_from(["replace", "replace", "nudge", "lose", "double", "swap", "flip"])):
        case "nudge" if type(inside[key]) is int:
            inside[key] += draw(st.sampled_from([-1, 1, 5, -5]))
        case "flip" if type(inside[key]) is bool:
            inside[key] = not inside[key]
        case "lose":
            del inside[key]
        case "double" if isinstance(inside, list):
            inside.insert(key, inside[key])
        case "swap" if isinstance(inside, list) and len(inside) > 1:
            other = draw(st.integers(0, len(inside) - 1))
            inside[key], inside[other] = inside[other], inside[key]
        case _:
            inside[key] = draw(JUNK)
