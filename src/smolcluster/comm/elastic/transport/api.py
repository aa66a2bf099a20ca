"""The interface of the elastic plane's transport: links that carry typed messages.

A `Transport` owns links and runs on a separate thread. It calls a `Handler`, whose methods run on that thread and must not
block. `Link.send` may be called from any thread.

    worker                                         server
      dial(address) ---- connect, handshake ---->  listen(address)
      Handler.linked(link)                         Handler.linked(link)
      link.send(message) ------ frame ---------->  Handler.place(link, head): the tensor to receive into
                                                   Handler.received(link, message)
      Handler.unlinked(link, reason)  <-- end -->  Handler.unlinked(link, reason)

`tcp.TcpTransport` implements it with asyncio, and TLS 1.3 when there is a token; `tools/memory_transport.py` inside one
process, for the fuzzer. torch is imported with the first payload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from smolcluster.comm.elastic.transport.messages import Head, Kind, Message, Peer
from smolcluster.comm.work import Traffic, Work

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LEFT", "Dialer", "Handler", "Head", "Kind", "Link", "Message", "Peer", "Transport"]

LEFT = "it has left"  # the reason in the BYE of a peer that closes its transport; the dashboard compares with it


class Link(ABC):
    """One authenticated connection."""

    peer: Peer
    traffic: Traffic  # bytes sent and received, headers included; with TLS, before encryption
    binding: bytes  # the same at both ends, unique to this connection
    open: bool  # `send` accepts messages
    stalled: bool = False  # the peer is silent, but may only be stopped or busy: the link is kept for a while

    @abstractmethod
    def send(self, message: Message, *, sent: Callable[[bool], None] | None = None) -> Work:
        """Queue a message and return at once. The work is done when the payload's memory may be reused.

        On a link that has ended the message is dropped and `wait` raises PeerLost; the handler received `unlinked`.

        `sent` is called once, on the transport's thread and never from within `send`, when the payload's memory may be
        reused: with True after the complete message was sent, with False if the link ended first (before `unlinked`).
        """

    @property
    @abstractmethod
    def queued_bytes(self) -> int:
        """Bytes accepted by `send` and not sent yet."""

    @property
    @abstractmethod
    def silent_s(self) -> float:
        """Seconds since the last byte from the peer."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """Send the reason to the peer and end the link. `unlinked` follows on both sides. Thread-safe."""


class Handler(Protocol):
    """Callbacks of a transport, on its thread, one call at a time."""

    def linked(self, link: Link) -> None:
        """Handle a new link: the handshake succeeded."""

    def place(self, link: Link, head: Head) -> Tensor | None:
        """Return the tensor to receive this payload into, of exactly its dtype and size.

        None, the default, ends the link; so does raising `frames.UnexpectedPayload`, with a reason.
        """
        return None

    def received(self, link: Link, message: Message) -> None: ...

    def unlinked(self, link: Link, reason: str) -> None:
        """Handle the end of a link: closed, broken or silent."""

    def refused(self, address: str, reason: str) -> None:
        """Handle a handshake that either side refused. A dialled address is not retried."""
        return


class Dialer(ABC):
    """Keeps one link to an address: connects, and reconnects after a loss, with backoff and jitter."""

    @abstractmethod
    def close(self) -> None:
        """Stop reconnecting; an open link stays open."""


class Transport(ABC):
    me: Peer

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """Total of all links, ended ones included."""

    @abstractmethod
    def listen(self, host: str, port: int, handler: Handler) -> str:
        """Start to accept peers. Port 0: any free one. Returns `host:port`. Raises UserError if it cannot listen there."""

    @abstractmethod
    def dial(self, address: str, handler: Handler) -> Dialer:
        """Connect to `host:port`; retries until the peer accepts or the dialer is closed."""

    @abstractmethod
    def call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Run `callback()` on the transport's thread. Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """Send BYE on every link and stop the thread."""
