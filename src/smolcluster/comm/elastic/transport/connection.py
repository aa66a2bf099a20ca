"""One TCP connection of the elastic plane.

Reading. asyncio receives straight into the tensor that `Handler.place` returned, without a copy. On a slow network every
packet would wake the loop: inside a payload SO_RCVLOWAT makes the kernel wait for a larger part, never for more than is
certain to arrive.

Writing. `send` appends a frame to the queue (send_queue.py), from any thread, and wakes the loop. The loop writes slices while
the socket accepts them. asyncio's own buffer is kept empty: after a payload's last slice its memory is free and its `Work`
done. Messages leave in the order of `send`; only a BEAT may go between two of them.

Backpressure. Queued bytes are limited. A state is sent all at once and may exceed any fixed limit, so the limit grows with
the largest set of messages that was queued. A peer whose socket takes nothing for `stuck_s` is dropped too.

End. `close` sends BYE after what is queued, and the peer closes the connection. An error on either side ends it at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from smolcluster.comm.elastic.transport import frames
from smolcluster.comm.elastic.transport.api import Handler, Kind, Link, Message, Peer
from smolcluster.comm.elastic.transport.frames import Frame, FrameError
from smolcluster.comm.elastic.transport.handshake import MAX_REASON, Handshake, Refusal, printable
from smolcluster.comm.elastic.transport.parser import Parser
from smolcluster.comm.elastic.transport.pending_connections import Candidate, PendingConnections
from smolcluster.comm.elastic.transport.security import Credentials, Keyring, NoToken, TokenRefused
from smolcluster.comm.elastic.transport.send_queue import PendingSend, SendQueue
from smolcluster.comm.elastic.transport.sockets import set_options, unanswered_s, wake_at
from smolcluster.comm.work import Done, Traffic, Work

LINGER_S = 1.0  # a closing link ends when no byte has been sent for this long
READ_AT_BYTES = 1 << 16  # inside a payload: wake up for this many bytes
TLS_HOLDS_BYTES = 20_000  # the TLS layer may hold an incomplete record, of up to 16 KB and its overhead
TURN_BYTES = 1 << 22  # written by one link before other links have their turn


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Sizes, rates and timeouts of links."""

    payload_bytes: int = frames.PAYLOAD_BYTES  # of one message
    queued_bytes: int = 1 << 33  # of one link, or `SETS_WAITING` sets; references to the sender's tensors, not copies
    messages_per_s: int = 50_000
    unauthenticated: int = 256  # connections at once
    handshake_s: float = 4.5
    beat_s: float = 0.3  # interval of heartbeats
    silence_s: float = 1.75  # a link ends when the peer was silent for this long
    stall_s: float = 0.0  # if longer than silence_s: the limit while the peer's kernel still acknowledges what we send
    stuck_s: float = 300.0  # the socket takes nothing; on a slow network a large buffer stays full for minutes


class Owner(Protocol):
    """The part of `TcpTransport` that a link uses."""

    me: Peer
    keyring: Keyring | None
    secret: bytes
    buffer_size: int | None
    limits: LinkLimits
    links: set[TcpLink]
    connections: set[TcpLink]
    past: Traffic
    waste: memoryview
    loop: asyncio.AbstractEventLoop
    pending: PendingConnections

    @property
    def run(self) -> bytes: ...

    def post(self, callback: Callable[..., object], *args: object) -> None: ...


