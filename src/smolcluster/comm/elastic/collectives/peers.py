"""The links between workers, and the group of each view.

Two members have a link if they exchange something: neighbours in the view's ring from the start, others from the first
operation that needs it. The member with the lower index in the view dials; the other one does too after `DIAL_S`. Links outlive
views; `form` closes those of former members and makes the view's group.

    MEMBER                        a MAC that proves which member the peer is, with a key of the view (`pairwise_keys.py`); until
                                  then nothing is sent to the peer and no other message accepted
    CHUNK of this view's epoch    passed to the view's operations
    CHUNK of an older epoch       received, dropped and counted: its sender has not received this view yet
    CHUNK of a newer epoch        kept, within `limit_bytes`, until `form` is called for that view
    STATE                         weights and optimizer state from one member to another (`state_transfer.py`)
    anything else                 ends the link

A lost link does not raise an error. `on_lost` reports the member that cannot be reached, and the coordinator decides.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from smolcluster.comm.elastic.collectives.group import ElasticGroup
from smolcluster.comm.elastic.collectives.operations import Destination, Exchange, keep, key_of
from smolcluster.comm.elastic.collectives.peer_links import PeerLinks, nothing
from smolcluster.comm.elastic.collectives.state_transfer import IncomingState, state_messages
from smolcluster.comm.elastic.membership.pairwise_keys import is_valid_mac, member_mac
from smolcluster.comm.elastic.transport.api import LEFT, Dialer, Head, Kind, Link, Message, Transport
from smolcluster.comm.group import PeerLost
from smolcluster.comm.view import View, ViewChanged, ViewMember

log = logging.getLogger(__name__)

DIAL_S = 1.0  # then the member with the higher index dials, too: the other one may still be computing
SETTLE_S = 5.0  # for pieces that are partly sent or received when the view changes
STATE_ORDER = 1 << 62  # after every operation

MAX_EARLY_BYTES = 16 << 20  # chunks of a later view from a process that is not in this view
MAX_STATES = 4  # received and not yet read


@dataclass(slots=True)
class _Settling:
    """The memory of the last view's operations, until no link uses it."""

    receiving: set[Link]  # links that write into it
    settled: threading.Event
    sending: bool = True  # also wait for links that read it


