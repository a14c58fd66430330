"""Which recorded step is one that begins in a new way taken for?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from punar.plan import plain_plan
from punar.torch import script_cache
from punar.torch.script import Script
from punar.torch.script_cache import Key, ScriptCache, Ways
from tests.synthetic import chain

Shapes = tuple[tuple[int, ...], ...]


def key(length: int, *others: int, gradients: int = 0, name: str = "aten.embedding.default", dtype: str = "int64") -> Key:
    """A step over a text of this length, whose model is called with others besides."""
    shapes: Shapes = ((50, 8), (4, length), (4, length), *((4, other) for other in others))
    return Key(f"{name}(float32[50, 8],{dtype}[4, {length}],-1)", shapes, gradients)


def cache_of(*known: Key) -> ScriptCache:
    cache = ScriptCache()
    cache._ways = {each: Ways() for each in known}
    return cache


lengths = st.integers(1, 100)


@given(lengths, lengths, lengths, lengths)
def test_one_covers_another_where_no_tensor_is_smaller(a: int, b: int, c: int, d: int) -> None:
    assert key(a, b).covers(key(c, d)) is (a >= c and b >= d)
    assert not key(a, b).covers(key(c))
    assert not key(a).covers(key(c, name="aten.mm.default"))
    assert not key(a).covers(key(c, dtype="int32"))


@given(st.lists(lengths, min_size=1, max_size=script_cache._MOST_ALONE - 1, unique=True), lengths)
def test_few_are_all_recorded(known: list[int], length: int) -> None:
    assert cache_of(*map(key, known)).stand_in(key(length)) == key(length)


@given(st.sets(st.integers(1, 90), min_size=script_cache._MOST_ALONE), st.integers(1, 100), st.sampled_from([0, 8]))
def test_of_many_the_smallest_that_is_no_shorter_stands_in(known: set[int], length: int, gradients: int) -> None:
    cache = cache_of(*map(key, known))
    longer = [each for each in known if each >= length] if gradients == 0 else []
    expected = key(min(longer)) if longer else key(length, gradients=gradients)
    assert cache.stand_in(key(length, gradients=gradients)) == expected


def test_none_stands_in_once_smaller_steps_did_other_things() -> None:
    cache = cache_of(*(key(length) for length in range(10, 60)))
    assert cache.stand_in(key(5)) == key(10)
    cache.uncover(key(7))
    assert cache.stand_in(key(5)) == key(5)
    assert cache.stand_in(key(10)) == key(10)


def test_shapes_that_are_others_each_time_beside_equal_first_operators_are_recorded_only_so_often() -> None:
    known = [key(20, 100 + place, 200 + place) for place in range(script_cache._MOST_SHAPES)]
    assert cache_of(*known[1:]).stand_in(key(20, 300, 150)) == key(20, 300, 150)
    assert cache_of(*known).stand_in(key(20, 300, 150)) == known[-1]
    assert cache_of(*known).stand_in(key(21, 110, 300)) == key(21, 110, 300)


def test_bytes_of_gradients_that_are_others_each_time_are_recorded_only_so_often() -> None:
    known = [key(20, gradients=8 * place) for place in range(script_cache._MOST_RECORDED)]
    assert cache_of(*known[1:]).stand_in(key(20, gradients=100)) == key(20, gradients=100)
    assert cache_of(*known).stand_in(key(20, gradients=100)) == known[-1]
    assert cache_of(*known).stand_in(key(20, gradients=9)) == known[1]


@pytest.mark.parametrize("text", ["float32[1024, 8]", "float32[8, 1024]"])
def test_dtypes_are_no_sizes(text: str) -> None:
    assert script_cache._form(f"aten.mm.default({text},bfloat16[2])") == "aten.mm.default(float32[],bfloat16[])"


@pytest.mark.parametrize(("first", "second", "kept"), [(4, 8, 8), (8, 4, 8)])
def test_the_larger_of_two_recordings_is_followed(first: int, second: int, kept: int) -> None:
    """What told them from one another was seen too late to plan for each."""
    plans = {factor: plain_plan(chain([factor * 1024, factor * 2048, factor * 512])) for factor in (first, second)}
    scripts = {factor: Script(plan) for factor, plan in plans.items()}
    cache, begun = ScriptCache(), key(20)
    cache.add(begun, scripts[first])
    assert cache.resize(scripts[first])
    assert cache.find(begun) is None  # the next one is recorded
    cache.add(begun, scripts[second])
    assert cache.find(begun) is scripts[kept]
    assert not cache.resize(scripts[kept])  # once is enough: sizes may be others each time
    assert cache.find(begun) is scripts[kept]
