"""The links between workers, and the groups made of them.

Every pair of members has one link: of two members the one that stands earlier in the view dials the other. Links outlive
views; `form` closes those of members that are gone, dials those that are missing, and makes the group of the view.

    CHUNK of this view's epoch    to the view's operations
    CHUNK of an older epoch       received, dropped and counted: its sender has not heard of this view yet
    CHUNK of a newer epoch        kept, as far as there is room, until `form` is called for that view
    STATE                         weights and optimizer state from one member to another: a list of what comes (meta: tensors,
                                  a name, type and shape each, and the sender's own words), then the tensors in that order
    anything else                 ends the link

A lost link raises nothing by itself. `on_lost` tells which member cannot be reached; the coordinator decides what follows.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.elastic.frames import DTYPES
from smolcluster.comm.elastic.group import ElasticGroup, Exchange, Landing, keep, key_of
from smolcluster.comm.elastic.schedule import MOST_PIECE_BYTES
from smolcluster.comm.elastic.transport import Dialer, Head, Kind, Link, Message, Transport
from smolcluster.comm.elastic.view import Member, View, ViewChanged
from smolcluster.comm.group import PeerLost, Work

log = logging.getLogger(__name__)

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

WINDOW_BYTES = 2 * MOST_PIECE_BYTES  # what a link may have queued: keeps it busy, and little is in vain after a loss
FIRST_POLL_S, LONGEST_POLL_S = 0.001, 0.002  # how soon to look again whether a link has room
SMALL_BYTES = 16 << 10  # a payload up to here is copied: then its memory is free at once
KEPT_OVERHEAD_BYTES = 512  # of every piece that is kept, however small
SETTLE_S = 5.0  # for a piece that is half-way in when the view changes
STATE_ORDER = 1 << 62  # after every operation


class Peers:
    """A transport's handler for links between workers. Made once; `form` for every view."""

    def __init__(
        self, transport: Transport, *, limit_bytes: int = 256 << 20, timeout_s: float = 60.0, connect_s: float = 5.0
    ) -> None:
        """`limit_bytes`: for pieces that come before they are wanted. A rank that is ahead sends 1/n of each tensor it
        sums, so with the gradients of all steps in flight of G bytes, G/n is enough. Beyond it the link is closed.

        `timeout_s`: after so long without a piece moving, `wait` gives up. `connect_s`: after so long without a link, a
        member is reported to `on_lost`.
        """
        self.dropped_chunks = 0  # of older views
        self._transport = transport
        self._timeout_s, self._connect_s, self._limit_bytes = timeout_s, connect_s, limit_bytes
        self._wires = _Wires(transport, limit_bytes=limit_bytes)
        self._on_lost: Callable[[Member, str], None] | None = None
        self._exchange: Exchange | None = None
        self._index: dict[str, int] = {}  # instance -> place in the view
        self._dialers: dict[str, Dialer] = {}  # by instance
        self._landings: dict[Link, Landing] = {}
        self._ahead: dict[int, list[tuple[Link, Head, Tensor]]] = {}  # chunks by epoch
        self._settling: tuple[set[Link], threading.Event] | None = None
        self._expected: Layout | None = None
        self._incoming: dict[Link, _State] = {}
        self._states: queue.SimpleQueue[_State | PeerLost] = queue.SimpleQueue()

    def listen(self, host: str, port: int) -> str:
        """Accept other workers. Returns `host:port`."""
        return self._transport.listen(host, port, self)

    def on_lost(self, callback: Callable[[Member, str], None]) -> None:
        """`callback(member, reason)` when a member of the view cannot be reached. On the transport's thread: not to block."""
        self._on_lost = callback

    def form(self, view: View) -> ElasticGroup:
        """The group of this view; the one before it is aborted. Does not wait for links: operations do.

        Not on the transport's thread: it waits for the pieces that are half-way into the memory of the view before.
        """
        rank = view.index(self._transport.me.instance)
        if rank is None:
            raise ValueError(f"this worker is not in view {view.epoch}")
        if self._exchange is not None:
            if view.epoch <= self._exchange.view.epoch:
                raise ValueError(f"view {view.epoch} comes after view {self._exchange.view.epoch}")
            self._exchange.abort(ViewChanged(f"the members have changed: view {view.epoch} has {len(view.members)}"))
        exchange, settled = Exchange(self._wires, view, timeout_s=self._timeout_s), threading.Event()
        self._wires.soon(lambda: self._switch(exchange, settled))
        if not settled.wait(SETTLE_S):
            self._wires.soon(self._cut_off)
            if not settled.wait(SETTLE_S):
                raise PeerLost(f"view {view.epoch} could not be formed: the transport does not answer")
        return ElasticGroup(exchange, rank=rank, ranks=range(len(view.members)))

    def close(self) -> None:
        """Abort the group and stop dialling. The transport ends the links."""
        if self._exchange is not None:
            self._exchange.abort(PeerLost("this worker is leaving"))
        self._wires.soon(self._hang_up_all)

    # State

    def send_state(self, member: Member, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Work:
        """Weights and optimizer state for a member; it is dialled if there is no link. Operations go before it.

        The tensors must not change until the work is done.
        """
        rows = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        listed = [[name, _dtype_name(row.dtype), list(row.shape)] for name, row in rows.items()]
        messages = [Message(kind=Kind.STATE, meta={"tensors": listed, "meta": dict(meta)})]
        messages += [Message(kind=Kind.STATE, channel=i, payload=row) for i, row in enumerate(rows.values())]
        transfer = _Transfer(member, len(messages), timeout_s=self._timeout_s)

        def start() -> None:
            self._dial(member)
            for message in messages:
                self._wires.send(member, message, order=STATE_ORDER, left=transfer.left, lost=transfer.lost)

        self._wires.soon(start)
        return transfer

    def expect_state(self, layout: Layout) -> None:
        """Only a state of exactly these tensors is accepted from now on. Without it, any of at most `limit_bytes`."""
        self._expected = dict(layout)

    def receive_state(self, timeout_s: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The next state that is complete: its meta and tensors. Raises PeerLost when it broke off, or none came in time."""
        try:
            state = self._states.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerLost(f"no member has sent its state within {timeout_s:g} s") from None
        if isinstance(state, PeerLost):
            raise state
        return state.meta, dict(zip(state.layout, state.tensors, strict=True))

    # The transport's handler

    def linked(self, link: Link) -> None:
        self._wires.add(link)

    def place(self, link: Link, head: Head) -> Tensor | None:
        landing = None
        if head.kind is Kind.CHUNK:
            landing = self._place_chunk(link, head)
        elif head.kind is Kind.STATE and link in self._incoming:
            landing = self._incoming[link].place(head)
        if landing is None:
            log.warning("refused %s of step %d from %s", head.kind.name, head.step, link.peer.name)
            return None
        self._landings[link] = landing
        return landing.tensor

    def received(self, link: Link, message: Message) -> None:
        landing = self._landings.pop(link, None)
        if landing is not None:
            landing.arrived()
            self._settle(link)
        elif message.kind is Kind.STATE:
            self._announced(link, message.meta)
        else:
            link.close(f"{message.kind.name} is not spoken between workers")
        self._wires.pump()
        state = self._incoming.get(link)
        if state is not None and state.complete:
            del self._incoming[link]
            self._states.put(state)

    def unlinked(self, link: Link, reason: str) -> None:
        self._wires.remove(link)
        landing = self._landings.pop(link, None)
        if landing is not None:
            landing.lost()
            self._settle(link)
        if self._incoming.pop(link, None) is not None:
            self._states.put(PeerLost(f"{link.peer.name} was lost while it sent its state: {reason}"))
        exchange, index = self._exchange, self._index.get(link.peer.instance)
        if exchange is not None and index is not None and not self._wires.linked_to(exchange.view.members[index]):
            self._lost(exchange.view.members[index], reason)

    def refused(self, address: str, reason: str) -> None:
        members = self._exchange.view.members if self._exchange is not None else ()
        for member in members:
            if member.address == address:
                self._hang_up(member.instance)  # the next view may try again
                self._lost(member, reason)

    # Chunks

    def _place_chunk(self, link: Link, head: Head) -> Landing | None:
        exchange = self._exchange
        current = -1 if exchange is None else exchange.view.epoch
        if head.epoch == current:
            assert exchange is not None
            source = self._index.get(link.peer.instance)
            return None if source is None else exchange.place(link, source, head)
        if key_of(head, 0) is None:
            return None
        if head.epoch < current:
            self.dropped_chunks += 1
            return Landing(self._wires.sink(head))
        return keep(self._wires, head, lambda tensor: self._keep(link, head, tensor))

    def _keep(self, link: Link, head: Head, tensor: Tensor) -> None:
        """The view of this chunk had not been formed when it began to come; perhaps it has been since."""
        exchange = self._exchange
        current = -1 if exchange is None else exchange.view.epoch
        if head.epoch > current:
            self._ahead.setdefault(head.epoch, []).append((link, head, tensor))
        else:
            self._adopt(link, head, tensor)

    def _adopt(self, link: Link, head: Head, tensor: Tensor) -> None:
        exchange, source = self._exchange, self._index.get(link.peer.instance)
        assert exchange is not None
        if head.epoch < exchange.view.epoch:
            self.dropped_chunks += 1
            self._wires.release(tensor.nbytes)
        elif source is None:
            self._wires.release(tensor.nbytes)
            link.close(f"not a member of view {head.epoch}")
        else:
            exchange.adopt(link, source, head, tensor)

    # Views

    def _switch(self, exchange: Exchange, settled: threading.Event) -> None:
        """To the next view, on the transport's thread."""
        before, view = self._exchange, exchange.view
        self._exchange = exchange
        self._index = {member.instance: i for i, member in enumerate(view.members)}

        # Links: those of former members end, those still missing are dialled.
        for member in before.view.members if before is not None else ():
            if member.instance not in self._index:
                self._hang_up(member.instance)
                self._wires.close(member.instance, f"{member.name} is not in view {view.epoch}")
        own = self._index[self._transport.me.instance]
        for member in view.members[own + 1 :]:
            self._dial(member)
        self._transport.call_later(self._connect_s, lambda: self._check_links(exchange))

        # Chunks that were ahead of us.
        for epoch in sorted(epoch for epoch in self._ahead if epoch <= view.epoch):
            for chunk in self._ahead.pop(epoch):
                self._adopt(*chunk)

        # The memory of the view before is its owner's again when nothing is being received into it.
        busy = {link for link, landing in self._landings.items() if landing.callers_memory}
        self._settling = (busy, settled)
        self._settle(None)

    def _settle(self, link: Link | None) -> None:
        if self._settling is None:
            return
        busy, settled = self._settling
        if link is not None:
            busy.discard(link)
        if not busy:
            self._settling = None
            settled.set()

    def _cut_off(self) -> None:
        """Links whose peer stopped in the middle of a piece."""
        for link in list(self._settling[0]) if self._settling is not None else ():
            link.close(f"a piece of the view before did not come to its end within {SETTLE_S:g} s")

    def _dial(self, member: Member) -> None:
        """Unless there is a link, or one is being made."""
        if member.instance not in self._dialers and not self._wires.linked_to(member):
            self._dialers[member.instance] = self._transport.dial(member.address, _Dialled(self, member))

    def _hang_up_all(self) -> None:
        for instance in list(self._dialers):
            self._hang_up(instance)

    def _hang_up(self, instance: str) -> None:
        dialer = self._dialers.pop(instance, None)
        if dialer is not None:
            dialer.close()

    def answered(self, member: Member, link: Link) -> None:
        """Somebody is at the address of a member: the one we meant, or a process that has its address now."""
        if link.peer.instance == member.instance:
            self.linked(link)
        else:
            self._hang_up(member.instance)
            link.close(f"{member.name} was meant, and this is another process")
            self._lost(member, "another process has its address")

    def _check_links(self, exchange: Exchange) -> None:
        if exchange is not self._exchange or exchange.error is not None:
            return
        for member in exchange.view.members:
            if member.instance != self._transport.me.instance and not self._wires.linked_to(member):
                self._lost(member, f"no connection within {self._connect_s:g} s")

    def _lost(self, member: Member, reason: str) -> None:
        log.warning("cannot reach %s: %s", member.name, reason)
        if self._on_lost is not None:
            self._on_lost(member, reason)

    # State that comes in

    def _announced(self, link: Link, meta: Mapping[str, Any]) -> None:
        try:
            state = _State.from_meta(meta)
            if link in self._incoming:
                raise ValueError("a state in the middle of another")
            self._check_state(state)
        except ValueError as error:
            self._states.put(PeerLost(f"{link.peer.name} sent a state that cannot be used: {error}"))
            link.close(str(error))
            return
        self._incoming[link] = state

    def _check_state(self, state: _State) -> None:
        expected = self._expected
        if expected is None:
            if state.nbytes > self._limit_bytes:
                raise ValueError(f"{state.nbytes} bytes of state, and none was expected")
        elif state.layout != expected:
            names = [name for name in {**expected, **state.layout} if state.layout.get(name) != expected.get(name)]
            raise ValueError(f"{len(names)} tensors are not as expected, among them {names[0]!r}")


class _Dialled:
    """The handler of a link that we opened: we know who should answer."""

    def __init__(self, peers: Peers, member: Member) -> None:
        self._peers, self._member = peers, member
        self.place, self.received, self.refused = peers.place, peers.received, peers.refused

    def linked(self, link: Link) -> None:
        self._peers.answered(self._member, link)

    def unlinked(self, link: Link, reason: str) -> None:
        if link.peer.instance == self._member.instance:
            self._peers.unlinked(link, reason)


# Links


def _nothing() -> None:
    return None


@dataclass(order=True, slots=True)
class _Waiting:
    """A message that no link has accepted yet."""

    order: int
    number: int
    message: Message = field(compare=False)
    left: Callable[[], None] = field(compare=False)
    lost: Callable[[], None] = field(compare=False)


class _Outlet:
    """What goes to one member: in order of importance, and never far ahead of what its link can carry.

    A link tells how much it has queued, and gives it away in order: once as much has left as was queued when a message had
    been accepted, that message has left too, and its memory is free.
    """

    def __init__(self) -> None:
        self.links: list[Link] = []  # the first one is used; there is another only when both sides have dialled
        self.waiting: list[_Waiting] = []  # a heap
        self._under_way: deque[tuple[int, _Waiting]] = deque()
        self._accepted_bytes = 0

    @property
    def linked(self) -> bool:
        return any(link.open for link in self.links)

    def pump(self) -> bool:
        """Whether there is more to do later."""
        if not self.links:
            return False
        link = self.links[0]
        if not link.open:
            return False  # its end will be told, and then another one's turn comes
        queued = link.queued_bytes
        while self.waiting and queued < WINDOW_BYTES:
            item = heapq.heappop(self.waiting)
            link.send(item.message)
            before, queued = queued, link.queued_bytes
            self._accepted_bytes += queued - before
            self._under_way.append((self._accepted_bytes, item))
        left_bytes = self._accepted_bytes - queued
        while self._under_way and self._under_way[0][0] <= left_bytes:
            self._under_way.popleft()[1].left()
        return bool(self.waiting or self._under_way)

    def remove(self, link: Link) -> None:
        """It has ended: nothing of what it had accepted is read any more."""
        if link is self.links[0]:
            self._abandon()
        self.links.remove(link)

    def _abandon(self) -> None:
        self._accepted_bytes = 0
        while self._under_way:
            self._under_way.popleft()[1].lost()


class _Wires:
    """All links, and the memory for what comes over them. On the transport's thread, but for `soon`."""

    def __init__(self, transport: Transport, *, limit_bytes: int) -> None:
        self._transport = transport
        self._outlets: dict[str, _Outlet] = {}  # by instance
        self._numbers = itertools.count()
        self._busy: set[_Outlet] = set()
        self._polling, self._pause_s = False, 0.0
        self._calls: deque[Callable[[], None]] = deque()
        self._limit_bytes, self._kept_bytes = limit_bytes, 0
        self._staging: list[Tensor] = []
        self._sink = torch.empty(MOST_PIECE_BYTES, dtype=torch.uint8)

    def soon(self, callback: Callable[[], None]) -> None:
        self._calls.append(callback)
        self._transport.call_later(0, self._call)

    def _call(self) -> None:
        while self._calls:
            self._calls.popleft()()

    # Links

    def add(self, link: Link) -> None:
        outlet = self._outlets.setdefault(link.peer.instance, _Outlet())
        outlet.links.append(link)
        self._pump(outlet)

    def remove(self, link: Link) -> None:
        outlet = self._outlets.get(link.peer.instance)
        if outlet is None or link not in outlet.links:
            return
        outlet.remove(link)
        if not outlet.links and not outlet.waiting:
            del self._outlets[link.peer.instance]
        self._pump(outlet)

    def linked_to(self, member: Member) -> bool:
        return (outlet := self._outlets.get(member.instance)) is not None and outlet.linked

    def close(self, instance: str, reason: str) -> None:
        outlet = self._outlets.get(instance)
        if outlet is None:
            return
        for item in outlet.waiting:
            item.lost()
        outlet.waiting.clear()
        for link in list(outlet.links):
            link.close(reason)

    # Sending

    def send(
        self,
        member: Member,
        message: Message,
        *,
        order: int,
        left: Callable[[], None],
        lost: Callable[[], None] | None = None,
    ) -> None:
        """`lost`: its link ended first; its memory is free all the same."""
        payload = message.payload
        if payload is not None and payload.nbytes <= SMALL_BYTES:
            message.payload = payload.clone()
        outlet = self._outlets.setdefault(member.instance, _Outlet())
        if message.payload is payload:
            item = _Waiting(order, next(self._numbers), message, left, left if lost is None else lost)
        else:
            item = _Waiting(order, next(self._numbers), message, _nothing, _nothing)
        heapq.heappush(outlet.waiting, item)
        self._pause_s = 0.0
        self._pump(outlet)
        if message.payload is not payload:
            left()

    def cancel(self, epoch: int) -> None:
        for outlet in self._outlets.values():
            outlet.waiting = [i for i in outlet.waiting if i.message.kind is not Kind.CHUNK or i.message.epoch > epoch]
            heapq.heapify(outlet.waiting)

    def pump(self) -> None:
        """See what has left, and send what may."""
        for outlet in list(self._busy):
            self._pump(outlet)

    def _pump(self, outlet: _Outlet) -> None:
        if outlet.pump():
            self._busy.add(outlet)
        else:
            self._busy.discard(outlet)
        if self._busy and not self._polling:
            # Links do not say when they have room again: look, at once and then now and then, while something waits for it.
            self._polling = True
            self._transport.call_later(self._pause_s, self._poll)

    def _poll(self) -> None:
        self._polling, self._pause_s = False, min(max(2 * self._pause_s, FIRST_POLL_S), LONGEST_POLL_S)
        self.pump()

    # Memory

    def keep(self, nbytes: int) -> bool:
        if self._kept_bytes + nbytes + KEPT_OVERHEAD_BYTES > self._limit_bytes:
            return False
        self._kept_bytes += nbytes + KEPT_OVERHEAD_BYTES
        return True

    def release(self, nbytes: int) -> None:
        self._kept_bytes -= nbytes + KEPT_OVERHEAD_BYTES

    def stage(self) -> Tensor:
        return self._staging.pop() if self._staging else torch.empty(MOST_PIECE_BYTES, dtype=torch.uint8)

    def unstage(self, buffer: Tensor) -> None:
        self._staging.append(buffer)

    def sink(self, head: Head) -> Tensor:
        return self._sink[: head.nbytes].view(DTYPES[head.dtype])


# State


class _Transfer:
    """A state on its way to a member."""

    def __init__(self, member: Member, messages: int, *, timeout_s: float) -> None:
        self._member, self._unsent, self._timeout_s = member, messages, timeout_s
        self._over = threading.Event()
        self._broken = False
        self._moved = time.monotonic()

    def wait(self) -> None:
        """Until all of it has left; the member says by itself that it has it."""
        while not self._over.is_set():
            left_s = self._moved + self._timeout_s - time.monotonic()
            if left_s <= 0:
                raise PeerLost(f"{self._member.name} takes no state: nothing moved for {self._timeout_s:g} s")
            self._over.wait(left_s)
        if self._broken:
            raise PeerLost(f"{self._member.name} was lost while its state was on the way")

    def left(self) -> None:
        self._moved = time.monotonic()
        self._unsent -= 1
        if self._unsent == 0:
            self._over.set()

    def lost(self) -> None:
        self._broken = True
        self._over.set()


@dataclass(slots=True)
class _State:
    """A state that comes in, tensor after tensor."""

    meta: dict[str, Any]
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    tensors: list[Tensor] = field(default_factory=list)

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> _State:
        listed, words = meta.get("tensors"), meta.get("meta")
        if not isinstance(listed, list) or not isinstance(words, dict):
            raise ValueError("a state begins with the list of its tensors")
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for entry in listed:
            if not isinstance(entry, list) or len(entry) != 3:
                raise ValueError("a tensor of a state has a name, a type and a shape")
            name, dtype, shape = entry
            if not isinstance(name, str) or name in layout or not isinstance(dtype, str) or dtype not in DTYPES:
                raise ValueError(f"a state cannot have {str(name)[:80]!r} of type {str(dtype)[:20]!r}, or not twice")
            if not isinstance(shape, list) or any(type(size) is not int or not 0 <= size < 2**40 for size in shape):
                raise ValueError(f"{name[:80]!r} of a state has no such shape")
            layout[name] = (DTYPES[dtype], tuple(shape))
        return cls(words, layout)

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.layout.values())

    @property
    def complete(self) -> bool:
        return len(self.tensors) == len(self.layout)

    def place(self, head: Head) -> Landing | None:
        """They come in the order of the list."""
        number = len(self.tensors)
        if self.complete or head.channel != number:
            return None
        dtype, shape = list(self.layout.values())[number]
        if (DTYPES[head.dtype], head.shape) != (dtype, shape):
            return None
        tensor = torch.empty(shape, dtype=dtype)
        return Landing(tensor, lambda: self.tensors.append(tensor))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
