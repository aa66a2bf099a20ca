"""The links to the other members: the order in which messages are sent, and the memory for received ones.

Everything runs on the transport's thread, except `PeerLinks.soon`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smolcluster.comm.elastic.collectives.schedule import MAX_PIECE_BYTES
from smolcluster.comm.elastic.transport.api import Head, Kind, Link, Message, Transport
from smolcluster.comm.elastic.transport.payloads import DTYPES
from smolcluster.comm.view import ViewMember

WINDOW_BYTES = 2 * MAX_PIECE_BYTES  # queued at a link: enough to keep it busy
SMALL_BYTES = 16 << 10  # payloads up to this size are copied, which frees their memory at once
KEPT_OVERHEAD_BYTES = 512  # counted for every early chunk, however small


def nothing() -> None:
    return None


@dataclass(order=True, slots=True)
class _Waiting:
    """A message that has not been given to a link yet."""

    order: int
    number: int
    message: Message = field(compare=False)
    left: Callable[[], None] = field(compare=False)


class _MemberQueue:
    """Messages to one member: a priority queue in front of its link, which has at most `WINDOW_BYTES` queued."""

    def __init__(self, chunks_left: Callable[[], None]) -> None:
        """`chunks_left`: called when the link reads no chunk's memory any more."""
        self.links: list[Link] = []  # the first one is used; there are two only if both sides dialled
        self.waiting: list[_Waiting] = []  # a heap
        self.leaving_chunks = 0  # queued at a link, which may read their memory
        self._chunks_left = chunks_left
        self._queued_bytes = 0

    @property
    def linked(self) -> bool:
        return any(link.open for link in self.links)

    def pump(self) -> None:
        """Fill the link's window. A closing link gets nothing; when it has ended, the next link is used."""
        while self.waiting and self.links and self.links[0].open and self._queued_bytes < WINDOW_BYTES:
            self._send(heapq.heappop(self.waiting))

    def _send(self, item: _Waiting) -> None:
        payload = item.message.payload
        nbytes = 0 if payload is None else payload.nbytes
        is_chunk = item.message.kind is Kind.CHUNK

        def sent(_: bool) -> None:
            self._queued_bytes -= nbytes
            self.leaving_chunks -= is_chunk
            item.left()
            self.pump()
            if self.leaving_chunks == 0:
                self._chunks_left()

        self._queued_bytes += nbytes
        self.leaving_chunks += is_chunk
        self.links[0].send(item.message, sent=sent)


class PeerLinks:
    """All links between members, and receive memory."""

    def __init__(self, transport: Transport, *, limit_bytes: int, chunks_left: Callable[[], None]) -> None:
        """`chunks_left`: called when a link has sent its last chunk; `chunks_leave` returns whether others have any."""
        self._transport, self._chunks_left = transport, chunks_left
        self._queues: dict[str, _MemberQueue] = {}  # by instance
        self._numbers = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._limit_bytes, self._kept_bytes = limit_bytes, 0
        self._staging: list[Tensor] = []
        self._sink = torch.empty(MAX_PIECE_BYTES, dtype=torch.uint8)

    def soon(self, callback: Callable[[], None]) -> None:
        """Run this on the transport's thread, in the order of the calls. Thread-safe."""
        self._calls.append(callback)
        self._transport.call_later(0, self._call)

    def _call(self) -> None:
        while self._calls:
            self._calls.popleft()()

    # Links

    def add(self, link: Link) -> None:
        queue = self._queue(link.peer.instance)
        queue.links.append(link)
        queue.pump()

    def remove(self, link: Link) -> None:
        queue = self._queues.get(link.peer.instance)
        if queue is None or link not in queue.links:
            return
        queue.links.remove(link)
        queue.pump()
        if not queue.links and not queue.waiting:
            del self._queues[link.peer.instance]

    def _queue(self, instance: str) -> _MemberQueue:
        if instance not in self._queues:
            self._queues[instance] = _MemberQueue(self._chunks_left)
        return self._queues[instance]

    def linked_to(self, member: ViewMember) -> bool:
        return (queue := self._queues.get(member.instance)) is not None and queue.linked

    def uses(self, link: Link) -> bool:
        """Return whether this is the link to its member that messages are sent over."""
        queue = self._queues.get(link.peer.instance)
        return queue is not None and queue.links[:1] == [link]

    def close(self, instance: str, reason: str) -> None:
        queue = self._queues.get(instance)
        if queue is None:
            return
        waiting, queue.waiting = queue.waiting, []
        for item in waiting:
            item.left()
        for link in list(queue.links):
            link.close(reason)

    # Sending

    def send(self, member: ViewMember, message: Message, *, order: int, left: Callable[[], None] = nothing) -> None:
        """Send a message when there is a link with room, lowest `order` first.

        `left` is called when its memory may be reused: it was sent, or the link ended first.
        """
        payload = message.payload
        small = payload is not None and payload.nbytes <= SMALL_BYTES
        if payload is not None and small:
            message.payload = payload.clone()
        queue = self._queue(member.instance)
        heapq.heappush(queue.waiting, _Waiting(order, next(self._numbers), message, nothing if small else left))
        queue.pump()
        if small:
            left()

    def cancel(self, epoch: int) -> None:
        """Drop chunks up to this epoch that are not queued at a link yet."""
        for queue in self._queues.values():
            queue.waiting = [i for i in queue.waiting if i.message.kind is not Kind.CHUNK or i.message.epoch > epoch]
            heapq.heapify(queue.waiting)

    def chunks_leave(self) -> bool:
        """Return whether an open link still reads the memory of chunks. Closing links do not matter."""
        return any(queue.leaving_chunks and queue.linked for queue in self._queues.values())

    # Memory

    def keep(self, nbytes: int) -> bool:
        """Reserve memory for an early chunk. Returns False if the limit is reached."""
        if self._kept_bytes + nbytes + KEPT_OVERHEAD_BYTES > self._limit_bytes:
            return False
        self._kept_bytes += nbytes + KEPT_OVERHEAD_BYTES
        return True

    def release(self, nbytes: int) -> None:
        """Undo `keep`."""
        self._kept_bytes -= nbytes + KEPT_OVERHEAD_BYTES

    def stage(self) -> Tensor:
        """Return a buffer for one piece, as bytes."""
        return self._staging.pop() if self._staging else torch.empty(MAX_PIECE_BYTES, dtype=torch.uint8)

    def unstage(self, buffer: Tensor) -> None:
        self._staging.append(buffer)

    def sink(self, head: Head) -> Tensor:
        """Return memory to receive a payload that is dropped."""
        return self._sink[: head.nbytes].view(DTYPES[head.dtype])
