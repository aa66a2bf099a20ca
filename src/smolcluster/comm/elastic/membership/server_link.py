"""A worker's line to its server: it comes back by itself after a loss.

    ASK  ->  PLAN      once: what is trained here
    JOIN ->  WELCOME, STATE ...    after every (re)connect: take part, from the server's weights

Between them the strategy sends and receives what it likes. `get` gives the server's messages in order; after a loss the
next one is a WELCOME, since the line has joined again. Leases travel in the meta of any message and gather here.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from smolcluster.comm.elastic.membership.mailbox import DialRefused, Linked, Mailbox, Received, Unlinked
from smolcluster.comm.elastic.membership.server_state import ServerState
from smolcluster.comm.elastic.transport.api import Link, Transport
from smolcluster.comm.elastic.transport.handshake import MAX_REASON
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.elastic.transport.sockets import own_host
from smolcluster.comm.group import Done, PeerLost, Work
from smolcluster.errors import UserError

log = logging.getLogger(__name__)

BESIDE = 4  # messages of a large transfer that a link has at a time


class Stopped(Exception):
    """This worker was asked to leave while it waited."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Samples to read for one round, which ends with `step`: parts of the stream."""

    step: int
    ranges: tuple[tuple[int, int], ...]
    steps: int = 1  # of the round, which share the samples

    @property
    def samples(self) -> int:
        return sum(count for _, count in self.ranges)

    @classmethod
    def from_meta(cls, value: Any) -> Lease:
        ranges = tuple((int(start), int(count)) for start, count in value["ranges"])
        if any(start < 0 or count < 0 for start, count in ranges):
            raise ValueError(f"no samples can be {ranges}")
        step, steps = int(value["step"]), int(value.get("steps", 1))
        if not 1 <= steps <= max(1, step):
            raise ValueError(f"a round that ends with step {step} cannot have {steps} steps")
        return cls(step, ranges, steps)


class Line:
    def __init__(
        self,
        transport: Transport,
        address: str,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.transport, self.address = transport, address
        self.leases: deque[Lease] = deque()
        self.join: Callable[[], dict[str, Any]] | None = None  # what to say in JOIN, once there is something to say
        self.losses = 0
        self._mailbox = mailbox = Mailbox()
        self.expect, self.allow = mailbox.expect, mailbox.allow
        self.at_once, self.release = mailbox.at_once, mailbox.release
        self._link: Link | None = None
        self._kept: Message | None = None  # read, and not yet answered for
        self._stop_requested = stop_requested
        self._lock = threading.Lock()
        self._beside: deque[tuple[Link, Message]] = deque()  # wait for those before them to leave; guarded by the lock
        self._leaving = 0  # of them, that their link has; guarded by the lock
        self._dialer = transport.dial(address, mailbox)

    # Sending

    def send(
        self,
        kind: Kind,
        *,
        step: int = 0,
        channel: int = 0,
        epoch: int = 0,
        codec: str = "fp32",
        meta: Mapping[str, Any] | None = None,
        payload: Tensor | None = None,
    ) -> Work:
        """Queue a message. While the server is away it is dropped: a WELCOME will come and start anew."""
        if self._link is None:
            return Done()
        return self._link.send(
            Message(
                kind=kind,
                step=step,
                channel=channel,
                epoch=epoch,
                codec=codec,
                meta=dict(meta or {}),
                payload=payload,
            )
        )

    def send_beside(self, messages: Iterable[Message]) -> None:
        """Send these in order, a few at a time: what `send` is given meanwhile does not wait for all of them."""
        if (link := self._link) is not None:
            with self._lock:
                self._beside += [(link, message) for message in messages]
            self._pump()

    def _pump(self, most: float = BESIDE) -> None:
        with self._lock:  # also while they are sent: another thread would send the next one first
            while self._beside and self._leaving < most:
                link, message = self._beside.popleft()
                self._leaving += 1
                link.send(message, sent=self._left)  # on a link that has ended it is dropped

    def _left(self, _: bool) -> None:
        """On the transport's thread."""
        with self._lock:
            self._leaving -= 1
        self._pump()

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def own_host(self) -> str:
        """The address of this machine on its way to the server: there other workers reach it, too."""
        return own_host(self.address)

    # Receiving

    def get(self, timeout_s: float | None = None) -> Message | None:
        """The server's next message; None after `timeout_s`. Raises Stopped when this worker was asked to leave."""
        if self._kept is not None:
            message, self._kept = self._kept, None
            return message
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if timeout_s != 0 and self._stop_requested():
                raise Stopped
            left = 0.1 if deadline is None else min(0.1, max(0.0, deadline - time.monotonic()))
            event = self._mailbox.get(left)
            if event is None:
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                continue
            opened = self._handle(event)
            if opened is not None:
                return opened

    def state(self, count: int) -> dict[str, Tensor] | None:
        """The tensors that a WELCOME announced; None when the line was lost on the way: the next is a WELCOME."""
        state = ServerState(count, most_bytes=self._mailbox.most_of(Kind.STATE))
        while not state.complete:
            message = self.get()
            assert message is not None
            if message.kind is Kind.WELCOME:
                self._kept = message
                return None
            try:
                state.take(message)
            except ValueError as error:
                raise PeerLost(f"the server at {self.address} sent {error}"[:MAX_REASON]) from error
        return state.tensors

    def _handle(self, event: object) -> Message | None:
        match event:
            case Linked(link):
                self._link = link
                if self.join is not None:
                    link.send(Message(kind=Kind.JOIN, meta=self.join()))
                else:
                    link.send(Message(kind=Kind.ASK))
            case Unlinked(link, reason):
                if link is self._link:
                    self.losses += 1
                    self._link = None
                    log.warning("lost the server at %s: %s; trying again", self.address, reason)
            case DialRefused(_, reason):
                raise UserError(f"the server at {self.address} refuses this worker: {reason}")
            case Received(link, message) if link is self._link:
                return self._open(message)
            case _:
                pass  # from a link that has ended
        return None

    def _open(self, message: Message) -> Message | None:
        if message.kind is Kind.REFUSE:
            raise UserError(
                f"the server at {self.address} refuses this worker: {message.meta.get('reason', 'no reason')}"
            )
        if message.kind is Kind.WELCOME:
            self.leases.clear()
        try:
            self.leases += [Lease.from_meta(lease) for lease in message.meta.get("leases", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise PeerLost(
                f"the server at {self.address} sent a lease that cannot be read: {error!r}"[:MAX_REASON]
            ) from error
        return message

    def close(self) -> None:
        self._pump(most=math.inf)
        self._dialer.close()
        self.transport.close()
