"""Timeouts and limits for connections: an asyncio protocol around uvicorn's, and an ASGI middleware.

    bytes that are not HTTP                        400, in the server's own error body, and closed
    no complete request head within `request_s`    closed
    body still arriving after the response         closed `linger_s` after the response
    response not read                              closed after `write_s` without progress
    more than `max_connections`                    the one idle longest is closed: first those that never sent a request, then
                                                   those between requests, then uploads older than `slow_body_s`. If there is
                                                   none, the new one gets 503 with Retry-After; at twice the limit, a reset

A half-closed connection counts as closed.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smolcluster.web.guard import HEADERS, App, Message, Receive, Scope, Send, hardened, send_response
from smolcluster.web.streams import WRITE_S

_PIPELINED_BYTES = 64 << 10  # buffered bytes of pipelined requests


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    request_s: float = 10.0
    keep_alive_s: int = 30
    linger_s: float = 5.0
    write_s: float = WRITE_S
    shutdown_s: int = 2  # for responses in progress, when the server stops
    max_connections: int = 512
    slow_body_s: float = 1.0  # at the connection limit, an upload older than this may be closed


class _Phase(enum.IntEnum):
    NEW = 0  # no request yet
    IDLE = 1  # between requests
    READING = 2  # a request's body is incomplete
    RESPONDING = 3


class ConnectionGate:
    """The open connections of a server. Pass `protocol` to uvicorn as `http=`, and the object as the ASGI app."""

    def __init__(self, app: App, limits: HttpLimits, error_body: Callable[[int, str], tuple[str, bytes]]) -> None:
        self._app, self.limits, self.error_body = app, limits, error_body
        self.open: set[_Connection] = set()
        self._by_client: dict[Any, _Connection] = {}

    def protocol(self, **options: Any) -> asyncio.Protocol:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return _Connection(self, H11Protocol(**options))

    def add(self, connection: _Connection) -> None:
        limit, num_open = self.limits.max_connections, len(self.open)
        if num_open >= 2 * limit:
            connection.abort()
            return
        connection.refused = num_open >= limit and not self._evict()
        self.open.add(connection)
        self._by_client[connection.client] = connection

    def remove(self, connection: _Connection) -> None:
        self.open.discard(connection)
        if self._by_client.get(connection.client) is connection:
            del self._by_client[connection.client]

    def _evict(self) -> bool:
        """Close the connection that has been idle longest. Return False if all of them are busy."""
        idle = [one for one in self.open if one.idle(self.limits.slow_body_s)]
        if not idle:
            return False
        min(idle, key=lambda one: (one.phase, one.since)).abort()
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = self._by_client.get(scope.get("client"))
        if connection is None:  # closed already
            await self._app(scope, receive, send)
            return
        if connection.refused:
            headers = {"retry-after": "5", "connection": "close"}
            body = self.error_body(503, "too many connections; try again in a few seconds")
            await send_response(503, *body, headers=headers, send=hardened(send))
            return
        names = dict(scope["headers"])
        number = connection.begin(has_body=b"transfer-encoding" in names or names.get(b"content-length", b"0") != b"0")

        async def tracked_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                connection.enter(_Phase.RESPONDING)
            return message

        try:
            await self._app(scope, tracked_receive, send)
        finally:
            connection.end(number)


class _Connection(asyncio.Protocol):
    """Wraps uvicorn's protocol object, and is the transport that it sees."""

    def __init__(self, gate: ConnectionGate, inner: Any) -> None:
        self._gate, self._limits, self._inner = gate, gate.limits, inner
        inner.send_400_response = self._send_400
        self._loop = asyncio.get_running_loop()
        self.phase, self.since, self.refused = _Phase.NEW, self._loop.time(), False
        self._requests = 0
        self._pipelined, self._paused = b"", False
        self._transport: Any = None
        self.client: tuple[str, int] = ("", 0)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)  # the other methods that uvicorn calls on a transport

    # Called by ConnectionGate

    def idle(self, slow_body_s: float) -> bool:
        old = self.phase is _Phase.READING and self._loop.time() - self.since >= slow_body_s
        return (old or self.phase < _Phase.READING) and not self._transport.get_write_buffer_size()

    def abort(self) -> None:
        self._gate.remove(self)
        self._transport.abort()

    def enter(self, phase: _Phase) -> None:
        self.phase, self.since = phase, self._loop.time()

    def begin(self, *, has_body: bool) -> int:
        self._requests += 1
        self.enter(_Phase.READING if has_body else _Phase.RESPONDING)
        _cancel(self._head_timer)
        self._head_timer = None
        return self._requests

    def end(self, number: int) -> None:
        if number != self._requests:  # the next one, pipelined, has begun
            return
        if self.phase is _Phase.READING:
            self._loop.call_later(self._limits.linger_s, self._abort_unless_new, number)
        else:
            self.enter(_Phase.IDLE)

    def _abort_unless_new(self, requests: int) -> None:
        if self._requests == requests:
            self.abort()

    # Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.client = (transport.get_extra_info("peername") or ("", 0))[:2]
        self._inner.connection_made(self)
        self._gate.add(self)
        self._head_timer = self._loop.call_later(self._limits.request_s, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.remove(self)
        _cancel(self._head_timer)
        _cancel(self._write_timer)
        self._inner.connection_lost(exc)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def data_received(self, data: bytes) -> None:
        if self.phase is _Phase.IDLE and self._head_timer is None:
            self._head_timer = self._loop.call_later(self._limits.request_s, self.abort)
        self._pipelined += data
        self._feed()

    def _feed(self) -> None:
        if self._paused:
            if len(self._pipelined) > _PIPELINED_BYTES:
                self._transport.pause_reading()
            return
        data, self._pipelined = self._pipelined, b""
        if data:
            try:
                self._inner.data_received(data)
            except Exception:  # noqa: BLE001 - not HTTP, after a response has begun
                self.abort()

    def _send_400(self, message: str) -> None:
        """Called by uvicorn for bytes that are not HTTP. h11 raises if a response has begun."""
        import h11

        kind, body = self._gate.error_body(400, message)
        fields = HEADERS | {"content-type": kind, "content-length": str(len(body)), "connection": "close"}
        head = h11.Response(status_code=400, headers=list(fields.items()), reason=b"Bad Request")
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self._transport.write(self._inner.conn.send(event))
        self._transport.close()

    def pause_reading(self) -> None:
        """Called by uvicorn while another request waits. Reading continues for a while, to notice a closed connection."""
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._transport.resume_reading()
        self._loop.call_soon(self._feed)

    def pause_writing(self) -> None:
        self._inner.pause_writing()
        self._watch_writing(self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._inner.resume_writing()
        _cancel(self._write_timer)

    def _watch_writing(self, had: int) -> None:
        self._write_timer = self._loop.call_later(self._limits.write_s, self._check_writing, had)

    def _check_writing(self, had: int) -> None:
        left = self._transport.get_write_buffer_size()
        if left >= had:
            self.abort()
        else:
            self._watch_writing(left)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
