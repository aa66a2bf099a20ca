"""A heartbeat roster: one process keeps it, members report to it, and all see it. Nothing here imports torch.

    member -> keeper    a line of JSON: all fields of this member, again whenever one changes
    keeper -> members   a line of JSON: the roll, whenever it changes
    both ways           an empty line every BEAT_S: I am here

A process that dies closes its connection, and the others know at once. One whose machine or network is gone closes nothing: it
is missed when it has been silent for `silent_s`. Time is measured by the listener; clocks are not compared.

The mesh plane uses it twice: between the launchers of `train --elastic` (launch/rounds.py), with the cluster token and TLS 1.3
as on the elastic plane, and between ranks that nobody else watches (watch.py), with a secret of that run. A peer that does not
prove itself within PROVE_S is dropped, and never shows on the roll.

Keeper and Member each have one thread with an event loop, and nothing on it blocks. A member that reads slowly gets the newest
roll when it has read the last; one that does not read is evicted. Lines, members and the whole roll are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from smolcluster.comm.addresses import reach
from smolcluster.comm.elastic.security import Credentials, Keyring
from smolcluster.comm.pending import Candidate, PendingConnections

BEAT_S = 0.5
LINE_BYTES = 1 << 17  # of one member
ROLL_BYTES = 1 << 23  # of all fields together
TEXT_CHARS = 2000  # of one text that a member sends
UNSENT_BYTES = 1 << 16  # a peer that is further behind waits for the next roll
MOST_MEMBERS = 4096
MOST_GONE = 256  # of those that left, so many are remembered
MOST_PENDING = 64  # connections that have not proved themselves
PROVE_S = 10.0
LINGER_S = 2.0  # for the last lines to leave
RETRY_S = 0.1
REACH_S = 10.0  # for one attempt: a name may mean another machine by then

CLOSED, SILENT = "closed", "silent"  # how somebody left
Fields = dict[str, Any]
_TLS: Fields = {"ssl_handshake_timeout": PROVE_S, "ssl_shutdown_timeout": LINGER_S}


@dataclass(frozen=True, slots=True)
class Roll:
    """Numbers are given in the order of arrival, and not again."""

    members: dict[int, Fields] = field(default_factory=dict)
    gone: dict[int, Fields] = field(default_factory=dict)  # the last fields of each
    how: dict[int, str] = field(default_factory=dict)  # each of these left


class _Line(Candidate, asyncio.Protocol):
    """One connection: lines in, lines out. `said` is called for every object, `over` once at the end."""

    def __init__(
        self,
        address: str,
        *,
        most_bytes: int,
        said: Callable[[_Line, Fields, int], None],
        over: Callable[[_Line], None],
    ) -> None:
        self.address = address
        self.linked = False
        self.number = -1  # on the roll
        self.how = CLOSED
        self.heard = self.moved = time.monotonic()  # the last byte from the peer; the last time it was not behind
        self.stale = False  # it has not been sent the newest roll
        self.transport: asyncio.Transport | None = None
        self._most_bytes, self._said, self._over = most_bytes, said, over
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.decided = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        self._buffer += data
        lines: list[bytearray] = []
        if b"\n" in data:
            *lines, self._buffer = self._buffer.split(b"\n")
        try:
            for line in lines:
                if line:
                    self._said(self, _parse(line, most_bytes=self._most_bytes), len(line))
            if len(self._buffer) > self._most_bytes:
                raise ValueError("a line is too long")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # it speaks another language
            self.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self.decide(linked=False)
        self._over(self)

    def decide(self, *, linked: bool) -> None:
        if not self.decided.done():
            self.linked = linked
            self.decided.set_result(None)

    def end(self, reason: str) -> None:
        self.abort()

    def send(self, text: bytes) -> None:
        """Never blocks. A line that is broken is noticed by whoever listens to it."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(text + b"\n")

    @property
    def behind(self) -> bool:
        """Whether the peer has yet to read what was sent to it."""
        return self.transport is not None and self.transport.get_write_buffer_size() > UNSENT_BYTES

    def beat(self, now: float, *, stood_still_s: float, silent_s: float) -> None:
        """Send a heartbeat, or give up a peer that has sent or read nothing for too long. Our own standstill does not count."""
        self.heard += stood_still_s
        self.moved = now if not self.behind else self.moved + stood_still_s
        if now - min(self.heard, self.moved) > silent_s:
            self.how = SILENT
            self.abort()
        elif not self.behind:
            self.send(b"")

    def close(self) -> None:
        """What was sent is sent first."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def _parse(line: bytearray, *, most_bytes: int) -> Fields:
    if len(line) > most_bytes:
        raise ValueError("a line is too long")
    said = json.loads(line)
    if not isinstance(said, dict):
        raise ValueError("not an object")
    return said


class _Thread:
    """An event loop on a thread of its own, which calls `tick` every BEAT_S with the time for which it stood still."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.SelectorEventLoop()  # also on Windows: the other kind takes no socket that is not its own
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def post(self, callback: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(callback, *args)

    def tick(self, work: Callable[[float, float], None], due: float) -> None:
        now = time.monotonic()
        self.loop.call_later(BEAT_S, self.tick, work, now + BEAT_S)
        work(now, max(0.0, now - due))

    def close(self, lines: Callable[[], list[_Line]]) -> None:
        """Close these, and end the thread when none is left, or after LINGER_S."""

        async def linger() -> None:
            for line in lines():
                line.close()
            until = time.monotonic() + LINGER_S
            while lines() and time.monotonic() < until:
                await asyncio.sleep(0.005)
            for line in lines():
                line.abort()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # the last connections are told that they are lost
            self.loop.stop()

        self.post(lambda: self.loop.create_task(linger()))
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * LINGER_S)

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()


