"""The links between workers, and the groups made of them.

Two members have a link when they exchange something: neighbours in the ring of the view from its beginning, others from the
first operation that needs it. The one that stands earlier in the view dials; the other does so too if it has waited in
vain. Links outlive views; `form` closes those of members that are gone, and makes the group of the view.

    MEMBER                        which member the peer is, proved with a key of the view (`proofs.py`); nothing is sent to it
                                  before, and nothing else listened to
    CHUNK of this view's epoch    to the view's operations
    CHUNK of an older epoch       received, dropped and counted: its sender has not heard of this view yet
    CHUNK of a newer epoch        kept, as far as there is room, until `form` is called for that view
    STATE                         weights and optimizer state from one member to another (`state_transfer.py`)
    anything else                 ends the link

A lost link raises nothing by itself. `on_lost` tells which member cannot be reached; the coordinator decides what follows.
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
from smolcluster.comm.elastic.collectives.operations import Exchange, Landing, keep, key_of
from smolcluster.comm.elastic.collectives.peer_links import Wires
from smolcluster.comm.elastic.collectives.state_transfer import IncomingState, Layout, Transfer, state_messages
from smolcluster.comm.elastic.membership.proofs import is_proven, proof
from smolcluster.comm.elastic.membership.view import View, ViewChanged, ViewMember
from smolcluster.comm.elastic.transport.api import LEFT, Dialer, Head, Kind, Link, Message, Transport
from smolcluster.comm.group import PeerLost, Work

log = logging.getLogger(__name__)

DIAL_S = 1.0  # the later one of two members dials when the earlier one has not done so for so long: it still computes
SETTLE_S = 5.0  # for pieces that are half-way in or out when the view changes
STATE_ORDER = 1 << 62  # after every operation

MOST_FOR_A_STRANGER_BYTES = 16 << 20  # chunks of a later view, from a process that is in no view yet
MOST_STATES = 4  # received and not yet taken


@dataclass(slots=True)
class _Settling:
    """The memory of the view before, until it is its owner's again."""

    receiving: set[Link]  # that write into it
    settled: threading.Event
    sending: bool = True  # wait for links that read it, too


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
        """`limit_bytes`: for pieces that come before they are wanted. A rank that is ahead sends 1/n of each tensor it
        sums, so with the gradients of all steps in flight of G bytes, G/n is enough. Beyond it the link is closed.

        `timeout_s`: after so long without a piece moving, `wait` gives up; infinite: never. `connect_s`: after so long
        without a link, a member is reported to `on_lost`. `proven`: peers prove which member they are, with the keys that
        `form` is given.
        """
        self.dropped_chunks = 0  # of older views
        self._transport = transport
        self._timeout_s, self._connect_s, self._limit_bytes = timeout_s, connect_s, limit_bytes
        self._wires = Wires(transport, limit_bytes=limit_bytes, chunks_left=self._settle)
        self._on_lost: Callable[[ViewMember, str], None] | None = None
        self._on_waiting: Callable[[], None] | None = None
        self._exchange: Exchange | None = None
        self._index: dict[str, int] = {}  # instance -> place in the view
        self._needed: set[int] = set()  # places in the view of members with whom something is exchanged
        self._dialers: dict[str, Dialer] = {}  # by instance
        self._proven = proven
        self._keys: Mapping[str, bytes] = {}  # by instance
        self._unproven: dict[Link, Message | None] = {}  # links that prove nothing yet, and what they have sent
        self._shown: dict[Link, bytes] = {}  # the key with which I have proved who I am
        self._landings: dict[Link, Landing] = {}
        self._ahead: list[tuple[Link, Head, Tensor]] = []  # chunks of later views
        self._settling: _Settling | None = None
        self._expected: Layout | None = None
        self._incoming: dict[Link, IncomingState] = {}
        self._states: queue.SimpleQueue[IncomingState | PeerLost] = queue.SimpleQueue()

    def listen(self, host: str, port: int) -> str:
        """Accept other workers. Returns `host:port`."""
        return self._transport.listen(host, port, self)

    def on_lost(self, callback: Callable[[ViewMember, str], None]) -> None:
        """`callback(member, reason)` when a member of the view cannot be reached. On the transport's thread: not to block."""
        self._on_lost = callback

    def on_waiting(self, callback: Callable[[], None]) -> None:
        """Call this from a thread that waits for an operation, as long as it waits."""
        self._on_waiting = callback

    def form(self, view: View, keys: Mapping[str, bytes] | None = None) -> ElasticGroup:
        """The group of this view; the one before it is aborted. Does not wait for links: operations do.

        Not on the transport's thread: it waits for the pieces that are half-way into the memory of the view before, or out
        of it.
        """
        rank = view.index(self._transport.me.instance)
        if rank is None:
            raise ValueError(f"this worker is not in view {view.epoch}")
        if self._exchange is not None:
            if view.epoch <= self._exchange.view.epoch:
                raise ValueError(f"view {view.epoch} comes after view {self._exchange.view.epoch}")
            self._exchange.abort(ViewChanged(f"the members have changed: view {view.epoch} has {len(view.members)}"))
        exchange = Exchange(self._wires, view, timeout_s=self._timeout_s, need=self._need, on_waiting=self._on_waiting)
        settled = threading.Event()
        known = dict(keys or {})  # the caller may learn more keys before the next view, and they hold only there
        self._wires.soon(lambda: self._switch(exchange, known, settled))
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

    def send_state(self, member: ViewMember, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Work:
        """Weights and optimizer state for a member; it is dialled if there is no link. Operations go before it.

        The tensors must not change until the work is done.
        """
        messages = state_messages(tensors, meta)
        transfer = Transfer(member, len(messages), timeout_s=self._timeout_s)

        def start() -> None:
            if member.instance in self._index:
                self._need(self._index[member.instance])
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
        return state.meta, state.tensors

    # The transport's handler

    def linked(self, link: Link) -> None:
        if self._proven:
            self._unproven[link] = None
            self._show(link)
        else:
            self._wires.add(link)

    def place(self, link: Link, head: Head) -> Tensor | None:
        landing = None
        if link in self._unproven:
            log.warning("refused %s from %s, which has not proved who it is", head.kind.name, link.peer.name)
            return None
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
        if message.kind is Kind.MEMBER and self._proven:
            if link in self._unproven:
                self._unproven[link] = message
                self._check(link)
        elif link in self._unproven:
            link.close(f"{message.kind.name} before it has proved who it is")
        elif landing is not None:
            landing.arrived()
            self._settle(link)
        elif message.kind is Kind.STATE:
            self._announced(link, message.meta)
        else:
            link.close(f"{message.kind.name} is not spoken between workers")
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
        was_used = self._wires.uses(link)
        self._wires.remove(link)
        self._forget(link)
        landing = self._landings.pop(link, None)
        if landing is not None:
            landing.lost()
            self._settle(link)
        if self._incoming.pop(link, None) is not None:
            self._states.put(PeerLost(f"{link.peer.name} was lost while it sent its state: {reason}"))
        exchange, index = self._exchange, self._index.get(link.peer.instance)
        if exchange is None or index is None or index not in self._needed:
            return
        # Another link does not help the pieces that were on their way over this one: they are not sent again.
        pieces_lost = was_used and exchange.error is None
        if pieces_lost or not self._wires.linked_to(exchange.view.members[index]):
            self._lost(exchange.view.members[index], reason)

    def refused(self, address: str, reason: str) -> None:
        members = self._exchange.view.members if self._exchange is not None else ()
        for member in members:
            if member.address == address:
                self._hang_up(member.instance)  # the next view may try again
                self._lost(member, reason)

    # Proofs

    def _show(self, link: Link) -> None:
        """Prove who I am, once with each key."""
        key = self._keys.get(link.peer.instance)
        if key is not None and self._shown.get(link) != key:
            self._shown[link] = key
            said = proof(key, binding=link.binding, instance=self._transport.me.instance)
            epoch = 0 if self._exchange is None else self._exchange.view.epoch
            link.send(Message(kind=Kind.MEMBER, epoch=epoch, meta={"proof": said}))

    def _check(self, link: Link) -> None:
        """Use a link whose peer has proved who it is. One of another view may have other keys, and proves it again there."""
        said, instance = self._unproven[link], link.peer.instance
        key, exchange = self._keys.get(instance), self._exchange
        if said is None or key is None or exchange is None:
            return
        if is_proven(said.meta.get("proof"), key, binding=link.binding, instance=instance):
            del self._unproven[link]
            self._wires.add(link)
        elif said.epoch == exchange.view.epoch:
            link.close(f"it does not prove that it is {link.peer.name}")

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
        if link.peer.instance not in self._index and self._kept_for(link) + head.nbytes > MOST_FOR_A_STRANGER_BYTES:
            return None  # it may be a member of the next view; nobody needs that much before it begins
        return keep(self._wires, head, lambda tensor: self._keep(link, head, tensor))

    def _kept_for(self, link: Link) -> int:
        return sum(tensor.nbytes for who, _, tensor in self._ahead if who is link)

    def _forget(self, link: Link) -> None:
        """What was kept for a peer that is gone."""
        for who, _, tensor in self._ahead:
            if who is link:
                self._wires.release(tensor.nbytes)
        self._ahead = [chunk for chunk in self._ahead if chunk[0] is not link]

    def _keep(self, link: Link, head: Head, tensor: Tensor) -> None:
        """The view of this chunk had not been formed when it began to come; perhaps it has been since."""
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
            self._wires.release(tensor.nbytes)
        elif source is None:
            self._wires.release(tensor.nbytes)
            link.close(f"not a member of view {head.epoch}")
        else:
            exchange.adopt(link, source, head, tensor)

    # Views

    def _switch(self, exchange: Exchange, keys: Mapping[str, bytes], settled: threading.Event) -> None:
        """To the next view, on the transport's thread."""
        before, view = self._exchange, exchange.view
        self._exchange, self._keys = exchange, keys
        self._index = {member.instance: i for i, member in enumerate(view.members)}

        # Links: those of former members end, those to neighbours are dialled where they are missing.
        for member in before.view.members if before is not None else ():
            if member.instance not in self._index:
                self._hang_up(member.instance)
                self._wires.close(member.instance, f"{member.name} is not in view {view.epoch}")
        for link in list(self._unproven):
            self._show(link)
            self._check(link)
        self._needed, own, n = set(), self._index[self._transport.me.instance], len(view.members)
        for place in {(own - 1) % n, (own + 1) % n} - {own}:
            self._need(place)

        # Chunks that were ahead of us.
        kept, self._ahead = self._ahead, [chunk for chunk in self._ahead if chunk[1].epoch > view.epoch]
        for chunk in sorted((c for c in kept if c[1].epoch <= view.epoch), key=lambda c: c[1].epoch):
            self._adopt(*chunk)

        # The memory of the view before is its owner's again when nothing is being received into it, or sent from it.
        # All chunks on their way out are of that view: what no link had accepted was cancelled when it was aborted.
        receiving = {link for link, landing in self._landings.items() if landing.callers_memory}
        self._settling = _Settling(receiving, settled)
        self._settle()

    def _settle(self, link: Link | None = None) -> None:
        """`link`: nothing is half-way in over this one any more."""
        settling = self._settling
        if settling is None:
            return
        if link is not None:
            settling.receiving.discard(link)
        if not settling.receiving and not (settling.sending and self._wires.chunks_leave()):
            self._settling = None
            settling.settled.set()

    def _cut_off(self) -> None:
        """Links whose peer stopped in the middle of a piece. One that is only slow to take ours is not at fault."""
        settling = self._settling
        if settling is None:
            return
        settling.sending = False
        for link in list(settling.receiving):
            link.close(f"a piece of the view before did not come to its end within {SETTLE_S:g} s")
        self._settle()

    def _need(self, place: int) -> None:
        """Keep a link to the member at this place of the view."""
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

    def answered(self, member: ViewMember, link: Link) -> None:
        """A process answers at the address of a member: the member, or another that has its address now."""
        if link.peer.instance == member.instance:
            self.linked(link)
        else:
            self._hang_up(member.instance)
            link.close(f"{member.name} was meant, and this is another process")
            self._lost(member, "another process has its address")

    def _connected_to(self, member: ViewMember) -> bool:
        """Return whether there is a link. One that is unproven counts: its peer may still be computing in the last view."""
        unproven = any(link.peer.instance == member.instance for link in self._unproven)
        return unproven or self._wires.linked_to(member)

    def _check_later(self, place: int) -> None:
        """Report the member at this place if it is not connected in time.

        Another process in its place hides nothing: the member that dials a pair's link reports it, and needs no proof to.
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
        if self._on_lost is not None:
            self._on_lost(member, reason)

    # State that comes in

    def _announced(self, link: Link, meta: Mapping[str, Any]) -> None:
        try:
            if link in self._incoming:
                self._incoming[link].add(meta)
                return
            if self._states.qsize() >= MOST_STATES:
                raise ValueError("a state that nobody waits for")
            state = IncomingState(meta, expected=self._expected, limit_bytes=self._limit_bytes)
        except ValueError as error:
            if self._states.qsize() < MOST_STATES:
                self._states.put(PeerLost(f"{link.peer.name} sent a state that cannot be used: {error}"))
            link.close(str(error))
            return
        self._incoming[link] = state
        if link.peer.instance in self._index:
            self._need(self._index[link.peer.instance])


class _Dialled:
    """The handler of a link that we opened: we know who should answer."""

    def __init__(self, peers: Peers, member: ViewMember) -> None:
        self._peers, self._member = peers, member
        self.place, self.received, self.refused = peers.place, peers.received, peers.refused

    def linked(self, link: Link) -> None:
        self._peers.answered(self._member, link)

    def unlinked(self, link: Link, reason: str) -> None:
        if link.peer.instance == self._member.instance:
            self._peers.unlinked(link, reason)
