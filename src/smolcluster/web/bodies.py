"""What was asked: one JSON object, of bounded size and depth, within bounded time.

Unreadable(400)    no UTF-8, no JSON, no object, NaN, a field twice, nested too deep
Unreadable(408)    it did not come in time
Unreadable(413)    too large; found out while reading, whatever Content-Length says
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from smolcluster.errors import SmolclusterError
from smolcluster.web.guard import Receive, Scope

MOST_BYTES = 1 << 20
MOST_DEPTH = 32
BODY_S = 15.0
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # also one without an end: each character is looked at once
_BRACKET = str.maketrans(dict.fromkeys(map(chr, range(128)), None) | {c: c for c in "[]{}"})


class BadBody(SmolclusterError):
    """A body that is not what it should be."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ClientGone(SmolclusterError):
    """The client has left."""


class BodyReaders:
    """The requests whose body is being read. Where there is no room for another, the slowest can be ended."""

    def __init__(self, *, least_s: float) -> None:
        self._least_s = least_s
        self._reading: dict[asyncio.Timeout, float] = {}  # since when; the first came first

    @contextlib.asynccontextmanager
    async def reading(self, body_s: float) -> AsyncIterator[None]:
        """TimeoutError when there is no more time."""
        async with asyncio.timeout(body_s) as timeout:
            self._reading[timeout] = time.monotonic()
            try:
                yield
            finally:
                self._reading.pop(timeout, None)

    def hurry(self) -> bool:
        """Whether the one that has been at it longest has had its `least_s`, and leaves."""
        timeout, since = next(iter(self._reading.items()), (None, math.inf))
        if timeout is None or time.monotonic() - since < self._least_s:
            return False
        del self._reading[timeout]
        timeout.reschedule(asyncio.get_running_loop().time())
        return True


async def read_object(
    scope: Scope,
    receive: Receive,
    *,
    most_bytes: int = MOST_BYTES,
    body_s: float = BODY_S,
    readers: BodyReaders | None = None,
) -> dict[str, Any]:
    """Return the body of a request. Raises Unreadable as soon as it is too much or too late, Gone when the client leaves."""
    told = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if not told.isdigit() or len(told) > 18 or int(told) > most_bytes:
        raise BadBody(f"the body is larger than {most_bytes} bytes", 413)
    parts, have, began = [], 0, time.monotonic()
    try:
        async with (readers or BodyReaders(least_s=body_s)).reading(body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("in the middle of its request")
                part = message.get("body", b"")
                have += len(part)
                if have > most_bytes:
                    raise BadBody(f"the body is larger than {most_bytes} bytes", 413)
                parts.append(part)
                if not message.get("more_body", False):
                    return parse_object(b"".join(parts))
    except TimeoutError:
        hurried = time.monotonic() - began < body_s
        why = "has not come yet, and others wait" if hurried else f"did not come within {body_s:g} s"
        raise BadBody(f"the body {why}", 408) from None


def parse_object(body: bytes) -> dict[str, Any]:
    """JSON, strictly: what two readers could take for two things is taken for nothing."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise BadBody(f"the body is not UTF-8: byte {error.start}") from None
    if not text.strip():
        raise BadBody("the body is empty; give JSON")
    if too_deep(text):
        raise BadBody(f"the body is nested deeper than {MOST_DEPTH}")
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise BadBody(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:
        raise BadBody(f"the body is not JSON that can be read here: {error}") from None
    if not isinstance(value, dict):
        raise BadBody("the body must be a JSON object")
    return value


def too_deep(text: str) -> bool:
    """Whether brackets stand in brackets more than MOST_DEPTH deep, without going down into them."""
    if text.count("[") + text.count("{") <= MOST_DEPTH:
        return False
    brackets = _STRING.sub("", text).translate(_BRACKET)
    for _ in range(MOST_DEPTH):  # each round takes the innermost pairs away
        brackets = brackets.replace("[]", "").replace("{}", "")
    return bool(brackets)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise BadBody(f"the field {name[:80]!r} is there twice")
        found[name] = value
    return found


def _no_number(name: str) -> NoReturn:
    raise BadBody(f"{name} is no number in JSON")
