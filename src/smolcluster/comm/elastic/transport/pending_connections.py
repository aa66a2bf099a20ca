"""Accept connections and keep them until they are authenticated. Nothing here imports torch.

    silent         has sent nothing yet; costs little more than a file descriptor
    proving        is in the TLS or our handshake

Both must finish within `timeout_s` of connecting, and their number is limited: a new connection evicts the oldest one, silent
ones first. Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from smolcluster.comm.addresses import join_address
from smolcluster.comm.elastic.transport.security import explain

log = logging.getLogger(__name__)

ACCEPT_AT_ONCE = 64  # per turn of the event loop
NO_FILES_PAUSE_S = 0.05  # out of file descriptors
WARN_EVERY_S = 10.0


class Candidate(asyncio.BaseProtocol, ABC):
    """The protocol of a connection that has to authenticate."""

    address: str
    linked: bool  # authenticated
    decided: asyncio.Future[None]  # linked, or over

    @abstractmethod
    def end(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket. `make` returns the protocol for a peer's address."""

    sock: socket.socket
    make: Callable[[str], Candidate]
    context: ssl.SSLContext | None


class PendingConnections:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        *,
        most: int,
        timeout_s: float,
        tls: dict[str, Any],
    ) -> None:
        """`start` makes a task, which its owner cancels. `tls`: asyncio's options in addition to the context."""
        self._loop, self._start = loop, start
        self._most, self._within_s, self._tls = most, timeout_s, tls
        self._listeners: list[Listener] = []
        self._silent: dict[socket.socket, float] = {}  # time of connecting; oldest first
        self._proving: dict[Candidate, asyncio.Task[None]] = {}  # oldest first
        self._unclaimed: set[socket.socket] = set()  # of tasks that have not started
        self._noted, self._warned_at = 0, -WARN_EVERY_S

    def listen(
        self, listeners: Sequence[socket.socket], make: Callable[[str], Candidate], context: ssl.SSLContext | None
    ) -> None:
        for sock in listeners:
            listener = Listener(sock, make, context)
            self._listeners.append(listener)
            self._loop.add_reader(sock, self._accept, listener)

    def close(self) -> None:
        """Stop accepting. The owner cancels the tasks."""
        for listener in self._listeners:
            self._loop.remove_reader(listener.sock)
            listener.sock.close()
        self._listeners.clear()
        for sock in list(self._silent):
            self._forget(sock).close()

    def note(self, address: str, problem: str) -> None:
        """Count a peer that failed before our handshake. Warnings are rate-limited: there may be a million of them."""
        self._noted += 1
        now = time.monotonic()
        if now - self._warned_at >= WARN_EVERY_S:
            log.warning("refused %s: %s (%d connections refused before the handshake)", address, problem, self._noted)
            self._warned_at = now

    def expire(self, now: float) -> None:
        """Close silent connections that are older than `timeout_s`."""
        for sock, since in list(self._silent.items()):
            if now - since < self._within_s:
                break
            self._forget(sock).close()

    def _accept(self, listener: Listener) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                sock, _ = listener.sock.accept()
            except (BlockingIOError, ConnectionError, InterruptedError):
                return
            except OSError as error:
                # Most likely out of file descriptors: evict one and retry.
                log.warning("cannot accept a connection: %s", error.strerror)
                self._drop_one()
                self._loop.remove_reader(listener.sock)
                self._loop.call_later(NO_FILES_PAUSE_S, self._reopen, listener)
                return
            if len(self._silent) + len(self._proving) >= self._most:
                self._drop_one()
            sock.setblocking(False)
            self._silent[sock] = time.monotonic()
            self._loop.add_reader(sock, self._readable, sock, listener)

    def _reopen(self, listener: Listener) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener.sock, self._accept, listener)

    def _forget(self, sock: socket.socket) -> socket.socket:
        """Remove a socket from the silent ones."""
        del self._silent[sock]
        self._loop.remove_reader(sock)
        return sock

    def _drop_one(self) -> None:
        if self._silent:
            self._forget(next(iter(self._silent))).close()
        elif self._proving:
            self._proving.pop(next(iter(self._proving))).cancel()

    def _readable(self, sock: socket.socket, listener: Listener) -> None:
        """Start the handshake when the first bytes have arrived."""
        since = self._silent[sock]
        self._forget(sock)
        try:
            hung_up = not sock.recv(1, socket.MSG_PEEK)
            name = sock.getpeername()
        except OSError:
            hung_up = True
        if hung_up:
            sock.close()
            return
        link = listener.make(join_address(name[0], name[1]))
        self._unclaimed.add(sock)
        task = self._proving[link] = self._start(self._authenticate(sock, link, listener.context, since))
        task.add_done_callback(lambda _: self._finished(sock, link))

    async def _authenticate(
        self, sock: socket.socket, link: Candidate, context: ssl.SSLContext | None, since: float
    ) -> None:
        """Run the handshakes. The link is up afterwards, or over."""
        problem = "evicted: too many pending connections"
        self._unclaimed.discard(sock)  # from here on asyncio closes it
        left_s = since + self._within_s - time.monotonic()
        tls = self._tls if context is not None else {}
        try:
            async with asyncio.timeout(left_s):
                await self._loop.connect_accepted_socket(lambda: link, sock, ssl=context, **tls)
                await asyncio.wait([link.decided])
        except TimeoutError:
            problem = f"the handshake took longer than {self._within_s:g} s"
        except ssl.SSLError as error:
            problem = explain(error)
            self.note(link.address, problem)
        except OSError as error:
            problem = error.strerror or str(error) or "the peer closed the connection"
            if context is not None:
                self.note(link.address, f"{problem} in the TLS handshake: the peer may have no token, or another one")
        finally:
            if not link.linked:
                link.end(problem)

    def _finished(self, sock: socket.socket, link: Candidate) -> None:
        self._proving.pop(link, None)
        if sock in self._unclaimed:  # the task was cancelled before it started
            self._unclaimed.discard(sock)
            sock.close()
