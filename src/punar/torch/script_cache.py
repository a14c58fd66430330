"""The plans of the steps seen so far, by how a step begins.

Steps that begin alike may go on differently: a model trains and is evaluated, a penalty is added now and then, a generator and a discriminator take turns. Each
*way* to go on that was recorded has a script. Which one a step will take is not known when it begins; expected is the last one again, or what most often followed
where steps went before as the last ones did since another way was taken: prediction by partial matching (Cleary and Witten, 1984) from its longest context.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from torch import Tensor

from punar.torch.script import Script


class Key(NamedTuple):
    """How a step begins.

    ``signature``: of its first operator; ``shapes``: of the tensors that that one reads, and of those that the outermost module was called with;
    ``gradient_bytes``: of earlier gradients beside it.
    """

    signature: str
    shapes: tuple[tuple[int, ...], ...]
    gradient_bytes: int

    @property
    def size(self) -> int:
        """Numbers in the tensors."""
        return sum(map(prod, self.shapes))

    def covers(self, other: Key) -> bool:
        """Whether a step that begins so is the other one with tensors that are at least as large in each dimension."""
        return (
            len(self.shapes) == len(other.shapes)
            and _form(self.signature) == _form(other.signature)
            and all(
                len(mine) == len(theirs) and all(m >= t for m, t in zip(mine, theirs, strict=True))
                for mine, theirs in zip(self.shapes, other.shapes, strict=True)
            )
        )


def sizes_of(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's shape; -1 stands for a ragged dimension."""
    return tuple(size if isinstance(size, int) else -1 for size in tensor.shape)


@lru_cache(maxsize=1024)
def _form(signature: str) -> str:
    """An operator's signature without sizes."""
    return re.sub(r"\[[\d, ]*\]", "[]", signature)


_MOST_KEYS = 64
"""Beginnings remembered at once; beyond, the one recorded longest ago is forgotten."""

_MOST_ALONE = 32
"""Beginnings that are recorded whatever is known; beyond, a step is recorded only where none of those known covers it."""

_MOST_SHAPES = 16
"""First operators' signatures are alike, and what the module is called with is not: beginnings that are recorded then; beyond, the nearest stands for all."""

_MOST_WAYS = 4
"""Ways to go on from one beginning that are recorded; a step that takes yet another keeps what is not in any of them."""

_MOST_FRUITLESS = 4
"""How often a step that was expected to take an unknown way, and was recorded therefore, may turn out to take a known one."""

_MOST_MISSED = 3
"""After so many steps of unknown ways, none of which was expected, it is not counted on that one is."""

_REMEMBERED = 128
"""Steps of one beginning whose ways are remembered: a part that comes every so many is expected if these are at most half of it."""

_MOST_RECORDED = 4
"""How often steps that begin alike are recorded beside different numbers of bytes of earlier gradients."""


class Ways:
    """Ways to go on from one beginning. A way is its script's place; None is one that was not recorded."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.taken: list[int | None] = []
        self._matches: list[int] = []
        self._fruitless = 0
        self.is_resized = False

    @property
    def may_record(self) -> bool:
        return len(self.scripts) < _MOST_WAYS and self._fruitless < _MOST_FRUITLESS

    def take(self, way: int | None) -> None:
        """A step took this way. Notes of each earlier step how many ways up to it are the same as the last ones now."""
        self._matches = [matched + 1 if past == way else 0 for past, matched in zip(self.taken, [0, *self._matches], strict=False)]
        self.taken.append(way)
        if len(self.taken) > _REMEMBERED:
            del self.taken[0], self._matches[0]

    def expected(self) -> Script | None:
        """The script of the way that the next step should take, None where that is to be recorded."""
        if not self.scripts or self.is_resized:
            return None
        way, longest = self.taken[-1], max(self._matches, default=0)
        context = self.taken[len(self.taken) - longest :]
        if any(past != way for past in context):  # else it tells no more than that the last steps were alike
            places = [place for place, matched in enumerate(self._matches) if matched == longest]
            followed = [self.taken[place + 1] for place in reversed(places)]
            way = max(followed, key=lambda way: (followed.count(way), way is not None))
        if way is None and not self.may_record:
            way = next((past for past in reversed(self.taken) if past is not None), 0)
        return None if way is None else self.scripts[way]

    def add(self, script: Script) -> None:
        """A step was recorded. The same operators as those of a known way replace that one's script where sizes have grown, else teach nothing."""
        way = next((place for place, known in enumerate(self.scripts) if known.names == script.names), None)
        if way is None:
            way = len(self.scripts)
            self.scripts.append(script)
            self.taken = [way if past is None else past for past in self.taken]  # it was this one, most likely
        elif self.is_resized:
            known = self.scripts[way]
            known.is_retraced = script.is_retraced = True
            if script.plan.plain_peak_bytes > known.plan.plain_peak_bytes:
                self.scripts[way] = script  # else smaller steps are within the plan of the larger one
        else:
            self._fruitless += 1
        self.is_resized = False
        self.take(way)


