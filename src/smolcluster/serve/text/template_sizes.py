"""How large the result of one step of a chat template will be, told before it is made: characters, items or bits.

    of_operator   a * b, a + b, a ** b, a % b
    of_method     "a".ljust(b), "a".replace(b, c), ...      those whose result can be much longer than what they are given
    of_filter     a | center(b), a | join(b), ...           the same

What is not named here makes a result of about the size of what it is given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any


def of_operator(operator: str, left: Any, right: Any) -> float:
    if operator == "+":
        return _length(left) + _length(right)
    if operator == "%":
        return _percent(left, right) if isinstance(left, str | bytes) else 0
    whole = isinstance(left, int) and isinstance(right, int)
    if operator == "**":
        return abs(right) * left.bit_length() if whole else 0
    if whole:
        return int(left.bit_length() + right.bit_length())
    length, times = (left, right) if isinstance(right, int) else (right, left)
    return _length(length) * times if isinstance(times, int) else 0


def of_method(method: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> float:
    method = getattr(method, "__wrapped__", method)  # the sandbox has put its own around str.format
    size = _METHODS.get(getattr(method, "__name__", ""))
    return 0 if size is None else size(method.__self__, *args, **named)


def of_filter(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> float:
    size = _FILTERS.get(name)
    return 0 if size is None else size(*args, **named)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _padded(_: Any, width: int, *__: Any, **___: Any) -> int:
    return width


def _tabbed(text: Any, tabsize: int = 8) -> int:
    return len(text) + int(text.count("\t" if isinstance(text, str) else b"\t")) * tabsize


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    text, old, new = (one if isinstance(one, bytes) else str(one) for one in (text, old, new))
    return len(text) + int(text.count(old)) * len(new)


def _joined(separator: Any, items: Iterable[Any]) -> int:
    return sum(len(str(item)) + len(str(separator)) for item in items)


def _indented(text: Any, width: int | str = 4, *_: Any, **__: Any) -> int:
    wide = width if isinstance(width, int) else len(width)
    return len(str(text)) + (str(text).count("\n") + 1) * wide


def _summed(_: Any, attribute: Any = None, start: Any = 0) -> float:  # noqa: ARG001 - Jinja's own
    """Numbers only: from a list on, it would add lists."""
    return 0 if isinstance(start, int | float) else math.inf


def _formatted(form: str, *args: Any, **named: Any) -> float:
    """str.format. A width that is itself a value cannot be known before."""
    fields = [(name, spec or "") for _, name, spec, _ in Formatter().parse(form) if name is not None]
    if any("{" in spec for _, spec in fields):
        return math.inf
    return len(form) + len(fields) * (_largest("".join(f" {spec}" for _, spec in fields)) + _longest((args, named)))


def _percent(form: Any, right: Any) -> float:
    text = form if isinstance(form, str) else form.decode("latin-1")
    if re.search(r"%[^a-zA-Z%]*\*", text):  # the width is one of the values
        return math.inf
    return len(text) + text.count("%") * (_largest(text) + _longest(right))


def _largest(text: str) -> int:
    return max((int(number) for number in re.findall(r"\d+", text)), default=0)


def _longest(value: Any) -> int:
    """Of a value as text, and so of everything in it."""
    return len(str(value))


_METHODS: dict[str, Callable[..., float]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _padded),
    "expandtabs": _tabbed,
    "replace": _replaced,
    "join": _joined,
    "format": _formatted,
    "format_map": lambda form, values: _formatted(form, values),
    "translate": lambda *_: math.inf,
}
_FILTERS: dict[str, Callable[..., float]] = {
    "center": lambda _, width=80: width,
    "indent": _indented,
    "replace": _replaced,
    "join": lambda items, d="", *_, **__: _joined(d, items),
    "format": lambda form, *args, **named: _percent(str(form), named or args),
    "batch": lambda _, linecount, *__, **___: linecount,
    "slice": lambda _, slices, *__, **___: slices,
    "sum": _summed,
    "round": lambda _, precision=0, *__, **___: 4 * abs(precision),  # by way of 10 to this power
}