class TcpLink(Link, Candidate, asyncio.BufferedProtocol):
    """A connection, unauthenticated until the handshake is done; then `linked` is set and the handler notified.

    The methods under "Any thread" are thread-safe; all others run on the transport's thread.
    """

    def __init__(self, owner: Owner, handler: Handler, address: str, *, dialing: bool) -> None:
        self.traffic = Traffic()
        self.address = address
        self.linked = False
        self.refusal = ""  # why dialling this address again is useless
        self.reason = "not linked yet"  # why the link ended
        self.decided: asyncio.Future[None] = owner.loop.create_future()  # linked, or over
        self.over: asyncio.Future[None] = owner.loop.create_future()
        self.gone: asyncio.Future[None] = owner.loop.create_future()  # asyncio has closed the socket

        self._owner, self._handler, self._dialing = owner, handler, dialing
        self._encrypted = owner.keyring is not None
        self._transport: asyncio.Transport | None = None
        self._handshake: Handshake | None = None
        self._parser = Parser(
            place=lambda head: handler.place(self, head),
            run=lambda: owner.run,
            cluster=None,
            payload_bytes=owner.limits.payload_bytes,
            checked=not self._encrypted,
        )
        self._received_at = self._received_at_beat = time.monotonic()
        self._wake_at, self._can_wake_late = 1, True
        self._second, self._messages = 0, 0  # messages received in this second
        self._leaving = False  # we are closing; further input is ignored
        self._abort_timer: asyncio.TimerHandle | None = None  # for a peer that does not close after our last message

        self._queue = SendQueue(max_bytes=owner.limits.queued_bytes)  # its lock guards `open` too
        self.open = False
        self._written_at_beat = 0
        self._paused = False
        self._taken_bytes, self._taken_at = 0, time.monotonic()  # by the socket, and when it last took some

    # Any thread

    def send(self, message: Message, *, sent: Callable[[bool], None] | None = None) -> Work:
        frame = self._encode(message)
        work = PendingSend(sent) if frame.payload is not None or sent is not None else None
        with self._queue.lock:
            accepting = self.open
            wake = accepting and self._queue.append(frame, work, message=message)
        if not accepting:
            if sent is not None:
                self._owner.post(sent, False)
            lost = PendingSend(None)
            lost.finish(lost=self._name(self.reason))
            return lost
        if self.queued_bytes > self._queue.max_bytes:
            self._owner.post(self.end, f"{self._too_slow()}, the limit is {self._queue.max_bytes}")
        elif wake:
            self._owner.post(self._pump)
        return work if work is not None else Done()

    def _too_slow(self) -> str:
        return f"too slow: {self.queued_bytes} bytes are waiting to be sent"

    @property
    def queued_bytes(self) -> int:
        return 0 if self.over.done() else max(0, self._queue.accepted_bytes - self.traffic.bytes_sent)

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._received_at

    def close(self, reason: str) -> None:
        with self._queue.lock:
            if not self.open:
                return
            self.open, self.reason = False, reason
        self._owner.post(self.leave, reason)

    # Liveness

    def beat(self) -> None:
        """Send a BEAT, unless something was written since the last one or is being written."""
        quiet = self._queue.written_bytes == self._written_at_beat and self._queue.is_empty
        if quiet and not self._paused and not self._leaving:
            self._send_now(Message(kind=Kind.BEAT))
        self._written_at_beat = self._queue.written_bytes
        if self._received_at == self._received_at_beat:
            self._set_wake_at(1)  # slow network: read what has arrived, which also shows that the peer is alive
        self._received_at_beat = self._received_at

    def check_liveness(self, now: float, *, suspended_s: float) -> None:
        """End the link if the peer has sent nothing, or taken nothing of what is queued, for too long.

        Time in which this process was suspended does not count, and after it every peer has at least half of `silence_s`
        again: it may have been suspended too.
        """
        limits = self._owner.limits
        if suspended_s > limits.beat_s:
            self._received_at = max(self._received_at + suspended_s, now - limits.silence_s / 2)
            self._taken_at = min(now, self._taken_at + suspended_s)
        silent_s = now - self._received_at
        self.stalled = silent_s > limits.silence_s
        if self.stalled and (silent_s > limits.stall_s or not self._kernel_answers()):
            self.end(f"silent for {silent_s:.1f} s")
        elif (stuck_s := self._stuck_s(now)) > limits.stuck_s:
            self.end(f"{self._too_slow()}, and none was sent for {stuck_s:.1f} s")

    def _kernel_answers(self) -> bool:
        """Return whether the peer's kernel still acknowledges our bytes, as far as this system can tell."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        unanswered = None if sock is None else unanswered_s(sock)
        return unanswered is None or unanswered < self._owner.limits.silence_s / 2

    def _stuck_s(self, now: float) -> float:
        """Return for how long bytes have been queued and the socket has taken none."""
        if self._transport is not None:
            taken_bytes = self._queue.written_bytes - self._transport.get_write_buffer_size()
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
        )

    def _pump(self) -> None:
        """Write until the socket is full, the queue is empty, or other links should have their turn."""
        transport, turn_ends = self._transport, self._queue.written_bytes + TURN_BYTES
        if transport is None:
            return
        while not self._paused and not transport.is_closing():
            if self._queue.written_bytes > turn_ends:
                self._owner.loop.call_soon(self._pump)
                break
            chunk = self._queue.next_chunk()
            if chunk is None:
                break
            transport.write(chunk)
        self._finish_sent(transport)

    def _finish_sent(self, transport: asyncio.Transport) -> None:
        """Finish the payloads that the socket has taken completely."""
        if transport.is_closing():
            return  # its buffer is lost; `end` finishes them
        sent_bytes = self._queue.written_bytes - transport.get_write_buffer_size()  # a little less than that under TLS
        self.traffic.bytes_sent = max(self.traffic.bytes_sent, sent_bytes)
        self._queue.finish_sent(sent_bytes)

    def _send_now(self, message: Message) -> None:
        """Write a small message between two frames, ahead of the queue."""
        if self._transport is None or self._transport.is_closing():
            return
        frame = self._encode(message)
        self._queue.skip_ahead(frame)
        self._transport.write(frame.head)
        self._finish_sent(self._transport)

    # Reading

    def _wait_for_more(self) -> None:
        """Sleep until a larger part of the current payload has arrived; between payloads, until anything has."""
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
            self._continue_handshake(message)
        elif message.kind is not Kind.BEAT:
            self._handler.received(self, message)

    def _count(self) -> None:
        second = int(time.monotonic())
        self._messages = self._messages + 1 if second == self._second else 1
        self._second = second
        if self._messages > self._owner.limits.messages_per_s:
            raise frames.TooLarge(f"more than {self._owner.limits.messages_per_s} messages in a second")

    def _continue_handshake(self, message: Message) -> None:
        assert self._handshake is not None
        assert self._parser.cluster is not None
        for reply in self._handshake.handle(message, cluster=self._parser.cluster):
            self._send_now(reply)
        if self._handshake.peer is None:
            return
        self.peer, self.binding = self._handshake.peer, self._handshake.binding
        self.linked = self.open = self._parser.authenticated = True
        self._owner.links.add(self)
        self.decided.set_result(None)
        self._handler.linked(self)

    # Ending

    def leave(self, reason: str) -> None:
        """Send BYE after what is queued; end when the peer has closed, or no byte was sent for LINGER_S."""
        if self.over.done() or self._leaving:
            return
        self._leaving = True
        frame = self._encode(Message(kind=Kind.BYE, meta={"reason": reason[:MAX_REASON]}))
        with self._queue.lock:
            self.open, self.reason = False, reason
            self._queue.append(frame)
        self._pump()
        self._linger(-1)

    def _linger(self, sent_before: int) -> None:
        if self.traffic.bytes_sent == sent_before:
            self.end(self.reason)
        elif not self.over.done():
            self._owner.loop.call_later(LINGER_S, self._linger, self.traffic.bytes_sent)

    def _refuse(self, error: Refusal) -> None:
        """End the handshake; send the peer the reason, unless the refusal came from it."""
        if error.notify:
            self._send_now(Message(kind=Kind.REFUSE, meta={"reason": str(error)}))
        self.end(str(error), flush=True)
        if self._dialing:
            self.refusal = str(error)
        else:
            self._handler.refused(self.address, str(error))

    def _break(self, error: FrameError) -> None:
        """End the link: the peer's bytes cannot be parsed."""
        if self.linked:
            if self._queue.is_between_frames and not self._paused:
                self._send_now(Message(kind=Kind.BYE, meta={"reason": f"invalid frame: {error}"[:MAX_REASON]}))
            self.end(str(error), flush=True)
        elif isinstance(error, frames.WrongVersion) or (self._dialing and isinstance(error, frames.UnknownProtocol)):
            self._refuse(Refusal(str(error)))
        else:
            self._owner.pending.note(self.address, str(error))
            foreign = isinstance(error, frames.UnknownProtocol)
            if foreign:
                self._send_now(Message(kind=Kind.REFUSE))  # any response tells a TLS client that we do not speak TLS
            self.end(str(error), flush=foreign)

    def end(self, reason: str, *, flush: bool = False) -> None:
        """End the link now: `wait` of its payloads raises PeerLost, the handler is notified.

        `flush`: first send what asyncio has buffered.
        """
        if self.over.done():
            return
        self.over.set_result(None)
        with self._queue.lock:
            self.open, self.reason = False, reason
            works = self._queue.clear()
        for work in works:
            work.finish(lost=self._name(reason))
        if self._transport is not None and not flush:
            self._transport.abort()
        elif self._transport is not None:
            self._transport.close()
            self._abort_timer = self._owner.loop.call_later(LINGER_S, self.abort)
        else:  # never connected
            self._release()
        self._owner.links.discard(self)
        if not self.decided.done():
            self.decided.set_result(None)
        if self.linked:
            self._handler.unlinked(self, reason)

    def abort(self) -> None:
        """Drop the connection without sending what is buffered, even while it is being closed."""
        if self._transport is not None:
            self._transport.abort()

    def _name(self, reason: str) -> str:
        return f"{self.peer.name}: {reason}" if self.linked else reason

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
        self._owner.connections.add(self)
        if self.over.done():
            transport.abort()
            return
        # Pause at the first buffered byte. Under TLS a buffer as large as the mark counts as full.
        transport.set_write_buffer_limits(high=1 if self._encrypted else 0)
        set_options(transport.get_extra_info("socket"), buffer_size=self._owner.buffer_size)
        try:
            self._handshake = self._new_handshake(transport)
        except TokenRefused as error:
            self._refuse(Refusal(str(error), notify=False))
            return
        for message in self._handshake.begin():
            self._send_now(message)

    def _new_handshake(self, transport: asyncio.Transport) -> Handshake:
        keyring, me = self._owner.keyring, self._owner.me
        if not self._dialing:
            return Handshake(me, find=self._find_open if keyring is None else keyring.find)
        if keyring is None:
            credentials: Credentials = NoToken(self._owner.secret)
        else:
            credentials = keyring.check_certificate(
                transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
            )
        self._parser.cluster = credentials.cluster
        return Handshake(me, credentials=credentials)

    def _find_open(self, cluster: bytes) -> Credentials | None:
        return NoToken(self._owner.secret) if cluster == frames.NO_CLUSTER else None

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._owner.waste if self._leaving or self.over.done() else self._parser.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._received_at, self.stalled = time.monotonic(), False
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
            self._finish_sent(self._transport)  # first: a sender that waited for it may have more to send
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
            self.end(f"connection error: {problem}")
        elif self._dialing and self.traffic.bytes_received == 0:
            self.end(
                "the peer closed the connection without a response"
                + ("" if self._encrypted else "; does it need a token? (smolcluster token add)")
            )
        else:
            self.end("the connection was closed")
        self._release()

    def _release(self) -> None:
        """Break reference cycles: rejected connections are freed at once, not by the garbage collector."""
        self._parser.close()
        self._transport = self._handshake = None
        if self._abort_timer is not None:
            self._abort_timer.cancel()