class ScriptCache:
    """Of each key, the ways to go on."""

    def __init__(self) -> None:
        self._ways: dict[Key, Ways] = {}
        self._uncovered: set[str] = set()

    def __iter__(self) -> Iterator[Script]:
        return (script for ways in self._ways.values() for script in ways.scripts)

    def stand_in(self, key: Key) -> Key:
        """The key of the steps that one which begins so is taken for: its own, as long as there are few.

        Where bytes of earlier gradients, or shapes beside those of the first operator, are others each time, because gradients of inputs are collected or
        batches list what is in each image, steps are not recorded for ever: the nearest of those recorded stands for all. Where lengths are, a larger one does.
        """
        if key in self._ways:
            return key
        alike = [other for other in self._ways if other.signature == key.signature]
        same = [other for other in alike if other.shapes == key.shapes]
        if same:
            nearest = min(same, key=lambda other: (abs(other.gradient_bytes - key.gradient_bytes), other))
            return nearest if len(same) >= _MOST_RECORDED else key
        covering = [other for other in self._ways if other.gradient_bytes == key.gradient_bytes and other.covers(key)]
        if covering and len(self._ways) >= _MOST_ALONE and _form(key.signature) not in self._uncovered:
            return min(covering, key=lambda other: (other.size, other))
        if len(alike) >= _MOST_SHAPES:
            return min(alike, key=lambda other: (abs(other.gradient_bytes - key.gradient_bytes), abs(other.size - key.size), other))
        return key

    def uncover(self, key: Key) -> None:
        """A step that another one stood in for did other things: none that begins with this operator is taken for a larger one from now on."""
        self._uncovered.add(_form(key.signature))

    def find(self, key: Key) -> Script | None:
        """The script to follow, None where the step is to be recorded."""
        ways = self._ways.get(key)
        return None if ways is None else ways.expected()

    def others(self, script: Script) -> list[Script]:
        """The scripts of the other ways to go on from where this one begins."""
        ways, _ = self._place_of(script)
        return [other for other in ways.scripts if other is not script]

    def add(self, key: Key, script: Script) -> None:
        """Adds what was recorded, and remembers its key longest."""
        ways = self._ways[key] = self._ways.pop(key) if key in self._ways else Ways()
        ways.add(script)
        while len(self._ways) > _MOST_KEYS:
            del self._ways[next(iter(self._ways))]

    def replace(self, old: Script, new: Script) -> None:
        """Puts another plan for the same trace in the place of an old one."""
        ways, way = self._place_of(old)
        if way is not None:
            ways.scripts[way] = new

    def take(self, script: Script) -> None:
        """A step went along a script."""
        ways, way = self._place_of(script)
        ways.take(way)

    def stray(self, script: Script) -> bool:
        """A step left a script for no way that is known. Says whether one like it should be recorded soon."""
        ways, _ = self._place_of(script)
        ways.take(None)
        return ways.may_record and ways.taken.count(None) <= _MOST_MISSED

    def resize(self, script: Script) -> bool:
        """A step went along a script with other sizes. Says whether the next is recorded; only once, since sizes may be others each time."""
        ways, way = self._place_of(script)
        ways.take(way)
        ways.is_resized = ways.is_resized or not script.is_retraced
        return ways.is_resized

    def _place_of(self, script: Script) -> tuple[Ways, int | None]:
        """Where a script stands; nowhere, where it was forgotten."""
        for ways in self._ways.values():
            for way, known in enumerate(ways.scripts):
                if known is script:
                    return ways, way
        return Ways(), None
