"""Request bodies: one JSON object, of bounded size and depth, within bounded time.

BadBody(400)    not UTF-8, not JSON, not an object, NaN, a duplicate field, nested too deep
BadBody(408)    not received in time
BadBody(413)    too large, counted while reading
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

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
BODY_S = 15.0
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # also unterminated: linear time
_BRACKET = str.maketrans(dict.fromkeys(map(chr, range(128)), None) | {c: c for c in "[]{}"})


class BadBody(SmolclusterError):
    """The body of a request is invalid."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ClientGone(SmolclusterError):
    """The client has disconnected."""


class BodyReaders:
    """The bodies being read. `hurry` times out the oldest, to free its connection or slot."""

    def __init__(self, *, min_s: float) -> None:
        self._min_s = min_s
        self._reading: dict[asyncio.Timeout, float] = {}  # start times, oldest first

    @contextlib.asynccontextmanager
    async def reading(self, body_s: float) -> AsyncIterator[None]:
        """Raise TimeoutError after `body_s`, or when `hurry` chooses this body."""
        async with asyncio.timeout(body_s) as timeout:
            self._reading[timeout] = time.monotonic()
            try:
                yield
            finally:
                self._reading.pop(timeout, None)

    def hurry(self) -> bool:
        """Time out the oldest body if it has had `min_s`. Return whether it did."""
        timeout, since = next(iter(self._reading.items()), (None, math.inf))
        if timeout is None or time.monotonic() - since < self._min_s:
            return False
        del self._reading[timeout]
        timeout.reschedule(asyncio.get_running_loop().time())
        return True


async def read_object(
    scope: Scope,
    receive: Receive,
    *,
    max_bytes: int = MAX_BYTES,
    body_s: float = BODY_S,
    readers: BodyReaders | None = None,
) -> dict[str, Any]:
    """Return the body of a request. Raises BadBody or ClientGone."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if not declared.isdigit() or len(declared) > 18 or int(declared) > max_bytes:
        raise BadBody(f"the body is larger than {max_bytes} bytes", 413)
    parts, have, began = [], 0, time.monotonic()
    try:
        async with (readers or BodyReaders(min_s=body_s)).reading(body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("while sending its request")
                part = message.get("body", b"")
                have += len(part)
                if have > max_bytes:
                    raise BadBody(f"the body is larger than {max_bytes} bytes", 413)
                parts.append(part)
                if not message.get("more_body", False):
                    return parse_object(b"".join(parts))
    except TimeoutError:
        hurried = time.monotonic() - began < body_s
        why = "is too slow while other requests wait" if hurried else f"was not received within {body_s:g} s"
        raise BadBody(f"the body {why}", 408) from None


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse JSON strictly: ambiguous input is refused."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise BadBody(f"the body is not UTF-8: byte {error.start}") from None
    if not text.strip():
        raise BadBody("the body is empty; send JSON")
    if too_deep(text):
        raise BadBody(f"the body is nested deeper than {MAX_DEPTH}")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise BadBody(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:
        raise BadBody(f"the body cannot be parsed as JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadBody("the body must be a JSON object")
    return value


def too_deep(text: str) -> bool:
    """Return whether brackets nest deeper than MAX_DEPTH. Not recursive."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    brackets = _STRING.sub("", text).translate(_BRACKET)
    for _ in range(MAX_DEPTH):  # removes the innermost pairs
        brackets = brackets.replace("[]", "").replace("{}", "")
    return bool(brackets)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise BadBody(f"duplicate field {name[:80]!r}")
        found[name] = value
    return found


def _no_number(name: str) -> NoReturn:
    raise BadBody(f"{name} is not a JSON number")