class Peers:
    """A transport's handler for links between workers. Made once; `form` for every view."""

    def __init__(
        self,
        transport: Transport,
        *,
        limit_bytes: int = 256 << 20,
        timeout_s: float = 60.0,
        connect_s: float = 5.0,
        proven: bool = False,
    ) -> None:
        """`limit_bytes`: memory for early chunks; beyond it the link is closed. A rank that is ahead sends 1/n of each tensor
        it sums, so G/n is enough for G bytes of gradients in flight.

        `timeout_s`: `wait` raises after this time without any chunk sent or received; infinite: never. `connect_s`: a member
        without a link for this time is reported to `on_lost`. `proven`: peers must prove which member they are, with the keys
        passed to `form`.
        """
        self.dropped_chunks = 0  # of older views
        self._transport = transport
        self._timeout_s, self._connect_s, self._limit_bytes = timeout_s, connect_s, limit_bytes
        self._links = PeerLinks(transport, limit_bytes=limit_bytes, chunks_left=self._settle)
        # Called when a member of the view cannot be reached, with the reason. Must not block.
        self.on_lost: Callable[[ViewMember, str], None] = lambda *_: None
        self.on_waiting = nothing  # called regularly on a thread while it waits for an operation
        self._exchange: Exchange | None = None
        self._index: dict[str, int] = {}  # instance -> place in the view
        self._needed: set[int] = set()  # view indices of members that need a link
        self._dialers: dict[str, Dialer] = {}  # by instance
        self._proven = proven
        self._keys: Mapping[str, bytes] = {}  # by instance
        self._unproven: dict[Link, Message | None] = {}  # unproven links, and their MEMBER message
        self._shown: dict[Link, bytes] = {}  # the key of the MAC that was sent
        self._destinations: dict[Link, Destination] = {}
        self._ahead: list[tuple[Link, Head, Tensor]] = []  # chunks of later views
        self._settling: _Settling | None = None
        self._incoming: dict[Link, IncomingState] = {}
        self._states: queue.SimpleQueue[IncomingState | PeerLost] = queue.SimpleQueue()

    def listen(self, host: str, port: int) -> str:
        """Accept other workers. Returns `host:port`."""
        return self._transport.listen(host, port, self)

    def form(self, view: View, keys: Mapping[str, bytes] | None = None) -> ElasticGroup:
        """Return the group of this view and abort the last one. Does not wait for links: operations do.

        Must not be called on the transport's thread: it waits until no link uses memory of the last view's operations.
        """
        rank = view.index(self._transport.me.instance)
        if rank is None:
            raise ValueError(f"this worker is not a member of view {view.epoch}")
        if self._exchange is not None:
            if view.epoch <= self._exchange.view.epoch:
                raise ValueError(f"view {view.epoch} is not newer than view {self._exchange.view.epoch}")
            self._exchange.abort(ViewChanged(f"the members have changed: view {view.epoch} has {len(view.members)}"))
        exchange = Exchange(self._links, view, timeout_s=self._timeout_s, need=self._need, on_waiting=self.on_waiting)
        settled = threading.Event()
        known = dict(keys or {})  # a copy: keys that the caller adds later are for the next view
        self._links.soon(lambda: self._switch(exchange, known, settled))
        if not settled.wait(SETTLE_S):
            self._links.soon(self._cut_off)
            if not settled.wait(SETTLE_S):
                raise PeerLost(f"view {view.epoch} could not be formed: the transport's thread is blocked")
        return ElasticGroup(exchange, rank=rank, ranks=range(len(view.members)))

    def close(self) -> None:
        """Abort the group and stop dialling. The transport ends the links."""
        if self._exchange is not None:
            self._exchange.abort(PeerLost("this worker is leaving"))
        self._links.soon(self._hang_up_all)

    # State

    def send_state(self, member: ViewMember, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Send weights and optimizer state to a member, dialling it if necessary. Operations have priority.

        The tensors must not change any more.
        """
        messages = state_messages(tensors, meta)

        def start() -> None:
            if member.instance in self._index:
                self._need(self._index[member.instance])
            self._dial(member)
            for message in messages:
                self._links.send(member, message, order=STATE_ORDER)

        self._links.soon(start)

    def receive_state(self, timeout_s: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return meta and tensors of the next complete state. Raises PeerLost if its link was lost, or after the timeout."""
        try:
            state = self._states.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerLost(f"no member has sent its state within {timeout_s:g} s") from None
        if isinstance(state, PeerLost):
            raise state
        return state.meta, state.tensors

    # Handler

    def linked(self, link: Link) -> None:
        if self._proven:
            self._unproven[link] = None
            self._show(link)
        else:
            self._links.add(link)

    def place(self, link: Link, head: Head) -> Tensor | None:
        destination = None
        if link in self._unproven:
            log.warning("refused %s from %s before its membership was verified", head.kind.name, link.peer.name)
            return None
        if head.kind is Kind.CHUNK:
            destination = self._place_chunk(link, head)
        elif head.kind is Kind.STATE and link in self._incoming:
            destination = Destination(self._incoming[link].place(head))
        if destination is None:
            log.warning("refused %s of step %d from %s", head.kind.name, head.step, link.peer.name)
            return None
        self._destinations[link] = destination
        return destination.tensor

    def received(self, link: Link, message: Message) -> None:
        destination = self._destinations.pop(link, None)
        if message.kind is Kind.MEMBER and self._proven:
            if link in self._unproven:
                self._unproven[link] = message
                self._check(link)
        elif link in self._unproven:
            link.close(f"{message.kind.name} before membership was verified")
        elif destination is not None:
            destination.arrived()
            self._settle(link)
        elif message.kind is Kind.STATE:
            self._announced(link, message.meta)
        else:
            link.close(f"unexpected {message.kind.name} between workers")
        state = self._incoming.get(link)
        if state is not None and state.complete:
            del self._incoming[link]
            self._states.put(state)

    def unlinked(self, link: Link, reason: str) -> None:
        self._shown.pop(link, None)
        if link in self._unproven:
            del self._unproven[link]
            if self._index.get(link.peer.instance) in self._needed:
                self._check_later(self._index[link.peer.instance])  # the member itself may still connect
            return
        was_used = self._links.uses(link)
        self._links.remove(link)
        self._forget(link)
        destination = self._destinations.pop(link, None)
        if destination is not None:
            destination.lost()
            self._settle(link)
        if self._incoming.pop(link, None) is not None:
            self._states.put(PeerLost(f"{link.peer.name} was lost while sending its state: {reason}"))
        exchange, index = self._exchange, self._index.get(link.peer.instance)
        if exchange is None or index is None or index not in self._needed:
            return
        # A second link does not help: chunks that were queued at this one are not sent again.
        pieces_lost = was_used and exchange.error is None
        if pieces_lost or not self._connected_to(exchange.view.members[index]):
            self._lost(exchange.view.members[index], reason)

    def refused(self, address: str, reason: str) -> None:
        members = self._exchange.view.members if self._exchange is not None else ()
        for member in members:
            if member.address == address:
                self._hang_up(member.instance)  # the next operation may try again
                if not self._connected_to(member):
                    self._lost(member, reason)

    # Proofs

    def _show(self, link: Link) -> None:
        """Send the MAC that proves membership, once per key."""
        key = self._keys.get(link.peer.instance)
        if key is not None and self._shown.get(link) != key:
            self._shown[link] = key
            mac = member_mac(key, binding=link.binding, instance=self._transport.me.instance)
            epoch = 0 if self._exchange is None else self._exchange.view.epoch
            link.send(Message(kind=Kind.MEMBER, epoch=epoch, meta={"proof": mac}))

    def _check(self, link: Link) -> None:
        """Use a link if its peer's MAC is valid. A peer in another view may have another key; it sends a new MAC there."""
        message, instance = self._unproven[link], link.peer.instance
        key, exchange = self._keys.get(instance), self._exchange
        if message is None or key is None or exchange is None:
            return
        if is_valid_mac(message.meta.get("proof"), key, binding=link.binding, instance=instance):
            del self._unproven[link]
            self._links.add(link)
        elif message.epoch == exchange.view.epoch:
            link.close(f"invalid membership MAC for {link.peer.name}")

    # Chunks

    def _place_chunk(self, link: Link, head: Head) -> Destination | None:
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
            return Destination(self._links.sink(head))
        if link.peer.instance not in self._index and self._kept_for(link) + head.nbytes > MAX_EARLY_BYTES:
            return None  # it may be in the next view, but no member sends that much before it starts
        return keep(self._links, head, lambda tensor: self._keep(link, head, tensor))

    def _kept_for(self, link: Link) -> int:
        return sum(tensor.nbytes for who, _, tensor in self._ahead if who is link)

    def _forget(self, link: Link) -> None:
        """Drop the early chunks of a lost link."""
        for who, _, tensor in self._ahead:
            if who is link:
                self._links.release(tensor.nbytes)
        self._ahead = [chunk for chunk in self._ahead if chunk[0] is not link]

    def _keep(self, link: Link, head: Head, tensor: Tensor) -> None:
        """Keep a chunk of a later view, unless that view was formed while the chunk was being received."""
        exchange = self._exchange
        current = -1 if exchange is None else exchange.view.epoch
        if head.epoch > current:
            self._ahead.append((link, head, tensor))
        else:
            self._adopt(link, head, tensor)

    def _adopt(self, link: Link, head: Head, tensor: Tensor) -> None:
        exchange, source = self._exchange, self._index.get(link.peer.instance)
        assert exchange is not None
        if head.epoch < exchange.view.epoch:
            self.dropped_chunks += 1
            self._links.release(tensor.nbytes)
        elif source is None:
            self._links.release(tensor.nbytes)
            link.close(f"not a member of view {head.epoch}")
        else:
            exchange.adopt(link, source, head, tensor)

    # Views

    def _switch(self, exchange: Exchange, keys: Mapping[str, bytes], settled: threading.Event) -> None:
        """Switch to the next view, on the transport's thread."""
        before, view = self._exchange, exchange.view
        self._exchange, self._keys = exchange, keys
        self._index = {member.instance: i for i, member in enumerate(view.members)}

        # Links: close those of former members, dial missing ones to neighbours.
        for member in before.view.members if before is not None else ():
            if member.instance not in self._index:
                self._hang_up(member.instance)
                self._links.close(member.instance, f"{member.name} is not in view {view.epoch}")
        for link in list(self._unproven):
            self._show(link)
            self._check(link)
        self._needed, own, n = set(), self._index[self._transport.me.instance], len(view.members)
        for place in {(own - 1) % n, (own + 1) % n} - {own}:
            self._need(place)

        # Early chunks of this view.
        kept, self._ahead = self._ahead, [chunk for chunk in self._ahead if chunk[1].epoch > view.epoch]
        for chunk in sorted((c for c in kept if c[1].epoch <= view.epoch), key=lambda c: c[1].epoch):
            self._adopt(*chunk)

        # The last view's memory is free when no link receives into it or sends from it. All chunks that are still being sent
        # are of that view: those not queued at a link were cancelled by the abort.
        receiving = {link for link, destination in self._destinations.items() if destination.callers_memory}
        self._settling = _Settling(receiving, settled)
        self._settle()

    def _settle(self, link: Link | None = None) -> None:
        """Signal `settled` when no link uses the last view's memory. `link`: has finished receiving."""
        settling = self._settling
        if settling is None:
            return
        if link is not None:
            settling.receiving.discard(link)
        if not settling.receiving and not (settling.sending and self._links.chunks_leave()):
            self._settling = None
            settling.settled.set()

    def _cut_off(self) -> None:
        """Close links that still receive a piece of the last view. Links that are only slow to send stay open."""
        settling = self._settling
        if settling is None:
            return
        settling.sending = False
        for link in list(settling.receiving):
            link.close(f"a chunk of the last view was not completed within {SETTLE_S:g} s")
        self._settle()

    def _need(self, place: int) -> None:
        """Keep a link to the member with this view index."""
        exchange = self._exchange
        if exchange is None or place in self._needed:
            return
        self._needed.add(place)
        member = exchange.view.members[place]

        def dial() -> None:
            if exchange is self._exchange and not self._connected_to(member):
                self._dial(member)

        if place > self._index[self._transport.me.instance]:
            self._dial(member)
        else:
            self._transport.call_later(DIAL_S, dial)
        self._check_later(place)

    def _dial(self, member: ViewMember) -> None:
        """Dial a member, unless there is a link or a dialer."""
        if member.instance not in self._dialers and not self._links.linked_to(member):
            self._dialers[member.instance] = self._transport.dial(member.address, _Dialled(self, member))

    def _hang_up_all(self) -> None:
        for instance in list(self._dialers):
            self._hang_up(instance)

    def _hang_up(self, instance: str) -> None:
        dialer = self._dialers.pop(instance, None)
        if dialer is not None:
            dialer.close()

    def on_linked(self, member: ViewMember, link: Link) -> None:
        """Handle a link to a member's address, which may have been taken over by another process."""
        if link.peer.instance == member.instance:
            self.linked(link)
        else:
            self._hang_up(member.instance)
            link.close(f"dialled {member.name}, but another process accepted the connection")
            self._lost(member, "another process has its address")

    def _connected_to(self, member: ViewMember) -> bool:
        """Return whether there is a link. An unproven one counts: its peer may still be computing in the last view."""
        unproven = any(link.peer.instance == member.instance for link in self._unproven)
        return unproven or self._links.linked_to(member)

    def _check_later(self, place: int) -> None:
        """Report the member if it is not connected within `connect_s`.

        Another process at its address is reported by the member that dials (see `on_linked`).
        """
        exchange = self._exchange
        assert exchange is not None
        member = exchange.view.members[place]

        def check() -> None:
            if exchange is self._exchange and exchange.error is None and not self._connected_to(member):
                self._lost(member, f"no connection within {self._connect_s:g} s")

        self._transport.call_later(self._connect_s, check)

    def _lost(self, member: ViewMember, reason: str) -> None:
        log.log(logging.INFO if reason == LEFT else logging.WARNING, "cannot reach %s: %s", member.name, reason)
        self._needed.discard(self._index.get(member.instance, -1))  # the next operation makes another link
        self.on_lost(member, reason)

    # Receiving a state

    def _announced(self, link: Link, meta: Mapping[str, Any]) -> None:
        try:
            if link in self._incoming:
                raise ValueError("a state began before the last one was complete")
            if self._states.qsize() >= MAX_STATES:
                raise ValueError(f"more than {MAX_STATES} states that were not read")
            state = IncomingState(meta, limit_bytes=self._limit_bytes)
        except ValueError as error:
            if self._states.qsize() < MAX_STATES:
                self._states.put(PeerLost(f"{link.peer.name} sent an invalid state: {error}"))
            link.close(str(error))
            return
        self._incoming[link] = state
        if link.peer.instance in self._index:
            self._need(self._index[link.peer.instance])


class _Dialled:
    """The handler of a link that we dialled, which knows the member that should be there."""

    def __init__(self, peers: Peers, member: ViewMember) -> None:
        self._peers, self._member = peers, member
        self.place, self.received, self.refused = peers.place, peers.received, peers.refused

    def linked(self, link: Link) -> None:
        self._peers.on_linked(self._member, link)

    def unlinked(self, link: Link, reason: str) -> None:
        if link.peer.instance == self._member.instance:
            self._peers.unlinked(link, reason)
