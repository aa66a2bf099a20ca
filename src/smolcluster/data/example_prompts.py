"""Example prompts for a model without a chat template, from its training text."""

from __future__ import annotations

import re

from smolcluster.config.schema import DataConfig
from smolcluster.data.names import HF_PREFIX
from smolcluster.data.sources import find_sources
from smolcluster.errors import SmolclusterError

_READ = 200_000  # characters that are searched
_COUNT = 3
_NUM_WORDS, _MIN_CHARS = 5, 60  # words of a prompt; characters of a paragraph that it is taken from
_PROSE = re.compile(rf"[A-Z][a-z]*(?: [a-z]+){{{_NUM_WORDS - 1}}}")


def example_prompts(data: DataConfig) -> list[str]:
    """Return the first words of a few paragraphs of the training text; empty if it is not on this machine."""
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
    found = list(dict.fromkeys(filter(None, map(_first_words, re.split(r"\n\s*\n", text)))))
    return found[:: max(1, len(found) // _COUNT)][:_COUNT]


def _first_words(paragraph: str) -> str | None:
    """Return a paragraph's first words if it is prose: not a heading, a table or code."""
    words = paragraph.split()
    first = " ".join(words[:_NUM_WORDS])
    return first if len(paragraph) >= _MIN_CHARS and _PROSE.fullmatch(first) else None
