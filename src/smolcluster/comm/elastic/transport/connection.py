"""One TCP connection of the elastic plane, from its first byte to its last.

Reading. asyncio asks where the next bytes belong; while a payload is under way that is the rest of the tensor that
`Handler.place` named, so nothing is copied in between. On a slow line every packet would wake us: inside a payload the
kernel is asked to do so only when a good part has come, and never to wait for more than is sure to come.

Writing. `send` puts a frame into the queue, from any thread, and wakes the loop if it sleeps. The loop writes slices as long
as the socket takes them. asyncio's own buffer is kept empty: once a payload's last slice is gone nobody holds its memory
any more, and its `Work` is done. Messages leave in the order of `send`; only a BEAT may go between two of them.

Too slow. What waits is memory of ours, so there is a limit to it. A state is sent in one go and may be larger than any
fixed number: a link may have as much as several of the largest set that it was given, where a set is what one sender
would call one thing, messages of one kind and step with rising channels. A peer that takes nothing at all is given up too.

The end. `close` sends BYE behind what is queued, and the other side hangs up. A fault on either side ends it at once.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

from smolcluster.comm.elastic.transport import frames
from smolcluster.comm.elastic.transport.api import Handler, Kind, Link, Message, Peer
from smolcluster.comm.elastic.transport.frames import Frame, FrameError, Parser
from smolcluster.comm.elastic.transport.handshake import MAX_REASON, Handshake, Refusal, printable
from smolcluster.comm.elastic.transport.pending_connections import Candidate, PendingConnections
from smolcluster.comm.elastic.transport.security import Credentials, Keyring, TokenRefused, open_credentials
from smolcluster.comm.elastic.transport.sockets import set_options, unanswered_s, wake_at
from smolcluster.comm.work import Done, PeerLost, Traffic, Work

LINGER_S = 1.0  # a link that is being closed ends when nothing has moved for so long
READ_AT_BYTES = 1 << 16  # of a payload: read when so much has come
TLS_HOLDS_BYTES = 20_000  # what the TLS layer may have of a record that is not complete, and a little more
TURN_BYTES = 1 << 22  # what one link may write before the others have their turn
SETS_WAITING = 4  # a worker has three pushes on their way, and a joiner's state is followed by averages


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a peer may ask of us, and how long we wait for it."""

    meta_bytes: int = frames.META_BYTES
    payload_bytes: int = frames.PAYLOAD_BYTES  # of one message
    queued_bytes: int = 1 << 33  # of one link, or `SETS_WAITING` sets; references to the sender's tensors, not copies
    messages_per_s: int = 50_000
    unauthenticated: int = 256  # connections at once
    handshake_s: float = 4.5
    beat_s: float = 0.3
    silence_s: float = 1.75
    stall_s: float = 0.0  # if longer: how long a peer may be silent while its kernel still acknowledges what we send
    stuck_s: float = 300.0  # the socket takes nothing; on a slow line a large buffer is full for minutes


class Owner(Protocol):
    """The transport that a link belongs to, as `TcpTransport` has it."""

    me: Peer
    keyring: Keyring | None
    secret: bytes
    buffer_size: int | None
    limits: Limits
    links: set[TcpLink]
    connections: set[TcpLink]
    past: Traffic
    waste: memoryview
    loop: asyncio.AbstractEventLoop
    pending: PendingConnections

    @property
    def run(self) -> bytes: ...

    def post(self, callback: Callable[..., object], *args: object) -> None: ...


class _Sending:
    """A payload on its way out."""

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


