"""Connections to a listening socket that have not proved themselves yet. Nothing here imports torch.

    silent         sent nothing so far, and costs a file descriptor and little else
    proving        has sent something, and is in the middle of TLS and the handshake

Both have `within_s`, counted from the moment they connected, and compete for a limited number of places: when there is
none left the oldest is dropped, the silent ones first. All of it happens on the thread of the event loop.
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

from smolcluster.comm.elastic.transport.security import explain
from smolcluster.comm.elastic.transport.sockets import join_address

log = logging.getLogger(__name__)

ACCEPT_AT_ONCE = 64  # then others have a turn
NO_FILES_PAUSE_S = 0.05
WARN_EVERY_S = 10.0


class Candidate(asyncio.BaseProtocol, ABC):
    """The protocol of a connection that is to prove itself."""

    address: str
    linked: bool  # it has
    decided: asyncio.Future[None]  # linked, or over

    @abstractmethod
    def end(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Door:
    """A listening socket, and what makes the protocol of a connection to it from the peer's address."""

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
        within_s: float,
        tls: dict[str, Any],
    ) -> None:
        """`start` makes a task, which is its owner's to end. `tls`: asyncio's options beside the context."""
        self._loop, self._start = loop, start
        self._most, self._within_s, self._tls = most, within_s, tls
        self._doors: list[Door] = []
        self._silent: dict[socket.socket, float] = {}  # since when; oldest first
        self._proving: dict[Candidate, asyncio.Task[None]] = {}  # oldest first
        self._unclaimed: set[socket.socket] = set()  # of tasks that have not begun
        self._noted, self._told_at = 0, -WARN_EVERY_S

    def listen(
        self, listeners: Sequence[socket.socket], make: Callable[[str], Candidate], context: ssl.SSLContext | None
    ) -> None:
        for sock in listeners:
            door = Door(sock, make, context)
            self._doors.append(door)
            self._loop.add_reader(sock, self._accept, door)

    def close(self) -> None:
        """Accept no more. Tasks are the owner's to end."""
        for door in self._doors:
            self._loop.remove_reader(door.sock)
            door.sock.close()
        self._doors.clear()
        for sock in list(self._silent):
            self._forget(sock).close()

    def note(self, address: str, problem: str) -> None:
        """Count a peer that sent no handshake, and warn now and then only: there may be a million of them."""
        self._noted += 1
        now = time.monotonic()
        if now - self._told_at >= WARN_EVERY_S:
            log.warning("refused %s: %s (%d of this kind so far)", address, problem, self._noted)
            self._told_at = now

    def expire(self, now: float) -> None:
        """Close those that have been silent for too long; called every beat."""
        for sock, since in list(self._silent.items()):
            if now - since < self._within_s:
                break
            self._forget(sock).close()

    def _accept(self, door: Door) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                sock, _ = door.sock.accept()
            except (BlockingIOError, ConnectionError, InterruptedError):
                return
            except OSError as error:
                # Out of file descriptors, most likely: make room and go on.
                log.warning("cannot accept a connection: %s", error.strerror)
                self._drop_one()
                self._loop.remove_reader(door.sock)
                self._loop.call_later(NO_FILES_PAUSE_S, self._reopen, door)
                return
            if len(self._silent) + len(self._proving) >= self._most:
                self._drop_one()
            sock.setblocking(False)
            self._silent[sock] = time.monotonic()
            self._loop.add_reader(sock, self._heard, sock, door)

    def _reopen(self, door: Door) -> None:
        if door in self._doors:
            self._loop.add_reader(door.sock, self._accept, door)

    def _forget(self, sock: socket.socket) -> socket.socket:
        """It is not a silent one any more."""
        del self._silent[sock]
        self._loop.remove_reader(sock)
        return sock

    def _drop_one(self) -> None:
        if self._silent:
            self._forget(next(iter(self._silent))).close()
        elif self._proving:
            self._proving.pop(next(iter(self._proving))).cancel()

    def _heard(self, sock: socket.socket, door: Door) -> None:
        """The first bytes are there, or the end."""
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
        link = door.make(join_address(name[0], name[1]))
        self._unclaimed.add(sock)
        task = self._proving[link] = self._start(self._meet(sock, link, door.context, since))
        task.add_done_callback(lambda _: self._met(sock, link))

    async def _meet(self, sock: socket.socket, link: Candidate, context: ssl.SSLContext | None, since: float) -> None:
        """From a connected socket to a link, or to nothing."""
        problem = "it had to make room for others"
        self._unclaimed.discard(sock)  # from here on asyncio closes it
        left_s = since + self._within_s - time.monotonic()
        tls = self._tls if context is not None else {}
        try:
            async with asyncio.timeout(left_s):
                await self._loop.connect_accepted_socket(lambda: link, sock, ssl=context, **tls)
                await asyncio.wait([link.decided])
        except TimeoutError:
            problem = "the handshake took too long"
        except ssl.SSLError as error:
            problem = explain(error)
            self.note(link.address, problem)
        except OSError as error:
            problem = error.strerror or str(error) or "hung up"
            if context is not None:
                self.note(link.address, f"{problem} in the TLS handshake: it may have another token, or none")
        finally:
            if not link.linked:
                link.end(problem)

    def _met(self, sock: socket.socket, link: Candidate) -> None:
        self._proving.pop(link, None)
        if sock in self._unclaimed:  # the task was called off before it began
            self._unclaimed.discard(sock)
            sock.close()
