"""One port with an ASGI application behind it: timeouts for slow clients, and a limit of connections.

    a connection that does not ask                 closed after `request_s`; so is one that sends a request's head in drops
    one that goes on sending after its answer      closed after `linger_s`
    one that takes nothing of its answer           closed after `write_s` without progress
    one that asks a second time before its answer  waits for its turn; closed if it sends more than a little ahead
    more than `most_connections`                   the one that has waited longest without asking makes room; those that never
                                                   asked go first, those that send the body of a request for more than
                                                   `crowded_s` last. Where all of them have asked, a new one gets 503 with
                                                   Retry-After; twice as many, no answer at all

Half of a connection closed is a connection closed: a client that sends no more is taken to have left.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import html
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smolcluster.comm.addresses import is_loopback
from smolcluster.errors import UserError
from smolcluster.web.guard import HEADERS, App, Receive, Scope, Send, answer, hardened, plain
from smolcluster.web.streams import WRITE_S

_AHEAD_BYTES = 64 << 10
_OPEN_S = 60.0  # that a browser may take to start


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """With a connection, and with how many of them."""

    request_s: float = 10.0
    keep_alive_s: int = 30
    linger_s: float = 5.0
    write_s: float = WRITE_S
    ending_s: int = 2  # for answers in the making, when the server ends
    most_connections: int = 512
    crowded_s: float = 1.0


def listen(bind: str, ports: Sequence[int], *, write_s: float = WRITE_S) -> socket.socket:
    """A listening socket on the first of these ports that is free."""
    for number in ports:
        try:
            family = socket.AF_INET6 if ":" in bind else socket.AF_INET
            listener = socket.create_server((bind, number), family=family, backlog=128)
        except (OSError, OverflowError) as error:
            reason = error
            continue
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a client that vanished does not keep its connection
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_s * 1000))
        return listener
    code = getattr(reason, "errno", None)
    unknown = isinstance(reason, socket.gaierror)
    nowhere = unknown or code == errno.EADDRNOTAVAIL or list(ports) == [0]
    remedy = "--bind must be an address of this machine" if nowhere else "choose another with --port (0: any free one)"
    why = reason if unknown or code is None else os.strerror(code)  # asyncio and socket put their own words around it
    raise UserError(f"cannot listen on {bind}:{ports[0]}: {why}; {remedy}")


def url_of(listener: socket.socket, token: str | None, *, name: str = "token") -> str:
    """What a person opens. The token is behind the #: browsers do not send that part, so it is in no log."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    address = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    return address + (f"#{name}={token}" if token else "")


def open_browser(url: str) -> None:
    """Open a page, on a thread of its own: a browser may be waited for, and waits itself for the page that is served here.

    The list of processes shows a browser's arguments to every user. A URL with a key is therefore not among them: they name a
    file that only this user can read, and that leads there. It is removed a minute later, or at the end if that is sooner.
    """
    import webbrowser

    if "#" in url:
        page = _way_to(url)
        url = page.as_uri()
        atexit.register(_remove, page)
        timer = threading.Timer(_OPEN_S, _remove, args=(page,))
        timer.daemon = True
        timer.start()
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True, name="browser").start()


def _remove(page: Path) -> None:
    shutil.rmtree(page.parent, ignore_errors=True)


