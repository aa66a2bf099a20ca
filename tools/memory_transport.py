"""A transport inside one process, without threads or a clock, for the fuzzer: the same interface as TCP.

network = Switchboard()
server, worker = network.transport(peer_a), network.transport(peer_b)
network.advance(0.05)  # do what is due, in the caller's thread, and move the time on
"""

from __future__ import annotations

import heapq
import itertools
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from smolcluster.comm.elastic.transport import frames
from smolcluster.comm.elastic.transport.api import LEFT, Dialer, Handler, Head, Kind, Link, Message, Peer, Transport
from smolcluster.comm.elastic.transport.parser import checked_place
from smolcluster.comm.elastic.transport.payloads import memory
from smolcluster.comm.group import Done, PeerLost, Traffic, Work
from smolcluster.errors import UserError

REDIAL_S = 0.02


def _nothing(_sent: bool) -> None:
    return None


class _Lost:
    done = True

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def wait(self) -> None:
        raise PeerLost(self._reason)


class Switchboard:
    """The network between the transports it makes, with a clock of its own."""

    def __init__(self) -> None:
        self.listeners: dict[str, tuple[MemoryTransport, Handler]] = {}
        self.ports = itertools.count(40_000)
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._now_s = 0.0

    def transport(self, me: Peer) -> MemoryTransport:
        return MemoryTransport(self, me)

    def at(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Call this after a delay. From any thread."""
        heapq.heappush(self._due, (self._now_s + delay_s, next(self._numbers), callback))

    def advance(self, seconds: float = 0.0) -> None:
        """Do everything that is due until so many seconds from now."""
        until = self._now_s + seconds
        while self._due and self._due[0][0] <= until:
            due, _, callback = heapq.heappop(self._due)
            self._now_s = max(self._now_s, due)
            callback()
        self._now_s = until


class MemoryLink(Link):
    """One end; `twin` is the other."""

    twin: MemoryLink

    def __init__(self, owner: MemoryTransport, handler: Handler, peer: Peer) -> None:
        self.owner, self.peer, self.traffic = owner, peer, Traffic()
        self._handler, self._network = handler, owner.network
        self._held: deque[tuple[Message, int, Callable[[bool], None]]] = deque()  # sent, not yet received
        self._queued_bytes = 0
        self.open = True
        self._reason = ""
        owner.links.append(self)

    def send(self, message: Message, *, sent: Callable[[bool], None] | None = None) -> Work:
        # What the wire would do to it: JSON there and back, the payload as it is now.
        frame = frames.encode(message)
        meta = frames.decode_meta(frames.encode_meta(message.meta))
        payload = None if message.payload is None else message.payload.detach().clone()
        copy = replace(message, meta=meta, payload=payload)
        network = self._network
        if not self.open:
            if sent is not None:
                network.at(0, partial(sent, False))
            return _Lost(f"{self.peer.name}: {self._reason}")
        self._held.append((copy, frame.nbytes, sent or _nothing))
        self._queued_bytes += frame.nbytes
        network.at(0, self._deliver)
        return Done()

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    @property
    def silent_s(self) -> float:
        return 0.0

    def close(self, reason: str) -> None:
        if not self.open:
            return
        self.open, self._reason = False, reason
        self._held.append((Message(kind=Kind.BYE, meta={"reason": reason}), frames.HEADER.size, _nothing))
        self._network.at(0, self._deliver)

    def flush(self) -> None:
        for _ in range(len(self._held)):
            self._deliver()

    def _deliver(self) -> None:
        """Bring the oldest message to the other end."""
        twin = self.twin
        if not self._held:
            return
        message, nbytes, sent = self._held.popleft()
        self._queued_bytes = max(0, self._queued_bytes - nbytes)
        self.traffic.bytes_sent += nbytes
        self.owner.moved.add(nbytes, 0)
        sent(True)
        if message.kind is Kind.BYE:
            self.end(message.meta["reason"])
        elif twin.open:
            twin.traffic.bytes_received += nbytes
            twin.owner.moved.add(0, nbytes)
            twin._receive(message)

    def _receive(self, message: Message) -> None:
        if message.payload is not None:
            try:
                message.payload = self._copy_to_its_place(message, message.payload)
            except frames.UnexpectedPayload as error:
                self.end_alone(str(error))
                self.twin.end_alone(f"invalid frame: {error}")
                return
        self._handler.received(self, message)

    def _copy_to_its_place(self, message: Message, payload: Tensor) -> Tensor:
        dtype = str(payload.dtype).removeprefix("torch.")
        head = Head.of(message, dtype=dtype, shape=tuple(payload.shape), nbytes=payload.nbytes)
        place = checked_place(self._handler.place(self, head), head)
        memory(place)[:] = memory(payload)
        return place

    def end(self, reason: str) -> None:
        self.end_alone(reason)
        self.twin.end_alone(reason)

    def end_alone(self, reason: str) -> None:
        if self not in self.owner.links:
            return
        self.owner.links.remove(self)
        self.open, self._reason = False, reason
        lost, self._queued_bytes = list(self._held), 0
        self._held.clear()
        for _, _, sent in lost:
            sent(False)
        self._handler.unlinked(self, reason)


class MemoryDialer(Dialer):
    def __init__(self, owner: MemoryTransport, address: str, handler: Handler) -> None:
        self._owner, self._address, self._handler = owner, address, handler
        self._link: MemoryLink | None = None
        self._closed = False
        owner.network.at(0, self._try)

    def close(self) -> None:
        self._closed = True

    def _try(self) -> None:
        me, network = self._owner, self._owner.network
        if self._closed or me.closed:
            return
        there = network.listeners.get(self._address)
        lost = self._link is None or self._link not in me.links
        if lost and there is not None:
            other, handler = there
            if me.me.run and other.me.run and me.me.run != other.me.run:
                reason = f"{me.me.name} belongs to run {me.me.run}, {other.me.name} to run {other.me.run}"
                handler.refused(me.me.name, reason)
                self._handler.refused(self._address, reason)
                return
            self._link = MemoryLink(me, self._handler, other.me)
            twin = MemoryLink(other, handler, me.me)
            self._link.twin, twin.twin = twin, self._link
            self._link.binding = twin.binding = secrets.token_bytes(32)
            handler.linked(twin)
            self._handler.linked(self._link)
        network.at(REDIAL_S, self._try)


class MemoryTransport(Transport):
    def __init__(self, network: Switchboard, me: Peer) -> None:
        self.network, self.me = network, me
        self.links: list[MemoryLink] = []
        self.moved = Traffic()
        self.closed = False
        self._dialers: list[MemoryDialer] = []

    @property
    def traffic(self) -> Traffic:
        return self.moved

    def listen(self, host: str, port: int, handler: Handler) -> str:
        address = f"{host}:{port or next(self.network.ports)}"
        if address in self.network.listeners:
            raise UserError(f"cannot listen on {address}: somebody does already; choose another port, or 0 for any")
        self.network.listeners[address] = (self, handler)
        return address

    def dial(self, address: str, handler: Handler) -> MemoryDialer:
        dialer = MemoryDialer(self, address, handler)
        self._dialers.append(dialer)
        return dialer

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        self.network.at(delay_s, lambda: None if self.closed else callback())

    def close(self) -> None:
        for dialer in self._dialers:
            dialer.close()
        for address, (owner, _) in list(self.network.listeners.items()):
            if owner is self:
                del self.network.listeners[address]
        for link in list(self.links):
            link.flush()
            link.end(LEFT)
        self.closed = True