class TcpLink(Link, Candidate, asyncio.BufferedProtocol):
    """Unauthenticated until the handshake is done; then `linked` is set and the handler notified.

    Everything that is not said to be for any thread belongs to the transport's.
    """

    def __init__(self, owner: Owner, handler: Handler, address: str, *, dialing: bool) -> None:
        self.traffic = Traffic()
        self.address = address
        self.linked = False
        self.refusal = ""  # why there will be no link to the address we dialled
        self.reason = "not linked yet"  # why it ended
        self.decided: asyncio.Future[None] = owner.loop.create_future()  # linked, or over
        self.over: asyncio.Future[None] = owner.loop.create_future()
        self.gone: asyncio.Future[None] = owner.loop.create_future()  # asyncio has let go of the socket

        self._owner, self._handler, self._dialing = owner, handler, dialing
        self._encrypted = owner.keyring is not None
        self._transport: asyncio.Transport | None = None
        self._handshake: Handshake | None = None
        self._parser = Parser(
            place=lambda head: handler.place(self, head),
            run=lambda: owner.run,
            cluster=None,
            meta_bytes=owner.limits.meta_bytes,
            payload_bytes=owner.limits.payload_bytes,
            checked=not self._encrypted,
        )
        self._heard = self._heard_at_beat = time.monotonic()
        self._wake_at, self._can_wake_late = 1, True
        self._second, self._messages = 0, 0  # how many came in this second
        self._leaving = False  # we close; what still comes is not looked at
        self._put_out: asyncio.TimerHandle | None = None  # for a peer that does not hang up after our last words

        self._lock = threading.Lock()  # over these
        self._queue: deque[tuple[Frame, _Sending | None]] = deque()
        self._awake = False  # the loop knows that there is something in the queue
        self.open = False
        self._accepted_bytes = 0
        self._last: tuple[Kind, int, int, int] | None = None  # kind, epoch, step and channel of the last payload
        self._set_bytes = self._largest_set_bytes = 0

        self._chunks: Iterator[bytes | memoryview] | None = None  # of the frame that is being written
        self._sending: _Sending | None = None
        self._left_bytes = 0  # of it
        self._handed: deque[tuple[int, _Sending]] = deque()  # asyncio has all of these up to here, and may hold a part
        self._handed_bytes = self._handed_at_beat = 0
        self._paused = False
        self._taken_bytes, self._taken_at = 0, time.monotonic()  # by the socket, and when it last took some

    # For any thread

    def send(self, message: Message, *, sent: Callable[[bool], None] | None = None) -> Work:
        frame = self._encode(message)
        work = _Sending(sent) if frame.payload is not None or sent is not None else None
        with self._lock:
            accepting = self.open
            if accepting:
                self._queue.append((frame, work))
                self._accepted_bytes += frame.nbytes
                if message.payload is not None:
                    self._add_to_set(message, frame.nbytes)
                wake, self._awake = not self._awake, True
        if not accepting:
            if sent is not None:
                self._owner.post(sent, False)
            lost = _Sending(None)
            lost.finish(lost=self._name(self.reason))
            return lost
        if self.queued_bytes > self._most_queued_bytes:
            self._owner.post(self.end, f"{self._too_slow()}, and at most {self._most_queued_bytes} may")
        elif wake:
            self._owner.post(self._pump)
        return work if work is not None else Done()

    def _add_to_set(self, message: Message, nbytes: int) -> None:
        """The same message again begins a new set: a peer that asks again and again is not given room for it."""
        this = (message.kind, message.epoch, message.step, message.channel)
        goes_on = self._last is not None and this[:3] == self._last[:3] and this[3] > self._last[3]
        self._set_bytes = nbytes + (self._set_bytes if goes_on else 0)
        self._largest_set_bytes = max(self._largest_set_bytes, self._set_bytes)
        self._last = this

    def _too_slow(self) -> str:
        return f"too slow: {self.queued_bytes} bytes are waiting to be sent"

    @property
    def _most_queued_bytes(self) -> int:
        return max(self._owner.limits.queued_bytes, SETS_WAITING * self._largest_set_bytes)

    @property
    def queued_bytes(self) -> int:
        return 0 if self.over.done() else max(0, self._accepted_bytes - self.traffic.bytes_sent)

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard

    def close(self, reason: str) -> None:
        with self._lock:
            if not self.open:
                return
            self.open, self.reason = False, reason
        self._owner.post(self.leave, reason)

    # Life

    def beat(self) -> None:
        """Say something, unless something was said since the last time. Inside a frame bytes flow anyhow."""
        quiet = self._handed_bytes == self._handed_at_beat and self._chunks is None and not self._queue
        if quiet and not self._paused and not self._leaving:
            self._say(Message(kind=Kind.BEAT))
        self._handed_at_beat = self._handed_bytes
        if self._heard == self._heard_at_beat:
            self._set_wake_at(1)  # the line is slow: take what there is, which also shows that the peer is alive
        self._heard_at_beat = self._heard

    def check_life(self, now: float, *, stood_still_s: float) -> None:
        """End the link if the peer has been silent, or has taken nothing of what waits, for too long.

        Time in which we stood still ourselves does not count, and after it everybody has half the time anew: the peer may
        have stood still with us.
        """
        limits = self._owner.limits
        if stood_still_s > limits.beat_s:
            self._heard = max(self._heard + stood_still_s, now - limits.silence_s / 2)
            self._taken_at = min(now, self._taken_at + stood_still_s)
        silent_s = now - self._heard
        self.stalled = silent_s > limits.silence_s
        if self.stalled and (silent_s > limits.stall_s or not self._kernel_answers()):
            self.end(f"silent for {silent_s:.1f} s")
        elif (stuck_s := self._stuck_s(now)) > limits.stuck_s:
            self.end(f"{self._too_slow()}, and none has left for {stuck_s:.1f} s")

    def _kernel_answers(self) -> bool:
        """Return whether the peer's machine still acknowledges our bytes, as far as this system can tell."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        unanswered = None if sock is None else unanswered_s(sock)
        return unanswered is None or unanswered < self._owner.limits.silence_s / 2

    def _stuck_s(self, now: float) -> float:
        """For how long bytes have waited and the socket has taken none."""
        if self._transport is not None:
            taken_bytes = self._handed_bytes - self._transport.get_write_buffer_size()
            if taken_bytes != self._taken_bytes or self.queued_bytes == 0:
                self._taken_bytes, self._taken_at = taken_bytes, now
        return now - self._taken_at

    # Writing

    def _encode(self, message: Message) -> Frame:
        return frames.encode(
            message,
            cluster=self._parser.cluster or frames.NO_CLUSTER,
            run=self._owner.run,
            checked=not self._encrypted,
            meta_bytes=self._owner.limits.meta_bytes,
        )

    def _pump(self) -> None:
        """Write until the socket is full, the queue is empty, or others should have a turn."""
        transport, turn_ends = self._transport, self._handed_bytes + TURN_BYTES
        if transport is None:
            return
        while not self._paused and not transport.is_closing() and self._next_frame():
            if self._handed_bytes > turn_ends:
                self._owner.loop.call_soon(self._pump)
                break
            assert self._chunks is not None
            chunk = next(self._chunks)
            transport.write(chunk)
            self._handed_bytes += len(chunk)
            self._left_bytes -= len(chunk)
            if self._left_bytes == 0:
                self._chunks = None
                if self._sending is not None:
                    self._handed.append((self._handed_bytes, self._sending))
                    self._sending = None
        self._settle(transport)

    def _next_frame(self) -> bool:
        """Whether there is something to write."""
        if self._chunks is not None:
            return True
        with self._lock:
            if not self._queue:
                self._awake = False
                return False
            frame, self._sending = self._queue.popleft()
        self._chunks, self._left_bytes = frame.chunks(), frame.nbytes
        return True

    def _settle(self, transport: asyncio.Transport) -> None:
        """Payloads that asyncio holds no part of any more are done."""
        if transport.is_closing():
            return  # what it held is lost, and the end will tell
        sent_bytes = self._handed_bytes - transport.get_write_buffer_size()  # a little less than that under TLS
        self.traffic.bytes_sent = max(self.traffic.bytes_sent, sent_bytes)
        while self._handed and self._handed[0][0] <= sent_bytes:
            self._handed.popleft()[1].finish()

    def _say(self, message: Message) -> None:
        """A small message of our own, between two frames and ahead of the queue."""
        assert self._chunks is None
        if self._transport is None or self._transport.is_closing():
            return
        frame = self._encode(message)
        with self._lock:
            self._accepted_bytes += frame.nbytes
        self._handed_bytes += frame.nbytes
        self._transport.write(frame.head)
        self._settle(self._transport)

    # Reading

    def _wait_for_more(self) -> None:
        """Sleep until a good part of the payload under way is here; between payloads, until anything is."""
        sure_bytes = self._parser.due_bytes - (TLS_HOLDS_BYTES if self._encrypted else 0)
        self._set_wake_at(max(1, min(sure_bytes, READ_AT_BYTES)))

    def _set_wake_at(self, nbytes: int) -> None:
        if (
            nbytes == self._wake_at
            or not self._can_wake_late
            or self._transport is None
            or self._transport.is_closing()
        ):
            return
        self._can_wake_late = wake_at(self._transport.get_extra_info("socket"), nbytes=nbytes)
        self._wake_at = nbytes

    def _take(self, message: Message) -> None:
        self._count()
        if message.kind is Kind.BYE:
            self.end(printable(message.meta.get("reason"), limit=MAX_REASON) or "left without a reason")
        elif not self.linked:
            self._get_acquainted(message)
        elif message.kind is not Kind.BEAT:
            self._handler.received(self, message)

    def _count(self) -> None:
        second = int(time.monotonic())
        self._messages = self._messages + 1 if second == self._second else 1
        self._second = second
        if self._messages > self._owner.limits.messages_per_s:
            raise frames.TooLarge(f"more than {self._owner.limits.messages_per_s} messages in a second")

    def _get_acquainted(self, message: Message) -> None:
        assert self._handshake is not None
        assert self._parser.cluster is not None
        for answer in self._handshake.hear(message, cluster=self._parser.cluster):
            self._say(answer)
        if self._handshake.peer is None:
            return
        self.peer, self.binding = self._handshake.peer, self._handshake.binding
        self.linked = self.open = self._parser.authenticated = True
        self._owner.links.add(self)
        self.decided.set_result(None)
        self._handler.linked(self)

    # The end

    def leave(self, reason: str) -> None:
        """Say BYE behind what is queued; end when the peer has hung up, or nothing moves any more."""
        if self.over.done() or self._leaving:
            return
        self._leaving = True
        frame = self._encode(Message(kind=Kind.BYE, meta={"reason": reason[:MAX_REASON]}))
        with self._lock:
            self.open, self.reason = False, reason
            self._queue.append((frame, None))
            self._accepted_bytes += frame.nbytes
        self._pump()
        self._linger(-1)

    def _linger(self, sent_before: int) -> None:
        if self.traffic.bytes_sent == sent_before:
            self.end(self.reason)
        elif not self.over.done():
            self._owner.loop.call_later(LINGER_S, self._linger, self.traffic.bytes_sent)

    def _refuse(self, error: Refusal) -> None:
        """No link will come of this; tell the other side, if it does not know."""
        if error.tell:
            self._say(Message(kind=Kind.REFUSE, meta={"reason": str(error)}))
        self.end(str(error), flush=True)
        if self._dialing:
            self.refusal = str(error)
        else:
            self._handler.refused(self.address, str(error))

    def _break(self, error: FrameError) -> None:
        """The peer's bytes are of no use any more."""
        if self.linked:
            if self._chunks is None and not self._paused:
                self._say(Message(kind=Kind.BYE, meta={"reason": f"cannot use what you sent: {error}"[:MAX_REASON]}))
            self.end(str(error), flush=True)
        elif isinstance(error, frames.WrongVersion) or (self._dialing and isinstance(error, frames.ForeignBytes)):
            self._refuse(Refusal(str(error)))
        else:
            self._owner.pending.note(self.address, str(error))
            foreign = isinstance(error, frames.ForeignBytes)
            if foreign:
                self._say(Message(kind=Kind.REFUSE))  # one who speaks TLS learns from any answer that we do not
            self.end(str(error), flush=foreign)

    def end(self, reason: str, *, flush: bool = False) -> None:
        """End it at once: `wait` of its payloads raises PeerLost, the handler is notified. `flush`: after our last words."""
        if self.over.done():
            return
        self.over.set_result(None)
        with self._lock:
            self.open, self.reason = False, reason
            works = [*(work for _, work in self._handed), self._sending, *(work for _, work in self._queue)]
            self._queue.clear()
        self._handed.clear()
        self._sending = None
        for work in works:
            if work is not None:
                work.finish(lost=self._name(reason))
        if self._transport is not None and not flush:
            self._transport.abort()
        elif self._transport is not None:
            self._transport.close()
            self._put_out = self._owner.loop.call_later(LINGER_S, self.abort)
        else:  # it never got so far
            self._let_go()
        self._owner.links.discard(self)
        if not self.decided.done():
            self.decided.set_result(None)
        if self.linked:
            self._handler.unlinked(self, reason)

    def abort(self) -> None:
        """Drop the connection, even one that is being closed."""
        if self._transport is not None:
            self._transport.abort()

    def _name(self, reason: str) -> str:
        return f"{self.peer.name}: {reason}" if self.linked else reason

    # What asyncio tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._owner.connections.add(self)
        if self.over.done():
            transport.abort()
            return
        # Nothing may stay in asyncio's buffer unnoticed. Under TLS a buffer as large as the mark counts as full already.
        transport.set_write_buffer_limits(high=1 if self._encrypted else 0)
        set_options(transport.get_extra_info("socket"), buffer_size=self._owner.buffer_size)
        try:
            self._handshake = self._new_handshake(transport)
        except TokenRefused as error:
            self._refuse(Refusal(str(error), tell=False))
            return
        for message in self._handshake.begin():
            self._say(message)

    def _new_handshake(self, transport: asyncio.Transport) -> Handshake:
        keyring, me = self._owner.keyring, self._owner.me
        if not self._dialing:
            return Handshake(me, find=self._find_open if keyring is None else keyring.find)
        if keyring is None:
            credentials = open_credentials(self._owner.secret)
        else:
            credentials = keyring.check_certificate(
                transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
            )
        self._parser.cluster = credentials.cluster
        return Handshake(me, credentials=credentials)

    def _find_open(self, cluster: bytes) -> Credentials | None:
        return open_credentials(self._owner.secret) if cluster == frames.NO_CLUSTER else None

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._owner.waste if self._leaving or self.over.done() else self._parser.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._heard, self.stalled = time.monotonic(), False
        self.traffic.bytes_received += nbytes
        if self._leaving or self.over.done():
            return
        try:
            for message in self._parser.fed(nbytes):
                self._take(message)
                if self._leaving or self.over.done():
                    return
            self._wait_for_more()
        except FrameError as error:
            self._break(error)
        except Refusal as error:
            self._refuse(error)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport is not None:
            self._settle(self._transport)  # first: the sender that waited for it may have more to send
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connections.discard(self)
        self._owner.past.add(self.traffic.bytes_sent, self.traffic.bytes_received)
        if not self.gone.done():
            self.gone.set_result(None)
        if self._leaving:
            self.end(self.reason)
        elif exc is not None:
            problem = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else str(exc)
            self.end(f"the connection broke: {problem}")
        elif self._dialing and self.traffic.bytes_received == 0:
            self.end(
                "it hung up without a word"
                + ("" if self._encrypted else "; does it want a token? (smolcluster token add)")
            )
        else:
            self.end("the connection was closed")
        self._let_go()

    def _let_go(self) -> None:
        """Leave no circle behind: a million pending connections may come, and none waits for the garbage collector."""
        self._parser.close()
        self._transport = self._handshake = None
        if self._put_out is not None:
            self._put_out.cancel()