def _way_to(url: str) -> Path:
    """Make a page that leads on to `url`, in a folder of its own.

    The folder is in the user's home, and its name does not begin with a dot: a browser that is a snap can read nothing else.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="smolcluster-open-", dir=Path.home()))  # mode 0700
    except (OSError, RuntimeError):  # there is no home, or it cannot be written
        folder = Path(tempfile.mkdtemp(prefix="smolcluster-open-"))
    page = folder / "open.html"
    quoted = html.escape(url, quote=True)
    text = f'<!DOCTYPE html><meta http-equiv="refresh" content="0;url={quoted}"><a href="{quoted}">open</a>\n'
    handle = os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    return page


def names_here(bind: str) -> tuple[str, ...]:
    """Return the names, beside its addresses, of a server that listens there. On loopback none are needed."""
    if is_loopback(bind):
        return ()
    name = socket.gethostname()
    short = name.partition(".")[0]
    return tuple(dict.fromkeys((name, short, f"{short}.local")))  # the last: how mDNS calls it


async def serve(
    app: App,
    listener: socket.socket,
    *,
    ready: Callable[[], None],
    closing: Callable[[], Awaitable[None]],
    until: threading.Event | asyncio.Event | None = None,
    patience: HttpLimits | None = None,
    told: Callable[[int, str], tuple[str, bytes]] = plain,
) -> None:
    """Serve until Ctrl-C, or until `until` is set. `closing` is awaited before connections are ended."""
    import uvicorn

    patience = patience or HttpLimits()
    config = uvicorn.Config(
        app,
        http=_impatient_protocol(patience, told),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=16 << 10,
        timeout_keep_alive=patience.keep_alive_s,
        timeout_graceful_shutdown=patience.ending_s,
    )
    server = uvicorn.Server(config)

    async def watch() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        ready()
        while not (server.should_exit or (until is not None and until.is_set())):
            await asyncio.sleep(0.1)
        await closing()
        server.should_exit = True

    watching = asyncio.create_task(watch())
    try:
        await server.serve(sockets=[listener])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _impatient_protocol(patience: HttpLimits, told: Callable[[int, str], tuple[str, bytes]]) -> Any:
    """Return uvicorn's protocol class, with the timeouts and limits of the module's docstring."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    async def full(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = {"retry-after": "5", "connection": "close"}
        body = told(503, "too many connections; try again in a few seconds")
        await answer(503, *body, headers=headers, send=hardened(send))

    # Since when; oldest first.
    silent: dict[Impatient, float] = {}  # never asked anything so far
    resting: dict[Impatient, float] = {}  # were answered, and may ask again
    sending: dict[Impatient, float] = {}  # their request has begun
    leaving: set[Impatient] = set()  # had to make room, and asyncio has not let go of them yet

    class Impatient(H11Protocol):
        _asking: asyncio.TimerHandle | None = None
        _taking: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            there = len(self.connections) - len(leaving)
            if there > 2 * patience.most_connections:
                transport.abort()
                return
            if there > patience.most_connections and there - self._make_room() > patience.most_connections:
                self.app = full
            silent[self] = self.loop.time()
            self._asking = self.loop.call_later(patience.request_s, transport.abort)

        def _make_room(self) -> int:
            """Evict the connection that has been idle longest. Returns how many were."""
            now = self.loop.time()
            for waiting, least_s in ((silent, 0.0), (resting, 0.0), (sending, patience.crowded_s)):
                for oldest, since in waiting.items():
                    if now - since < least_s:
                        break
                    if not oldest.transport.get_write_buffer_size():  # else it still takes its answer
                        del waiting[oldest]
                        leaving.add(oldest)
                        oldest.transport.abort()
                        return 1
            return 0

        def _not_waiting(self) -> None:
            for waiting in (silent, resting, sending):
                waiting.pop(self, None)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._not_waiting()
            leaving.discard(self)
            for timer in (self._asking, self._taking):
                if timer is not None:
                    timer.cancel()

        # Asking

        def data_received(self, data: bytes) -> None:
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete and self.conn.their_state is h11.DONE:
                # The next request, too early. uvicorn would stop reading, and not see when the connection is closed.
                self.conn.receive_data(data)
                if len(self.conn.trailing_data[0]) > _AHEAD_BYTES:
                    self.transport.abort()
                return
            super().data_received(data)

        def handle_events(self) -> None:
            super().handle_events()
            if self.conn.their_state is not h11.IDLE:
                began = sending.get(self, self.loop.time())
                self._not_waiting()
                if self.conn.their_state is h11.SEND_BODY:
                    sending[self] = began
                if self._asking is not None:
                    self._asking.cancel()
                    self._asking = None
            elif self._asking is None and self.conn.trailing_data[0]:
                self._asking = self.loop.call_later(patience.request_s, self.transport.abort)

        def on_response_complete(self) -> None:
            cycle = self.cycle
            super().on_response_complete()
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                resting[self] = self.loop.time()
            if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
                self.loop.call_later(patience.linger_s, self._end_if_sending, cycle)

        def _end_if_sending(self, cycle: Any) -> None:
            if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
                self.transport.abort()

        def send_400_response(self, msg: str) -> None:
            kind, body = told(400, msg)
            fields = HEADERS | {"content-type": kind, "content-length": str(len(body)), "connection": "close"}
            try:
                for event in (
                    h11.Response(status_code=400, headers=list(fields.items()), reason="Bad Request"),
                    h11.Data(data=body),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event))
            except h11.LocalProtocolError:  # an answer has begun already
                self.transport.abort()
            else:
                self.transport.close()

        # Taking

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_taking(self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._taking is not None:
                self._taking.cancel()
                self._taking = None

        def _watch_taking(self, had: int) -> None:
            self._taking = self.loop.call_later(patience.write_s, self._end_if_stuck, had)

        def _end_if_stuck(self, had: int) -> None:
            left = self.transport.get_write_buffer_size()
            if left >= had:
                self.transport.abort()
            else:
                self._watch_taking(left)

    return Impatient
