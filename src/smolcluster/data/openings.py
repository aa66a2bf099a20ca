"""Beginnings of a training text: what a model that only continues text can be asked first."""

from __future__ import annotations

import re

from smolcluster.config.schema import DataConfig
from smolcluster.data.names import HF_PREFIX
from smolcluster.data.sources import find_sources
from smolcluster.errors import SmolclusterError

_READ = 200_000  # characters of the text that are looked at
_COUNT = 3
_WORDS, _LEAST = 5, 60  # words of an opening; characters of a paragraph that is worth one
_PROSE = re.compile(rf"[A-Z][a-z]*(?: [a-z]+){{{_WORDS - 1}}}")


def openings(data: DataConfig) -> list[str]:
    """Return the first words of a few paragraphs of the text that `data` names. Empty where it is not here."""
    if data.name.startswith(HF_PREFIX):
        return []
    try:
        text = ""
        for piece in find_sources(data.model_copy(update={"download": False})).train.chunks():
            text += piece[: _READ - len(text)]
            if len(text) >= _READ:
                break
    except (SmolclusterError, OSError, ValueError):
        return []
    found = list(dict.fromkeys(filter(None, map(_opening, re.split(r"\n\s*\n", text)))))
    return found[:: max(1, len(found) // _COUNT)][:_COUNT]


def _opening(paragraph: str) -> str | None:
    """Its first words, where it is a sentence: not a heading, a table or a piece of a program."""
    words = paragraph.split()
    first = " ".join(words[:_WORDS])
    return first if len(paragraph) >= _LEAST and _PROSE.fullmatch(first) else None
