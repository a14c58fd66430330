"""English text that every Python has: the help topics of ``pydoc``, as sentences, pairs and bytes."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise
from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"])")
_MARKUP = re.compile(r"[*=~^\"`|]+")


@lru_cache(maxsize=1)
def documents() -> tuple[str, ...]:
    """The help topics in a fixed order, each one text."""
    return tuple(str(topics[name]) for name in sorted(topics))


def paragraphs(document: str) -> list[str]:
    """The paragraphs of running text: headings, grammar and code are indented or underlined, and left out."""
    blocks = (block for block in document.split("\n\n") if block and not block.startswith((" ", "\t")))
    return [" ".join(_MARKUP.sub("", block).split()) for block in blocks if "::=" not in block and "**" not in block and "==" not in block]


def sentences(paragraph: str, *, least_words: int = 6) -> list[str]:
    """The sentences of a paragraph that have at least ``least_words`` words."""
    return [text for text in _SENTENCE_END.split(paragraph) if len(text.split()) >= least_words]


@lru_cache(maxsize=4)
def sentence_pairs(*, least_words: int = 6) -> tuple[tuple[str, str], ...]:
    """Every two neighbouring sentences of one paragraph, in the order of the text."""
    pairs: list[tuple[str, str]] = []
    for document in documents():
        for paragraph in paragraphs(document):
            found = sentences(paragraph, least_words=least_words)
            pairs.extend(pairwise(found))
    return tuple(pairs)


@lru_cache(maxsize=1)
def text_bytes() -> bytes:
    """The whole text as bytes, for models that read characters."""
    return "\n\n".join(documents()).encode("utf-8")
