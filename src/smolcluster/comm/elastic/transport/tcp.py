"""The transport over TCP: asyncio on a separate thread, TLS 1.3 when there is a keyring.

Liveness. Every `beat_s` an idle link sends a BEAT. A link ends when no byte has arrived for `silence_s`. Time in which this
process itself was suspended does not count. With `stall_s` a link is kept longer while the peer's kernel still acknowledges
data: then only the process is stopped or busy, for example in a call that holds the GIL.

Dialing. Retries have exponential backoff up to a second, with full jitter, so that a hundred workers do not reconnect to a
restarted server all at once. A refusal is final; a corrupted TLS handshake is retried.

`pending_connections.py` keeps incoming connections until they are authenticated; `connection.py` is one connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import ssl
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from smolcluster.comm.addresses import join_address, split_address
from smolcluster.comm.elastic.transport import frames
from smolcluster.comm.elastic.transport.api import LEFT, Dialer, Handler, Peer, Transport
from smolcluster.comm.elastic.transport.connection import LINGER_S, LinkLimits, TcpLink
from smolcluster.comm.elastic.transport.pending_connections import PendingConnections
from smolcluster.comm.elastic.transport.security import Keyring, explain, is_permanent
from smolcluster.comm.elastic.transport.sockets import dial, listen_on
from smolcluster.comm.work import Traffic

__all__ = ["LinkLimits", "TcpTransport"]

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
LOG_AFTER_S = 4.0  # not at once: both sides may just be starting
LOG_EVERY_S = 10.0
LONGEST_LINGER_S = 10.0


class TcpDialer(Dialer):
    def __init__(self, owner: TcpTransport, address: str, handler: Handler) -> None:
        self._owner, self._handler, self.address = owner, handler, address
        self._host, self._port = split_address(address)
        self._logged_at = time.monotonic() + LOG_AFTER_S - LOG_EVERY_S
        self.problem = ""  # why the last attempt failed
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        if not self._closed and not self._owner.closing:
            self._task = self._owner.start(self._keep_linked())

    def close(self) -> None:
        self._closed = True
        self._owner.post(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _keep_linked(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            link = await self._connect()
            if link.refusal:
                self._handler.refused(self.address, link.refusal)
                return
            if link.linked:
                await asyncio.wait([link.over])
                if time.monotonic() - began > LONGEST_PAUSE_S:
                    failures = 0
            else:
                self.problem = link.reason
                self._log()
            longest_s = min(FIRST_PAUSE_S * 2.0 ** min(failures, 16), LONGEST_PAUSE_S)
            failures += 1
            await asyncio.sleep(random.uniform(0, longest_s))

    async def _connect(self) -> TcpLink:
        """Return a link that is up, or over with its reason. Tries every token, the current one first."""
        for tls in self._owner.client_tls:
            link = TcpLink(self._owner, self._handler, address=self.address, dialing=True)
            if not await self._attempt(link, tls):
                break
        return link

    async def _attempt(self, link: TcpLink, tls: dict[str, Any]) -> bool:
        """Connect. Return whether another token may succeed."""
        owner, problem = self._owner, "cancelled"
        try:
            async with asyncio.timeout(owner.limits.handshake_s):
                sock = await dial(owner.loop, self._host, self._port)
                await owner.loop.create_connection(lambda: link, sock=sock, **tls)
                await asyncio.wait([link.decided])
        except TimeoutError:
            problem = "no response"
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            problem = "the peer closed the connection during the TLS handshake"
        except ssl.SSLError as error:
            problem = explain(error)
            if is_permanent(error):
                link.refusal = problem
            return isinstance(error, ssl.SSLCertVerificationError)
        except ConnectionError as error:
            # asyncio replaces strerror with its own text.
            problem = os.strerror(error.errno) if error.errno else str(error)
        except OSError as error:
            problem = error.strerror or str(error)
        finally:
            if not link.linked:
                link.end(problem)
        return False

    def _log(self) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            log.info("waiting for a peer at %s: %s", self.address, self.problem)
            self._logged_at = now


class TcpTransport(Transport):
    """Without a keyring nothing is encrypted and peers authenticate with `secret` only. With neither: loopback only."""

    def __init__(
        self,
        me: Peer,
        *,
        keyring: Keyring | None = None,
        secret: bytes = b"",
        buffer_size: int | None = None,
        limits: LinkLimits = LinkLimits(),  # noqa: B008 - it is frozen
        uvloop: bool = True,
    ) -> None:
        """`buffer_size`: of the sockets, in bytes; None: the system's default. `uvloop`: use it where it is installed."""
        self.me = me
        self.keyring, self.secret, self.buffer_size, self.limits = keyring, secret, buffer_size, limits
        self.links: set[TcpLink] = set()
        self.connections: set[TcpLink] = set()  # `links`, and those that are pending or closing
        self.past = Traffic()  # of connections that have ended
        self.waste = memoryview(bytearray(1 << 16))  # for input that is ignored
        self.tls: dict[str, Any] = {}
        self.client_tls: list[dict[str, Any]] = [{}]  # one per token
        if keyring is not None:
            self.tls = {"ssl_handshake_timeout": limits.handshake_s, "ssl_shutdown_timeout": LINGER_S}
            self.client_tls = [
                {"ssl": known.client_context(), "server_hostname": known.server_name, **self.tls}
                for known in keyring.credentials
            ]
        self._tasks: set[asyncio.Task[None]] = set()
        self._due = 0.0
        self._stop = asyncio.Event()
        self.loop = _new_loop(uvloop)
        self.pending = PendingConnections(
            self.loop, self.start, most=limits.unauthenticated, timeout_s=limits.handshake_s, tls=self.tls
        )
        self._thread = threading.Thread(target=self._work, name="smolcluster-transport", daemon=True)
        self._thread.start()

    @property
    def run(self) -> bytes:
        """Return the run id for frames. A worker that learns its run sets `me`; then frames of other runs are refused."""
        return frames.run_bytes(self.me.run)

    @property
    def traffic(self) -> Traffic:
        total = Traffic(self.past.bytes_sent, self.past.bytes_received)
        for link in list(self.connections):
            total.add(link.traffic.bytes_sent, link.traffic.bytes_received)
        return total

    def listen(self, host: str, port: int, handler: Handler) -> str:
        context = self.keyring.server_context() if self.keyring is not None else None
        listeners = listen_on(host, port, buffer_size=self.buffer_size)
        make = functools.partial(TcpLink, self, handler, dialing=False)
        self.post(self.pending.listen, listeners, make, context)
        return join_address(host, listeners[0].getsockname()[1])

    def dial(self, address: str, handler: Handler) -> TcpDialer:
        dialer = TcpDialer(self, address, handler)
        self.post(dialer.start)
        return dialer

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        if delay_s > 0:
            self.post(self.loop.call_later, delay_s, callback)
        else:
            self.post(callback)

    def close(self) -> None:
        self.post(self._stop.set)
        if threading.get_ident() != self._thread.ident:
            self._thread.join()

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Run a callback on the transport's thread. After `close` it is dropped."""
        if threading.get_ident() == self._thread.ident:
            self.loop.call_soon(callback, *args)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(callback, *args)

    @property
    def closing(self) -> bool:
        """Return whether nothing may start any more: a task that starts now would outlive the loop."""
        return self._stop.is_set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # The thread

    def _work(self) -> None:
        try:
            self.loop.run_until_complete(self._run_until_stopped())
        finally:
            self.loop.close()

    async def _run_until_stopped(self) -> None:
        self._due = time.monotonic()
        self._tick()
        await self._stop.wait()

        self.pending.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in list(self.links):
            link.leave(LEFT)
        await _all_done([link.over for link in self.links], timeout_s=LONGEST_LINGER_S)
        for link in list(self.connections):
            link.end(LEFT)
            link.abort()
        await _all_done([link.gone for link in self.connections], timeout_s=LINGER_S)

    def _tick(self) -> None:
        """Every `beat_s`: send heartbeats, and end links and pending connections that timed out."""
        now = time.monotonic()
        suspended_s = now - self._due
        self._due = now + self.limits.beat_s
        self.loop.call_later(self.limits.beat_s, self._tick)
        self.pending.expire(now)
        for link in list(self.links):
            link.beat()
            link.check_liveness(now, suspended_s=suspended_s)


async def _all_done(futures: list[asyncio.Future[None]], *, timeout_s: float) -> None:
    if futures:
        await asyncio.wait(futures, timeout=timeout_s)


def _new_loop(uvloop: bool) -> asyncio.AbstractEventLoop:
    if uvloop and sys.platform != "win32":
        with contextlib.suppress(ImportError):
            from uvloop import new_event_loop

            return new_event_loop()
    # On Windows too: the proactor loop there has no add_reader.
    return asyncio.SelectorEventLoop()
