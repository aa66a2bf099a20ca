"""A worker's link to its server, which reconnects and rejoins automatically.

    ASK  ->  PLAN                  once: the configuration of the run
    JOIN ->  WELCOME, STATE ...    after every (re)connect: admission, and the server's weights

After that the strategy exchanges its messages. `get` returns the server's messages in order; after a loss the next
one is a WELCOME. Leases arrive in the meta of any message and are collected in `leases`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from smolcluster.comm.addresses import local_address_towards
from smolcluster.comm.elastic.membership.mailbox import DialRefused, Linked, Mailbox, Received, Unlinked
from smolcluster.comm.elastic.membership.received_state import ReceivedState
from smolcluster.comm.elastic.transport.api import Link, Transport
from smolcluster.comm.elastic.transport.handshake import MAX_REASON
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.group import Done, PeerLost, Work
from smolcluster.errors import UserError

log = logging.getLogger(__name__)

BULK_QUEUED = 4  # messages of `send_bulk` that are queued at the link at a time


class Stopped(Exception):
    """This worker received a stop request while it waited."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The samples of one round, which ends with `step`, as ranges (start, count) of the stream."""

    step: int
    ranges: tuple[tuple[int, int], ...]
    steps: int = 1  # of the run, in this round
    own_steps: int | None = None  # of this worker, which share the samples; None: equal to `steps`
    most_s: float = math.inf  # limit on the round's duration; it ends with the steps that are done
    clip: tuple[float, float] | None = None  # a contribution whose norm exceeds the second is scaled to the first

    @property
    def local(self) -> int:
        """This worker's steps."""
        return self.own_steps or self.steps

    def number(self, taken: int) -> int:
        """Return the run's step after this many of this worker's: spread over the round; the last is the round's last."""
        first = self.step - self.steps + 1
        return self.step if taken >= self.local else first + (taken - 1) * (self.steps - 1) // (self.local - 1)

    @property
    def samples(self) -> int:
        return sum(count for _, count in self.ranges)

    @classmethod
    def from_meta(cls, value: Any) -> Lease:
        ranges = tuple((int(start), int(count)) for start, count in value["ranges"])
        if any(start < 0 or count < 0 for start, count in ranges):
            raise ValueError(f"invalid sample ranges {ranges}")
        step, steps = int(value["step"]), int(value.get("steps", 1))
        if not 1 <= steps <= max(1, step):
            raise ValueError(f"a round that ends with step {step} cannot have {steps} steps")
        lease = cls(step, ranges, steps)
        own, most_s, clip = value.get("own_steps"), value.get("most_s"), value.get("clip")
        if own is not None:
            if not 1 <= int(own) <= max(1, lease.samples) or (steps == 1 and own > 1):
                raise ValueError(f"{own} steps for {lease.samples} samples in {steps} steps of the run")
            lease = replace(lease, own_steps=int(own))
        if most_s is not None:
            lease = replace(lease, most_s=float(most_s))
        if clip is not None:
            median, bound = float(clip[0]), float(clip[1])
            if not 0 < median <= bound < math.inf:
                raise ValueError(f"a median norm of {median} and a bound of {bound}")
            lease = replace(lease, clip=(median, bound))
        return lease


class ServerLink:
    def __init__(
        self,
        transport: Transport,
        address: str,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.transport, self.address = transport, address
        self.leases: deque[Lease] = deque()
        self.join: Callable[[], dict[str, Any]] | None = None  # makes the meta of JOIN; None: ASK first
        self.losses = 0
        self._mailbox = mailbox = Mailbox()
        self.expect, self.allow = mailbox.expect, mailbox.allow
        self.at_once, self.release = mailbox.at_once, mailbox.release
        self._link: Link | None = None
        self._kept: Message | None = None  # to be returned by the next `get`
        self._stop_requested = stop_requested
        self._lock = threading.Lock()
        self._bulk: deque[tuple[Link, Message]] = deque()  # of `send_bulk`, not queued yet; guarded by the lock
        self._num_queued = 0  # of `send_bulk`, at their link; guarded by the lock
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
        """Queue a message. Without a connection it is dropped: the next WELCOME starts a new session."""
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

    def send_bulk(self, messages: Iterable[Message]) -> None:
        """Send a large transfer in order, a few messages at a time, so that `send` does not wait for all of it."""
        if (link := self._link) is not None:
            with self._lock:
                self._bulk += [(link, message) for message in messages]
            self._pump()

    def _pump(self, limit: float = BULK_QUEUED) -> None:
        with self._lock:  # held while sending: two threads must not swap messages
            while self._bulk and self._num_queued < limit:
                link, message = self._bulk.popleft()
                self._num_queued += 1
                link.send(message, sent=self._sent)  # dropped if the link has ended

    def _sent(self, _: bool) -> None:
        with self._lock:
            self._num_queued -= 1
        self._pump()

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def local_address(self) -> str:
        """The address of this machine on the route to the server, where other workers can reach it."""
        return local_address_towards(self.address)

    # Receiving

    def get(self, timeout_s: float | None = None) -> Message | None:
        """Return the server's next message, or None after `timeout_s`. Raises Stopped on a stop request."""
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

    def state(self, count: object) -> dict[str, Tensor] | None:
        """Receive the tensors that a WELCOME announced. None if the link was lost meanwhile: the next is a WELCOME."""
        if type(count) is not int or count < 0:
            raise PeerLost(f"the server at {self.address} sent a WELCOME without the number of tensors of its state")
        state = ReceivedState(count, limit_bytes=count * self._mailbox.allowed_bytes(Kind.STATE))
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
                    log.warning("lost the server at %s: %s; reconnecting", self.address, reason)
            case DialRefused(_, reason):
                raise UserError(f"the server at {self.address} refused this worker: {reason}")
            case Received(link, message) if link is self._link:
                return self._open(message)
            case _:
                pass  # from a link that has ended
        return None

    def _open(self, message: Message) -> Message | None:
        if message.kind is Kind.REFUSE:
            raise UserError(
                f"the server at {self.address} refused this worker: {message.meta.get('reason', 'no reason given')}"
            )
        if message.kind is Kind.WELCOME:
            self.leases.clear()
        try:
            self.leases += [Lease.from_meta(lease) for lease in message.meta.get("leases", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise PeerLost(f"the server at {self.address} sent an invalid lease: {error!r}"[:MAX_REASON]) from error
        return message

    def close(self) -> None:
        self._pump(limit=math.inf)
        self._dialer.close()
        self.transport.close()