class Keeper:
    """Keeps the roll. Listens from the start; OSError when it cannot.

    `keyring`: members prove by TLS that they hold a token of it. `secret`: they send it with their first line.
    """

    def __init__(
        self, host: str, port: int, *, silent_s: float, keyring: Keyring | None = None, secret: str = ""
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._context = None if keyring is None else keyring.server_context()
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._silent_s, self._secret = silent_s, secret
        # All below belongs to the thread.
        self._roll = Roll()
        self._sizes: dict[int, int] = {}  # bytes of each one's fields, also of those that left
        self._lines: dict[int, _Line] = {}
        self._count = 0
        self._thread = _Thread("roll-keeper")
        self._thread.post(self._begin)

    def close(self) -> None:
        self._thread.post(self._pending.close)
        self._thread.close(lambda: list(self._lines.values()))

    def _begin(self) -> None:
        loop = self._thread.loop
        self._pending = PendingConnections(
            loop, loop.create_task, most=MOST_PENDING, within_s=PROVE_S, tls=_TLS, warns=False
        )
        self._pending.listen([self._listener], self._line, self._context)
        self._thread.tick(self._tick, time.monotonic())

    def _line(self, address: str) -> _Line:
        return _Line(address, most_bytes=LINE_BYTES, said=self._said, over=self._over)

    # Members

    def _said(self, line: _Line, said: Fields, nbytes: int) -> None:
        proved = hmac.compare_digest(str(said.pop("secret", "")).encode(), self._secret.encode())
        if not line.linked and (not proved or len(self._lines) >= MOST_MEMBERS):
            raise ValueError("it does not have the secret, or the roll is full")
        number = line.number if line.linked else self._count
        if sum(self._sizes.values()) - self._sizes.get(number, 0) + nbytes > ROLL_BYTES and not self._forget(nbytes):
            raise ValueError("the roll has no room for it")
        if not line.linked:
            line.decide(linked=True)
            line.number, self._count = number, self._count + 1
            self._lines[number] = line
            line.send(json.dumps({"you": number}).encode())
        self._sizes[number] = nbytes
        self._roll.members[number] = said
        self._tell_all()

    def _forget(self, nbytes: int) -> bool:
        """Drop those that left until there is room; whether there is."""
        while self._roll.gone and sum(self._sizes.values()) + nbytes > ROLL_BYTES:
            self._drop_gone()
        return sum(self._sizes.values()) + nbytes <= ROLL_BYTES

    def _over(self, line: _Line) -> None:
        number = line.number
        if self._lines.pop(number, None) is None:
            return
        self._roll.gone[number] = self._roll.members.pop(number)
        self._roll.how[number] = line.how
        if len(self._roll.gone) > MOST_GONE:
            self._drop_gone()
        self._tell_all()

    def _drop_gone(self) -> None:
        oldest = min(self._roll.gone)
        del self._roll.gone[oldest], self._roll.how[oldest], self._sizes[oldest]

    def _tell_all(self) -> None:
        for line in self._lines.values():
            line.stale = True
        self._catch_up()

    def _catch_up(self) -> None:
        """Send the newest roll to those that lack it and have read the last one."""
        roll: bytes | None = None
        for line in self._lines.values():
            if line.stale and not line.behind:
                roll = roll or json.dumps({part: getattr(self._roll, part) for part in Roll.__slots__}).encode()
                line.stale = False
                line.send(roll)

    def _tick(self, now: float, stood_still_s: float) -> None:
        self._pending.expire(now)
        for line in list(self._lines.values()):
            line.beat(now, stood_still_s=stood_still_s, silent_s=self._silent_s)
        self._catch_up()


class Member:
    """A place on the roll. `on_change` is called after every change, on the thread that listens, and must not block."""

    def __init__(
        self,
        sock: socket.socket,
        fields: Fields,
        *,
        silent_s: float,
        credentials: Credentials | None = None,
        secret: str = "",
    ) -> None:
        """Takes over the socket. With `credentials` the keeper has to prove that it holds the same token: ssl.SSLError."""
        self.on_change: Callable[[], None] = lambda: None
        self.roll = Roll()
        self.number = -1
        self.lost: str | None = None  # how the keeper left
        self._fields: Fields = {**fields, **({"secret": secret} if secret else {})}
        self._silent_s = silent_s
        self._news = threading.Condition()
        self._sending = threading.Lock()  # the order of reports; nothing under it blocks
        self._open = True
        self._line = _Line("the keeper", most_bytes=2 * ROLL_BYTES, said=self._heard, over=self._over)
        self._thread = _Thread("roll-member")
        try:
            asyncio.run_coroutine_threadsafe(self._connect(sock, credentials), self._thread.loop).result()
        except OSError:
            self._open = False
            sock.close()
            self._thread.close(list)
            raise
        self.say()
        self._thread.post(lambda: self._thread.tick(self._tick, time.monotonic()))

    async def _connect(self, sock: socket.socket, credentials: Credentials | None) -> None:
        sock.setblocking(False)
        tls: dict[str, Any] = {}
        if credentials is not None:
            tls = {"ssl": credentials.client_context(), "server_hostname": credentials.server_name, **_TLS}
        await self._thread.loop.create_connection(lambda: self._line, sock=sock, **tls)

    def say(self, **fields: Any) -> None:
        """Change the fields of this member, and send them."""
        with self._sending:
            self._fields |= {name: _short(value) for name, value in fields.items()}
            self._thread.post(self._line.send, json.dumps(self._fields).encode())

    def wait(self, question: Callable[[], bool], *, within_s: float) -> bool:
        """Until the answer is yes, asked at every change; False when the time is over or the keeper is lost."""
        with self._news:
            self._news.wait_for(lambda: self.lost is not None or question(), timeout=within_s)
        return question()

    def close(self) -> None:
        """What was said is sent first."""
        self._open = False
        self._thread.close(lambda: [self._line] if self.lost is None else [])

    def _heard(self, _: _Line, said: Fields, __: int) -> None:
        with self._news:
            if "you" in said:
                self.number = int(said["you"])
            else:
                self.roll = Roll(*({int(k): v for k, v in said[part].items()} for part in Roll.__slots__))
            self._news.notify_all()
        self._changed()

    def _over(self, line: _Line) -> None:
        with self._news:
            self.lost = line.how
            self._news.notify_all()
        self._changed()

    def _changed(self) -> None:
        if self._open:
            self.on_change()

    def _tick(self, now: float, stood_still_s: float) -> None:
        self._line.beat(now, stood_still_s=stood_still_s, silent_s=self._silent_s)


def _short(value: Any) -> Any:
    return value[:TEXT_CHARS] if isinstance(value, str) else value


def dial(host: str, port: int, *, within_s: float) -> socket.socket | None:
    """A connection to a keeper that may not be there yet; None when nobody answers in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return reach(host, port, within_s=max(0.1, min(REACH_S, deadline - time.monotonic())))
        time.sleep(RETRY_S)
    return None


def join(
    host: str, port: int, fields: Fields, *, silent_s: float, within_s: float, keyring: Keyring | None
) -> Member | None:
    """A place on the roll of a keeper that may not be there yet; None when nobody answers in time.

    Each token has its turn. Raises ssl.SSLError when the keeper holds none of them. A connection that breaks before that is
    known is made again: the keeper may be one that is just being replaced.
    """
    deadline = time.monotonic() + within_s
    turns: list[Credentials | None] = [None] if keyring is None else [*keyring.credentials]
    while True:
        sock = dial(host, port, within_s=max(0.0, deadline - time.monotonic()))
        if sock is None:
            return None
        try:
            return Member(sock, fields, silent_s=silent_s, credentials=turns[0])
        except ssl.SSLCertVerificationError:
            if len(turns) == 1:
                raise
            del turns[0]
        except (ConnectionError, TimeoutError, ssl.SSLEOFError):
            time.sleep(RETRY_S)
