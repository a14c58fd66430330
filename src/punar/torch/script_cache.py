"""The plans of the steps seen so far, by how a step begins.

Steps that begin alike may go on differently: a model trains and is evaluated, a penalty is added now and then, a generator and a discriminator take turns. Each
*way* to go on that was recorded has a script. Which one a step will take is not known when it begins; expected is the last one again, or what most often followed
where steps went before as the last ones did since another way was taken: prediction by partial matching (Cleary and Witten, 1984) from its longest context.
"""

from __future__ import annotations

from collections.abc import Iterator

from punar.torch.script import Script

Key = tuple[str, int]
"""How a step begins: the signature of its first operator, and the bytes of earlier gradients beside it."""

_MOST_KEYS = 64
"""Beginnings remembered at once; beyond, the one recorded longest ago is forgotten."""

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
        """A step was recorded. The same operators as those of a known way replace that one's script where sizes had changed, else teach nothing."""
        way = next((place for place, known in enumerate(self.scripts) if known.names == script.names), None)
        if way is None:
            way = len(self.scripts)
            self.scripts.append(script)
            self.taken = [way if past is None else past for past in self.taken]  # it was this one, most likely
        elif self.is_resized:
            script.is_retraced = True
            self.scripts[way] = script
        else:
            self._fruitless += 1
        self.is_resized = False
        self.take(way)


class ScriptCache:
    """Of each key, the ways to go on."""

    def __init__(self) -> None:
        self._ways: dict[Key, Ways] = {}

    def __iter__(self) -> Iterator[Script]:
        return (script for ways in self._ways.values() for script in ways.scripts)

    def nearest_key(self, signature: str, gradient_bytes: int) -> Key:
        """The key of a step that begins so, beside so many bytes of earlier gradients.

        Where their number is another one each time, because gradients of inputs are collected for example, steps are not recorded for ever: the
        nearest of those recorded stands for all.
        """
        key = (signature, gradient_bytes)
        known = [other for other in self._ways if other[0] == signature]
        if key in self._ways or len(known) < _MOST_RECORDED:
            return key
        return min(known, key=lambda other: (abs(other[1] - gradient_bytes), other))

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
