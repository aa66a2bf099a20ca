"""The links to the other members: what goes over them, in which order, and the memory for what comes.

Everything here happens on the transport's thread, but for `Wires.soon`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smolcluster.comm.elastic.collectives.schedule import MOST_PIECE_BYTES
from smolcluster.comm.elastic.membership.view import ViewMember
from smolcluster.comm.elastic.transport.api import Head, Kind, Link, Message, Transport
from smolcluster.comm.elastic.transport.payloads import DTYPES

WINDOW_BYTES = 2 * MOST_PIECE_BYTES  # what a link may have queued: keeps it busy, and little is in vain after a loss
SMALL_BYTES = 16 << 10  # a payload up to here is copied: then its memory is free at once
KEPT_OVERHEAD_BYTES = 512  # of every piece that is kept, however small


def nothing() -> None:
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
    """What goes to one member: in order of importance, and never far ahead of what its link can carry."""

    def __init__(self, chunks_left: Callable[[], None]) -> None:
        """`chunks_left`: called when the last chunk that a link has accepted is gone, one way or the other."""
        self.links: list[Link] = []  # the first one is used; there is another only when both sides have dialled
        self.waiting: list[_Waiting] = []  # a heap
        self.leaving_chunks = 0  # that a link has accepted: it may read their memory
        self._chunks_left = chunks_left
        self._queued_bytes = 0

    @property
    def linked(self) -> bool:
        return any(link.open for link in self.links)

    def pump(self) -> None:
        """Give the link what it may have. One that is being closed takes nothing; at its end another one's turn comes."""
        while self.waiting and self.links and self.links[0].open and self._queued_bytes < WINDOW_BYTES:
            self._send(heapq.heappop(self.waiting))

    def _send(self, item: _Waiting) -> None:
        payload = item.message.payload
        nbytes = 0 if payload is None else payload.nbytes
        is_chunk = item.message.kind is Kind.CHUNK

        def sent(whole: bool) -> None:
            self._queued_bytes -= nbytes
            self.leaving_chunks -= is_chunk
            if whole:
                item.left()
            else:
                item.lost()
            self.pump()
            if self.leaving_chunks == 0:
                self._chunks_left()

        self._queued_bytes += nbytes
        self.leaving_chunks += is_chunk
        self.links[0].send(item.message, sent=sent)


class Wires:
    """All links, and the memory for what comes over them."""

    def __init__(self, transport: Transport, *, limit_bytes: int, chunks_left: Callable[[], None]) -> None:
        """`chunks_left`: called when a link has no chunk any more; `chunks_leave` says whether another has."""
        self._transport, self._chunks_left = transport, chunks_left
        self._outlets: dict[str, _Outlet] = {}  # by instance
        self._numbers = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._limit_bytes, self._kept_bytes = limit_bytes, 0
        self._staging: list[Tensor] = []
        self._sink = torch.empty(MOST_PIECE_BYTES, dtype=torch.uint8)

    def soon(self, callback: Callable[[], None]) -> None:
        """Do this on the transport's thread, in the order of the calls. From any thread."""
        self._calls.append(callback)
        self._transport.call_later(0, self._call)

    def _call(self) -> None:
        while self._calls:
            self._calls.popleft()()

    # Links

    def add(self, link: Link) -> None:
        outlet = self._outlet(link.peer.instance)
        outlet.links.append(link)
        outlet.pump()

    def remove(self, link: Link) -> None:
        outlet = self._outlets.get(link.peer.instance)
        if outlet is None or link not in outlet.links:
            return
        outlet.links.remove(link)
        outlet.pump()
        if not outlet.links and not outlet.waiting:
            del self._outlets[link.peer.instance]

    def _outlet(self, instance: str) -> _Outlet:
        if instance not in self._outlets:
            self._outlets[instance] = _Outlet(self._chunks_left)
        return self._outlets[instance]

    def linked_to(self, member: ViewMember) -> bool:
        return (outlet := self._outlets.get(member.instance)) is not None and outlet.linked

    def uses(self, link: Link) -> bool:
        """Whether messages go over this link, and not over another one to the same member."""
        outlet = self._outlets.get(link.peer.instance)
        return outlet is not None and outlet.links[:1] == [link]

    def close(self, instance: str, reason: str) -> None:
        outlet = self._outlets.get(instance)
        if outlet is None:
            return
        waiting, outlet.waiting = outlet.waiting, []
        for item in waiting:
            item.lost()
        for link in list(outlet.links):
            link.close(reason)

    # Sending

    def send(
        self,
        member: ViewMember,
        message: Message,
        *,
        order: int,
        left: Callable[[], None],
        lost: Callable[[], None] | None = None,
    ) -> None:
        """Send it when there is a link and room: what has the lowest `order` first.

        `left`: its memory is free again. `lost`: so it is, but because the link ended first; `left` if not given.
        """
        payload = message.payload
        small = payload is not None and payload.nbytes <= SMALL_BYTES
        if payload is not None and small:
            message.payload = payload.clone()
            item = _Waiting(order, next(self._numbers), message, nothing, nothing)
        else:
            item = _Waiting(order, next(self._numbers), message, left, left if lost is None else lost)
        outlet = self._outlet(member.instance)
        heapq.heappush(outlet.waiting, item)
        outlet.pump()
        if small:
            left()

    def cancel(self, epoch: int) -> None:
        """Forget chunks up to this epoch that no link has accepted yet."""
        for outlet in self._outlets.values():
            outlet.waiting = [i for i in outlet.waiting if i.message.kind is not Kind.CHUNK or i.message.epoch > epoch]
            heapq.heapify(outlet.waiting)

    def chunks_leave(self) -> bool:
        """Whether a link that is to stay has chunks that it still reads. On one that is being closed nothing depends."""
        return any(outlet.leaving_chunks and outlet.linked for outlet in self._outlets.values())

    # Memory

    def keep(self, nbytes: int) -> bool:
        """Room for so many bytes more of what came early, if there is any."""
        if self._kept_bytes + nbytes + KEPT_OVERHEAD_BYTES > self._limit_bytes:
            return False
        self._kept_bytes += nbytes + KEPT_OVERHEAD_BYTES
        return True

    def release(self, nbytes: int) -> None:
        """Give that room back."""
        self._kept_bytes -= nbytes + KEPT_OVERHEAD_BYTES

    def stage(self) -> Tensor:
        """Memory for one piece, as bytes."""
        return self._staging.pop() if self._staging else torch.empty(MOST_PIECE_BYTES, dtype=torch.uint8)

    def unstage(self, buffer: Tensor) -> None:
        self._staging.append(buffer)

    def sink(self, head: Head) -> Tensor:
        """Where to receive what nobody wants."""
        return self._sink[: head.nbytes].view(DTYPES[head.dtype])
