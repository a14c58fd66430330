"""Reads the fields of our files; what is wrong is said with the field's place in the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST = 1 << 50
"""The largest number that a file may hold: a pebibyte, thirteen days in nanoseconds. Sums of many stay within 64 bits."""

_SHOWN = 60


class FieldError(ValueError):
    """A field of a file is missing, or is not what it must be."""


@dataclass(frozen=True, slots=True)
class Field:
    """One place in a file, such as ``skeleton.names[3]``, and what stands there."""

    place: str
    content: Any

    def is_wrong(self, must: str) -> FieldError:
        """The error that says what stands here and what must."""
        found = repr(self.content)
        if len(found) > _SHOWN:
            found = f"{found[:_SHOWN]}... ({type(self.content).__name__})"
        return FieldError(f"{self.place} is {found}, it must be {must}")

    def number(self, least: int = 0, most: int = MOST) -> int:
        """A whole number; JSON's 1.0, true and "1" are none."""
        if type(self.content) is not int or not least <= self.content <= most:
            raise self.is_wrong(f"a whole number from {least} to {most}")
        return self.content

    def flag(self) -> bool:
        if type(self.content) is not bool:
            raise self.is_wrong("true or false")
        return self.content

    def text(self) -> str:
        if type(self.content) is not str:
            raise self.is_wrong("a text")
        try:
            self.content.encode()
        except UnicodeEncodeError as error:
            raise self.is_wrong("a text of whole characters") from error
        return self.content

    def items(self) -> list[Field]:
        """The entries of a list."""
        if type(self.content) is not list:
            raise self.is_wrong("a list")
        return [Field(f"{self.place}[{index}]", item) for index, item in enumerate(self.content)]

    def columns(self, *names: str) -> list[Field]:
        """The entries of a list that has one for each of these names."""
        if type(self.content) is not list or len(self.content) != len(names):
            raise self.is_wrong(f"a list of {len(names)}: {', '.join(names)}")
        return [Field(f"{self.place}.{name}", item) for name, item in zip(names, self.content, strict=True)]

    def numbers(self, least: int = 0, most: int = MOST) -> tuple[int, ...]:
        """A list of whole numbers."""
        return tuple(item.number(least, most) for item in self.items())

    def texts(self) -> tuple[str, ...]:
        return tuple(item.text() for item in self.items())

    def flags(self) -> tuple[bool, ...]:
        return tuple(item.flag() for item in self.items())

    def members(self, names: Sequence[str]) -> dict[str, Field]:
        """The fields of an object, which must be exactly these."""
        if type(self.content) is not dict:
            raise self.is_wrong("an object")
        inside = f"{self.place}." if self.place else ""
        missing = [name for name in names if name not in self.content]
        if missing:
            raise FieldError(f"{inside}{missing[0]} is missing")
        unknown = [name for name in self.content if name not in names]
        if unknown:
            raise FieldError(f"{inside}{unknown[0]} is no field that this version knows")
        return {name: Field(f"{inside}{name}", self.content[name]) for name in names}
