"""How typed messages move between processes of the elastic plane.

A `Transport` owns links. It works on a thread of its own, beside training; everything above it is notified through a
`Handler`, whose methods run on that thread and must not block. `Link.send` may be called from any thread.

    worker                                         server
      dial(address) ---- connect, handshake ---->  listen(address)
      Handler.linked(link)                         Handler.linked(link)
      link.send(message) ------ frame ---------->  Handler.place(link, head): the tensor to receive into
                                                   Handler.received(link, message)
      Handler.unlinked(link, reason)  <-- end -->  Handler.unlinked(link, reason)

`tcp.TcpTransport` implements it: asyncio, TLS 1.3 when there is a token. `tools/memory_transport.py` does so inside one
process, for tests. `frames.py` has the bytes. torch is imported with the first payload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from smolcluster.comm.elastic.transport.messages import Head, Kind, Message, Peer
from smolcluster.comm.work import Traffic, Work

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LEFT", "Dialer", "Handler", "Head", "Kind", "Link", "Message", "Peer", "Transport"]

LEFT = "it has left"  # the reason that a peer gives which closes its transport


class Link(ABC):
    """One authenticated connection."""

    peer: Peer
    traffic: Traffic  # bytes that crossed the socket, headers included; with TLS, before encryption
    binding: bytes  # both ends know it, and no other connection has the same
    open: bool  # `send` still accepts messages
    stalled: bool = False  # the peer is silent, but may only be stopped or busy: its link is kept for a while

    @abstractmethod
    def send(self, message: Message, *, sent: Callable[[bool], None] | None = None) -> Work:
        """Queue a message; returns at once. The work is done when the payload's memory may be changed again.

        On a link that has ended nothing happens, and `wait` raises PeerLost: the handler was notified by `unlinked`.

        `sent` is called once, on the transport's thread and never from within `send`, when nobody reads that memory any
        more: with True when all of the message has left, with False when the link ended first (before `unlinked`).
        """

    @property
    @abstractmethod
    def queued_bytes(self) -> int:
        """Bytes accepted by `send` that have not left yet: how far the peer is behind."""

    @property
    @abstractmethod
    def silent_s(self) -> float:
        """Seconds since the last byte from the peer."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """End the link; tells the peer why, if it still listens. `unlinked` follows on both sides. From any thread."""


class Handler(Protocol):
    """What a transport tells. Called on the transport's thread, one call at a time."""

    def linked(self, link: Link) -> None:
        """A peer is here, with handshake and versions in order."""

    def place(self, link: Link, head: Head) -> Tensor | None:
        """The tensor to receive this payload into, of exactly its dtype and size.

        None ends the link, and so does `frames.NotWanted`, which says why.
        """

    def received(self, link: Link, message: Message) -> None: ...

    def unlinked(self, link: Link, reason: str) -> None:
        """The link has ended: closed, broken, silent or refused."""

    def refused(self, address: str, reason: str) -> None:
        """A peer would not have us, or is not one we would have. A dialled address is not tried again."""


class Dialer(ABC):
    """Keeps one link to an address: connects, and connects again after a loss, with growing pauses and jitter."""

    @abstractmethod
    def close(self) -> None:
        """Stop trying; an open link stays open."""


class Transport(ABC):
    me: Peer

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """Of all links there are and were."""

    @abstractmethod
    def listen(self, host: str, port: int, handler: Handler) -> str:
        """Accept peers from now on. Port 0: any. Returns `host:port`. Raises UserError when it cannot be had."""

    @abstractmethod
    def dial(self, address: str, handler: Handler) -> Dialer:
        """Connect to `host:port`; retries until it is there or the dialer is closed."""

    @abstractmethod
    def call_later(self, delay_s: float, callback: Any) -> Any:
        """Run `callback()` on the transport's thread. Returns something with `cancel()`. From any thread."""

    @abstractmethod
    def close(self) -> None:
        """End every link with a BYE and stop the thread."""
