"""The sending side of a connection: frames that were accepted and have not been sent, and the payloads in use until then.

Bytes are counted three times: accepted by `send`, written to asyncio, and taken by the socket. A payload's `Work` is done
when the socket has taken its last byte: from then on its memory is not read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from smolcluster.comm.elastic.transport.frames import Frame
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.work import PeerLost

SETS_WAITING = 4  # a worker has three pushes in flight, and averages follow a joiner's state


class PendingSend:
    """The work of one message."""

    def __init__(self, sent: Callable[[bool], None] | None) -> None:
        self._over = threading.Event()
        self._lost, self._sent = "", sent

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()
        if self._lost:
            raise PeerLost(self._lost)

    def finish(self, *, lost: str = "") -> None:
        self._lost = lost
        self._over.set()
        if self._sent is not None:
            self._sent(not lost)


class SendQueue:
    """`append` and `clear` need `lock`; everything else is for the transport's thread."""

    def __init__(self, *, max_bytes: int) -> None:
        """The limit is `max_bytes`, or `SETS_WAITING` times the largest set: messages of one kind and step, rising channels."""
        self.lock = threading.Lock()
        self.accepted_bytes = self.written_bytes = 0
        self._min_limit_bytes = max_bytes
        self._frames: deque[tuple[Frame, PendingSend | None]] = deque()
        self._scheduled = False  # the loop is going to write
        self._last: tuple[Kind, int, int, int] | None = None  # kind, epoch, step and channel of the last payload
        self._set_bytes = self._largest_set_bytes = 0

        self._chunks: Iterator[bytes | memoryview] | None = None  # of the current frame
        self._current: PendingSend | None = None
        self._current_bytes = 0  # still to be written of it
        self._written: deque[tuple[int, PendingSend]] = deque()  # with the value of `written_bytes` after its last byte

    @property
    def max_bytes(self) -> int:
        return max(self._min_limit_bytes, SETS_WAITING * self._largest_set_bytes)

    def append(self, frame: Frame, work: PendingSend | None = None, *, message: Message | None = None) -> bool:
        """Add a frame. Returns True when the loop must be woken to write. `message`: counts towards its set."""
        self._frames.append((frame, work))
        self.accepted_bytes += frame.nbytes
        if message is not None and message.payload is not None:
            self._add_to_set(message, frame.nbytes)
        wake, self._scheduled = not self._scheduled, True
        return wake

    def _add_to_set(self, message: Message, nbytes: int) -> None:
        """A repeated message begins a new set: a peer that repeats its request gets no larger limit."""
        this = (message.kind, message.epoch, message.step, message.channel)
        goes_on = self._last is not None and this[:3] == self._last[:3] and this[3] > self._last[3]
        self._set_bytes = nbytes + (self._set_bytes if goes_on else 0)
        self._largest_set_bytes = max(self._largest_set_bytes, self._set_bytes)
        self._last = this

    @property
    def is_between_frames(self) -> bool:
        return self._chunks is None

    @property
    def is_empty(self) -> bool:
        return self._chunks is None and not self._frames

    def next_chunk(self) -> bytes | memoryview | None:
        """Return what to write next, counted as written; None when the queue is empty."""
        if self._chunks is None:
            with self.lock:
                if not self._frames:
                    self._scheduled = False
                    return None
                frame, self._current = self._frames.popleft()
            self._chunks, self._current_bytes = frame.chunks(), frame.nbytes
        chunk = next(self._chunks)
        self.written_bytes += len(chunk)
        self._current_bytes -= len(chunk)
        if self._current_bytes == 0:
            self._chunks = None
            if self._current is not None:
                self._written.append((self.written_bytes, self._current))
                self._current = None
        return chunk

    def skip_ahead(self, frame: Frame) -> None:
        """Count a frame that is written now, ahead of the queue and between two frames."""
        assert self._chunks is None
        with self.lock:
            self.accepted_bytes += frame.nbytes
        self.written_bytes += frame.nbytes

    def finish_sent(self, sent_bytes: int) -> None:
        """Finish the payloads among the first `sent_bytes`."""
        while self._written and self._written[0][0] <= sent_bytes:
            self._written.popleft()[1].finish()

    def clear(self) -> list[PendingSend]:
        """Drop everything. Returns the works to finish, without the lock."""
        works = [*(work for _, work in self._written), self._current, *(work for _, work in self._frames)]
        self._frames.clear()
        self._written.clear()
        self._current = None
        return [work for work in works if work is not None]
