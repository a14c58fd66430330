"""The plans of the steps seen so far, by how a step begins.

Steps that begin alike may go on differently: a model trains and is evaluated, a penalty is added now and then. Each way of going on that was recorded is a
*variant*. Which of them a step will take is not known when it begins: the one taken last is followed, until the step leaves it for another.
"""

from __future__ import annotations

from collections.abc import Iterator

from punar.torch.script import Script

Key = tuple[str, int]
"""How a step begins: the signature of its first operator, and the bytes of earlier gradients beside it."""

_MOST_KEYS = 64
"""Beginnings remembered at once; beyond, the least recently planned is forgotten."""

_MOST_VARIANTS = 4
"""Ways to go on from one beginning that are recorded; a step that takes yet another keeps what is not in any of them."""

_MOST_RECORDED = 4
"""How often steps that begin alike are recorded beside different numbers of bytes of earlier gradients."""


class ScriptCache:
    """Of each key, its variants; the one that was followed last comes first."""

    def __init__(self) -> None:
        self._variants: dict[Key, list[Script]] = {}
        self._awaited: set[Key] = set()

    def __iter__(self) -> Iterator[Script]:
        return (script for variants in self._variants.values() for script in variants)

    def nearest_key(self, signature: str, gradient_bytes: int) -> Key:
        """The key of a step that begins so, beside so many bytes of earlier gradients.

        Where their number is another one each time, because gradients of inputs are collected for example, steps are not recorded for ever: the
        nearest of those recorded stands for all.
        """
        key = (signature, gradient_bytes)
        known = [other for other in self._variants if other[0] == signature]
        if key in self._variants or len(known) < _MOST_RECORDED:
            return key
        return min(known, key=lambda other: (abs(other[1] - gradient_bytes), other))

    def key_of(self, script: Script) -> Key | None:
        """The key whose variant this is, None where it was forgotten."""
        return next((key for key, variants in self._variants.items() if script in variants), None)

    def find(self, key: Key) -> Script | None:
        """The variant to follow, None where the step is to be recorded."""
        return None if key in self._awaited or key not in self._variants else self._variants[key][0]

    def others(self, script: Script) -> list[Script]:
        """The other variants of this one's key."""
        key = self.key_of(script)
        return [] if key is None else [other for other in self._variants[key] if other is not script]

    def add(self, key: Key, script: Script) -> None:
        """Adds what was recorded. The same operators as those of a variant replace it, and are not recorded again, since their sizes vary."""
        self._awaited.discard(key)
        variants = self._variants.pop(key, [])
        is_followed = not variants or variants[0].passes > 0  # else each step takes a path of its own
        others = [variant for variant in variants if variant.names != script.names]
        script.is_retraced = len(others) < len(variants) or not is_followed
        self._variants[key] = [script, *others]
        while len(self._variants) > _MOST_KEYS:
            del self._variants[next(iter(self._variants))]

    def replace(self, old: Script, new: Script) -> None:
        """Puts another plan for the same trace in the place of an old one, and remembers it longest."""
        key = self.key_of(old)
        if key is not None:
            variants = self._variants.pop(key)
            self._variants[key] = [new if variant is old else variant for variant in variants]

    def prefer(self, script: Script) -> None:
        """A step has gone this way: the next that begins so is thought to do the same."""
        key = self.key_of(script)
        if key is not None:
            self._variants[key] = [script, *self.others(script)]

    def await_another(self, script: Script) -> bool:
        """A step has left this script for no variant that is known. Says whether the next that begins so is to be recorded."""
        key = self.key_of(script)
        if key is None or script.is_retraced or len(self._variants[key]) == _MOST_VARIANTS:
            return False
        self._awaited.add(key)
        return True
