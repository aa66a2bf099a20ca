"""Format numbers and strings for a terminal."""

from __future__ import annotations

import math
import os
import re
import unicodedata
from typing import IO

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # colours and cursor movements


def printable(text: str, *, keep: str = "\t") -> str:
    """Remove control characters: text of a peer or a model must not control the terminal."""
    text = _ESCAPE.sub("", text)
    return "".join(c for c in text if c in keep or unicodedata.category(c)[0] != "C")


def encodable(text: str, stream: IO[str]) -> str:
    """Replace characters that the stream cannot encode."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        return text.encode(encoding, "replace").decode(encoding)
    except LookupError:  # an encoding Python does not know
        return text.encode("ascii", "replace").decode("ascii")


def supports(stream: IO[str], characters: str) -> bool:
    """Return whether the stream can encode these characters."""
    return encodable(characters, stream) == characters


def dumb_terminal() -> bool:
    """Return whether TERM says that the terminal does not support escape codes."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def short(value: float) -> str:
    """Return three digits and a letter: `950`, `12.3k`, `1.23M`; in thousands, also for bytes."""
    if not math.isfinite(value):
        return str(value)
    unit = ""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            break
        value /= 1000
    return _three_digits(value) + unit if unit or value != round(value) else f"{value:.0f}"


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def size(num_bytes: float) -> str:
    """`12.3 MB`."""
    text = short(num_bytes)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() and math.isfinite(num_bytes) else f"{text} B"


def clock(seconds: float) -> str:
    """`0:41`, `12:05`, `3:00:00`, `2d 3:00:00`; `-` when unknown."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h}:{m:02}:{s:02}"
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"


def duration(seconds: float) -> str:
    """Return a short time with its unit: `850 us`, `12.3 ms`, `1.25 s`."""
    if not math.isfinite(seconds):
        return "-"
    if seconds >= 0.9995:
        return f"{_three_digits(seconds)} s"
    return f"{_three_digits(seconds * 1e3)} ms" if seconds >= 0.9995e-3 else f"{_three_digits(seconds * 1e6)} us"


def number(value: float) -> str:
    """Format a loss: four decimals from 0.001 to 10,000, else scientific."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3e}"
