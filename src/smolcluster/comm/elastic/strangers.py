"""Whoever has connected to a listening socket and has not proved itself yet.

    silent         said nothing so far, and costs a file descriptor and little else
    acquainting    has said something, and is in the middle of TLS and the handshake

Both have `handshake_s`, counted from the moment they connected, and compete for a limited number of places: when there is
none left the oldest has to go, the silent ones first. All of it happens on the transport's thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smolcluster.comm.elastic.connection import TcpLink
from smolcluster.comm.elastic.security import explain
from smolcluster.comm.elastic.sockets import join_address
from smolcluster.comm.elastic.transport import Handler

if TYPE_CHECKING:
    from smolcluster.comm.elastic.tcp import TcpTransport

log = logging.getLogger(__name__)

ACCEPT_AT_ONCE = 64  # then others have a turn
NO_FILES_PAUSE_S = 0.05
TELL_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Door:
    """A listening socket, and what those who come in by it are led to."""

    sock: socket.socket
    handler: Handler
    context: ssl.SSLContext | None


class Strangers:
    def __init__(self, owner: TcpTransport) -> None:
        self._owner = owner
        self._loop, self._limits = owner.loop, owner.limits
        self._doors: list[Door] = []
        self._silent: dict[socket.socket, float] = {}  # since when; oldest first
        self._acquainting: dict[TcpLink, asyncio.Task[None]] = {}  # oldest first
        self._unclaimed: set[socket.socket] = set()  # of tasks that have not begun
        self._noted, self._told_at = 0, -TELL_EVERY_S

    def listen(self, listeners: Sequence[socket.socket], handler: Handler, context: ssl.SSLContext | None) -> None:
        for sock in listeners:
            door = Door(sock, handler, context)
            self._doors.append(door)
            self._loop.add_reader(sock, self._accept, door)

    def close(self) -> None:
        """Nobody else comes in. Tasks are the transport's to end."""
        for door in self._doors:
            self._loop.remove_reader(door.sock)
            door.sock.close()
        self._doors.clear()
        for sock in list(self._silent):
            self._forget(sock).close()

    def note(self, address: str, problem: str) -> None:
        """Somebody sent what is no handshake. Told now and then only: there may be a million of them."""
        self._noted += 1
        now = time.monotonic()
        if now - self._told_at >= TELL_EVERY_S:
            log.warning("refused %s: %s (%d of this kind so far)", address, problem, self._noted)
            self._told_at = now

    def expire(self, now: float) -> None:
        """Close those who have been silent for too long; called every beat."""
        for sock, since in list(self._silent.items()):
            if now - since < self._limits.handshake_s:
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
            if len(self._silent) + len(self._acquainting) >= self._limits.unauthenticated:
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
        elif self._acquainting:
            self._acquainting.pop(next(iter(self._acquainting))).cancel()

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
        link = TcpLink(self._owner, door.handler, address=join_address(name[0], name[1]), dialing=False)
        self._unclaimed.add(sock)
        task = self._acquainting[link] = self._owner.start(self._meet(sock, link, door.context, since))
        task.add_done_callback(lambda _: self._met(sock, link))

    async def _meet(self, sock: socket.socket, link: TcpLink, context: ssl.SSLContext | None, since: float) -> None:
        """From a connected socket to a link, or to nothing."""
        problem = "it had to make room for others"
        self._unclaimed.discard(sock)  # from here on asyncio closes it
        left_s = since + self._limits.handshake_s - time.monotonic()
        tls: dict[str, Any] = self._owner.tls if context is not None else {}
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

    def _met(self, sock: socket.socket, link: TcpLink) -> None:
        self._acquainting.pop(link, None)
        if sock in self._unclaimed:  # the task was called off before it began
            self._unclaimed.discard(sock)
            sock.close()
