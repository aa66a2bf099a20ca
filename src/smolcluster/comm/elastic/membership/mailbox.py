"""A transport's callbacks as a queue of events, for one consumer thread.

A payload is received only if its message was announced with `expect` (exact shapes) or `allow` (a maximum size); others are
refused before a byte of them is read. Memory that is returned by `release` is reused.

The bytes of unread payloads are limited in total. The limit grows with the announced payloads, so that a model of any size
has room for what correct peers send while the consumer is busy.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smolcluster.comm.elastic.transport.api import Link
from smolcluster.comm.elastic.transport.frames import UnexpectedPayload
from smolcluster.comm.elastic.transport.messages import Head, Kind, Message

_FREE_PER_SIZE = 16
_UNREAD_PER_SENDER = 4  # times everything that is expected: a worker has three pushes in flight before it waits


@dataclass(frozen=True, slots=True)
class Linked:
    link: Link


@dataclass(frozen=True, slots=True)
class Unlinked:
    link: Link
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    link: Link
    message: Message


@dataclass(frozen=True, slots=True)
class DialRefused:
    address: str
    reason: str


Event = Linked | Unlinked | Received | DialRefused


@dataclass(frozen=True, slots=True)
class Payload:
    """The payload of messages of one kind and channel."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Mailbox:
    """A transport's handler. One thread calls `get`; all other methods are thread-safe."""

    def __init__(self, *, unread_bytes: int = 4 << 30) -> None:
        """`unread_bytes`: limit of unread payloads; higher if expected or allowed messages need more."""
        self.num_senders = 1  # of expected messages; set by the roster
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._expected: dict[Kind, Sequence[Payload]] = {}
        self._allowed: dict[Kind, int] = {}
        self._at_once: dict[Kind | None, Callable[[int], None]] = {}
        self._free: dict[tuple[torch.dtype, tuple[int, ...]], list[Tensor]] = {}
        self._lock = threading.Lock()
        self._limit_bytes, self._unread_bytes = unread_bytes, 0

    def expect(self, kind: Kind, payloads: Sequence[Payload]) -> None:
        """Accept messages of this kind; channel i carries `payloads[i]`."""
        with self._lock:
            self._expected[kind] = list(payloads)

    def allow(self, kind: Kind, *, max_bytes: int) -> None:
        """Accept messages of this kind with any payload up to `max_bytes`, or more if more was allowed before.

        The reader validates it.
        """
        with self._lock:
            self._allowed[kind] = max(max_bytes, self.allowed_bytes(kind))

    def allowed_bytes(self, kind: Kind) -> int:
        """Return the bytes that `allow` permits for this kind, else 0."""
        return self._allowed.get(kind, 0)

    def at_once(self, kind: Kind | None, callback: Callable[[int], None]) -> None:
        """Call this with the epoch of each such message (None: when a link ends), on the transport's thread.

        It can wake a reader that is waiting for something else.
        """
        self._at_once[kind] = callback

    @property
    def max_unread_bytes(self) -> int:
        """The limit: several times everything expected, per sender; or the largest allowed payload."""
        expected = sum(payload.nbytes for payloads in self._expected.values() for payload in payloads)
        several = _UNREAD_PER_SENDER * self.num_senders * expected
        return max(self._limit_bytes, several, *self._allowed.values())

    def get(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event, or None after the timeout. `timeout_s` 0: do not wait."""
        try:
            event = self._queue.get(block=timeout_s != 0, timeout=timeout_s or None)
        except queue.Empty:
            return None
        if isinstance(event, Received) and event.message.payload is not None:
            with self._lock:
                self._unread_bytes -= event.message.payload.nbytes
        return event

    def release(self, payload: Tensor) -> None:
        """Return the memory of a payload for reuse."""
        with self._lock:
            free = self._free.setdefault((payload.dtype, tuple(payload.shape)), [])
            if len(free) < _FREE_PER_SIZE:
                free.append(payload)

    # Handler

    def linked(self, link: Link) -> None:
        self._queue.put(Linked(link))

    def unlinked(self, link: Link, reason: str) -> None:
        self._queue.put(Unlinked(link, reason))
        if None in self._at_once:
            self._at_once[None](-1)

    def refused(self, address: str, reason: str) -> None:
        self._queue.put(DialRefused(address, reason))

    def received(self, link: Link, message: Message) -> None:
        if message.payload is not None:
            with self._lock:
                self._unread_bytes += message.payload.nbytes
        self._queue.put(Received(link, message))
        if message.kind in self._at_once:
            self._at_once[message.kind](message.epoch)

    def place(self, link: Link, head: Head) -> Tensor | None:
        with self._lock:
            if self._unread_bytes + head.nbytes > self._limit_bytes:
                self._check_room(head)
            if head.nbytes <= self._allowed.get(head.kind, -1):
                return torch.empty(head.shape, dtype=getattr(torch, head.dtype))
            expected = self._expected.get(head.kind, ())
            if head.channel >= len(expected):
                return None
            want = expected[head.channel]
            if head.shape != want.shape or head.dtype != str(want.dtype).removeprefix("torch."):
                return None
            free = self._free.get((want.dtype, want.shape))
            if free:
                return free.pop()
        return torch.empty(want.shape, dtype=want.dtype)

    def _check_room(self, head: Head) -> None:
        unread_bytes, limit = self._unread_bytes + head.nbytes, self.max_unread_bytes
        if unread_bytes > limit:
            name = f"{head.kind.name} of step {head.step}"
            raise UnexpectedPayload(f"{name}: {unread_bytes} unread bytes with it, the limit is {limit}")
