"""A transport inside one process, for tests: the same interface as TCP.

    network = Switchboard()
    server, worker = network.transport(peer_a), network.transport(peer_b)
    network.kill(worker)  # as by SIGKILL: it hears and says nothing more, its links end

Everything happens on the switchboard's thread, one thing after the other. With `manual=True` there is no thread and no clock:
`advance` does what is due, in the caller's thread, and moves the time on.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import threading
import time
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
    """The network between the transports it makes."""

    def __init__(self, *, manual: bool = False) -> None:
        self.listeners: dict[str, tuple[MemoryTransport, Handler]] = {}
        self.ports = itertools.count(40_000)
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._time_s = 0.0
        self._closed = False
        self._thread = None if manual else threading.Thread(target=self._work, name="switchboard", daemon=True)
        if self._thread is not None:
            self._thread.start()

    def transport(self, me: Peer) -> MemoryTransport:
        return MemoryTransport(self, me)

    def kill(self, transport: MemoryTransport) -> None:
        transport.dead = True
        self.at(0, lambda: transport.hang_up("the connection was closed"))

    # For transports and links

    @property
    def now(self) -> float:
        return self._time_s if self._thread is None else time.monotonic()

    def at(self, delay_s: float, callback: Callable[[], object]) -> None:
        with self._changed:
            heapq.heappush(self._due, (self.now + delay_s, next(self._numbers), callback))
            self._changed.notify_all()

    # Time

    def advance(self, seconds: float = 0.0) -> None:
        """With `manual`: do everything that is due until so many seconds from now."""
        assert self._thread is None, "the switchboard has a thread for this"
        until = self._time_s + seconds
        while self._due and self._due[0][0] <= until:
            due, _, callback = heapq.heappop(self._due)
            self._time_s = max(self._time_s, due)
            callback()
        self._time_s = until

    def on_thread(self) -> bool:
        """Whether the caller may act at once: it is the switchboard's thread, or there is none."""
        return self._thread is None or not self._thread.is_alive() or threading.get_ident() == self._thread.ident

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and not self.on_thread():
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > self.now):
                    self._changed.wait(self._due[0][0] - self.now if self._due else None)
                if self._closed:
                    return
                callback = heapq.heappop(self._due)[2]
            callback()


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
        with network.lock:
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
        with self._network.lock:
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
        if not self._held or self.owner.dead:
            return
        message, nbytes, sent = self._held.popleft()
        with self._network.lock:
            self._queued_bytes = max(0, self._queued_bytes - nbytes)
        self.traffic.bytes_sent += nbytes
        self.owner.moved.add(nbytes, 0)
        sent(True)
        if message.kind is Kind.BYE:
            self.end(message.meta["reason"])
        elif twin.open and not twin.owner.dead:
            twin.traffic.bytes_received += nbytes
            twin.owner.moved.add(0, nbytes)
            twin._receive(message)

    def _receive(self, message: Message) -> None:
        if message.payload is not None:
            try:
                message.payload = self._copy_to_its_place(message, message.payload)
            except frames.NotWanted as error:
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
        with self._network.lock:
            if self not in self.owner.links:
                return
            self.owner.links.remove(self)
            self.open, self._reason = False, reason
            lost, self._queued_bytes = list(self._held), 0
            self._held.clear()
        if self.owner.dead:
            return
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
        if self._closed or me.dead:
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
        self.dead = False
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
        self.network.at(delay_s, lambda: None if self.dead else callback())

    def close(self) -> None:
        if self.network.on_thread():
            self.hang_up(LEFT)
            return
        done = threading.Event()
        self.network.at(0, lambda: self.hang_up(LEFT))
        self.network.at(0, done.set)
        done.wait()

    def hang_up(self, reason: str) -> None:
        for dialer in self._dialers:
            dialer.close()
        for address, (owner, _) in list(self.network.listeners.items()):
            if owner is self:
                del self.network.listeners[address]
        for link in list(self.links):
            if not self.dead:
                link.flush()
            link.end(reason)
        self.dead = True
