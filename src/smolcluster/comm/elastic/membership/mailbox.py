"""Everything a transport tells, in one queue, for a thread that does one thing at a time.

Payloads are received only where they were expected: `expect` says which messages may carry one, and its size. What was not
announced is refused before a byte of it is read. Memory of payloads that were handed back by `release` is used again.

What nobody has read yet is limited, all of it together. The limit follows from what was announced: a model of any size
must find room for what honest peers send while the reader is busy.
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
from smolcluster.comm.elastic.transport.frames import NotWanted
from smolcluster.comm.elastic.transport.messages import Head, Kind, Message

_FREE_PER_SIZE = 16
_UNREAD_PER_SENDER = 4  # of everything that is expected: a worker has three pushes on their way before it waits


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
    """What a message of one kind and channel carries."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Mailbox:
    """A transport's handler. `get` is for one thread; everything else may be called from any."""

    def __init__(self, *, unread_bytes: int = 4 << 30) -> None:
        """`unread_bytes`: how much may always wait to be read; more if what is expected or allowed needs more."""
        self.num_senders = 1  # that send what is expected; set by the roster
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._expected: dict[Kind, Sequence[Payload]] = {}
        self._allowed: dict[Kind, int] = {}
        self._at_once: dict[Kind | None, Callable[[int], None]] = {}
        self._free: dict[tuple[torch.dtype, tuple[int, ...]], list[Tensor]] = {}
        self._lock = threading.Lock()
        self._limit_bytes, self._unread_bytes = unread_bytes, 0

    def expect(self, kind: Kind, payloads: Sequence[Payload]) -> None:
        """Messages of this kind may come; channel i carries `payloads[i]`."""
        with self._lock:
            self._expected[kind] = list(payloads)

    def allow(self, kind: Kind, *, most_bytes: int) -> None:
        """Messages of this kind may come with any payload up to `most_bytes`: the reader checks what it is."""
        with self._lock:
            self._allowed[kind] = most_bytes

    def most_of(self, kind: Kind) -> int:
        """Return how many bytes of this kind are allowed."""
        return self._allowed.get(kind, 0)

    def at_once(self, kind: Kind | None, callback: Callable[[int], None]) -> None:
        """Call this with its epoch when such a message comes (None: when a link ends), on the transport's thread.

        For a reader that may be waiting for something else: it must be able to wake up.
        """
        self._at_once[kind] = callback

    @property
    def most_unread_bytes(self) -> int:
        """Several of everything that is expected, from each sender; or once the largest that is allowed."""
        expected = sum(payload.nbytes for payloads in self._expected.values() for payload in payloads)
        several = _UNREAD_PER_SENDER * self.num_senders * expected
        return max(self._limit_bytes, several, *self._allowed.values())

    def get(self, timeout_s: float | None = None) -> Event | None:
        """The next event; None when none came in time. `timeout_s` 0: do not wait."""
        try:
            event = self._queue.get(block=timeout_s != 0, timeout=timeout_s or None)
        except queue.Empty:
            return None
        if isinstance(event, Received) and event.message.payload is not None:
            with self._lock:
                self._unread_bytes -= event.message.payload.nbytes
        return event

    def release(self, payload: Tensor) -> None:
        """The memory of a payload that is not needed any more."""
        with self._lock:
            free = self._free.setdefault((payload.dtype, tuple(payload.shape)), [])
            if len(free) < _FREE_PER_SIZE:
                free.append(payload)

    # The transport's side

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
        unread_bytes, most = self._unread_bytes + head.nbytes, self.most_unread_bytes
        if unread_bytes > most:
            name = f"{head.kind.name} of step {head.step}"
            raise NotWanted(f"{name}: with it {unread_bytes} bytes would wait to be read here, more than {most}")
