"""One reader for each run, shared by all its viewers.

A reader is polled twice a second while it has viewers. Each change is encoded once, and the same bytes are sent to all viewers.
The last changes are kept in a ring buffer: a viewer that reconnects continues after its Last-Event-ID. Nothing is buffered for
a slow viewer: once its position has left the ring it gets a snapshot.

    viewer at 40, ring 38..45: gets 41..45        viewer at 12, ring 38..45: gets a snapshot at 45
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from smolcluster.dashboard.run_reader import RunReader
from smolcluster.dashboard.runs import RunFolder
from smolcluster.dashboard.snapshot_stream import SnapshotStream
from smolcluster.observe.machine import describe_machine

POLL_S = 0.5
POLL_ENDED_S = 2.0
BEAT_S = 3.0  # without changes, after which a viewer gets a heartbeat
RING = 64
MAX_VIEWERS = 200
MAX_READERS = 16
LOCAL_FACTS_S = 5.0  # between two readings of this machine
P = ParamSpec("P")
T = TypeVar("T")


class TooManyViewers(Exception):
    """The limit of viewers is reached."""


def shielded(work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Shield an async method from cancellation of its caller: its thread cannot be interrupted, and the reader is not
    thread-safe."""

    @functools.wraps(work)
    async def run(*args: P.args, **named: P.kwargs) -> T:
        return await asyncio.shield(asyncio.ensure_future(work(*args, **named)))

    return run


class RunChannel:
    """One run, and the ring of its latest changes."""

    def __init__(self, reader: RunReader, *, local_facts: Callable[[], dict[str, Any]]) -> None:
        self.reader, self._local_facts = reader, local_facts
        self._stream = SnapshotStream(reader)
        self.viewers = 0
        self.closing = False
        self._process_id = secrets.token_hex(4)  # distinguishes our event ids from those of an earlier process
        self._number = 0
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=RING)
        self._snapshot: tuple[int, bytes] | None = None
        self._changed = asyncio.Condition()
        self._reading = asyncio.Lock()  # a reader is used by one thread at a time
        self._task: asyncio.Task[None] | None = None
        self._encoded_at = 0.0
        self._failed = False  # the polling task has ended with an error

    @shielded
    async def snapshot(self) -> dict[str, Any]:
        """Read the run to its end and return a snapshot."""
        async with self._reading:
            self.reader.local_facts = await asyncio.to_thread(self._local_facts)
            await asyncio.to_thread(self.reader.poll_to_the_end)
            snapshot = await asyncio.to_thread(self._stream.snapshot)
            # Publish pending changes before the snapshot is returned, so that no viewer gets a change twice.
            self._put(await asyncio.to_thread(self._stream.changes))
        await self._notify()
        return snapshot

    async def events(self, last_id: str | None) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of one viewer: a snapshot or the missed changes, then changes and heartbeats.

        Ends when polling fails, so that the page shows the failure. A viewer that reconnects restarts polling.
        """
        at = self._position_of(last_id)
        self.viewers += 1
        try:
            yield b"retry: 1000\n\n"
            if self._number == 0:
                await self._poll()
            if (self._task is None or self._task.done()) and not self.closing:
                self._task = asyncio.create_task(self._follow())
            while True:
                if at is None or (self._ring and at < self._ring[0][0] - 1):
                    at, event = await self._snapshot_event()
                    yield event
                elif at < self._number:
                    missed = b"".join(event for number, event in self._ring if number > at)
                    at = self._number
                    yield missed
                elif self.closing:
                    yield b"event: bye\ndata: {}\n\n"
                    return
                elif self._failed:
                    return
                elif not await self._wait(at):
                    yield b'event: beat\ndata: {"time": %.2f}\n\n' % time.time()
        finally:
            self.viewers -= 1

    async def close(self) -> None:
        """Send the last changes and an event `bye` to all viewers."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            with contextlib.suppress(Exception):
                await self._poll()
        self.closing = True
        await self._notify()

    def _position_of(self, last_id: str | None) -> int | None:
        process_id, _, number = (last_id or "").partition("-")
        if process_id != self._process_id or not re.fullmatch(r"[0-9]{1,15}", number) or int(number) > self._number:
            return None
        return int(number)

    async def _wait(self, at: int) -> bool:
        """Wait for a change after `at`. Return False after `BEAT_S` without one."""
        try:
            async with asyncio.timeout(BEAT_S), self._changed:
                await self._changed.wait_for(lambda: self._number > at or self.closing or self._failed)
        except TimeoutError:
            return False
        return True

    @shielded
    async def _snapshot_event(self) -> tuple[int, bytes]:
        """Return the current snapshot, encoded once for all requests before the next change."""
        async with self._reading:
            if self._snapshot is None or self._snapshot[0] != self._number:
                snapshot = await asyncio.to_thread(self._stream.snapshot)
                self._snapshot = (self._number, await asyncio.to_thread(self._sse_event, "snapshot", snapshot))
            return self._snapshot

    async def _follow(self) -> None:
        self._failed = False
        try:
            while self.viewers:
                await self._poll()
                await asyncio.sleep(0.02 if self.reader.has_more else POLL_ENDED_S if self.reader.ended else POLL_S)
        except Exception:
            self._failed = True
            await self._notify()
            raise  # asyncio logs it

    @shielded
    async def _poll(self) -> None:
        async with self._reading:
            self._put(await asyncio.to_thread(self._read_changes))
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _put(self, changes: dict[str, Any] | None) -> None:
        """Add to the ring, for all viewers."""
        if changes is None:
            return
        self._number += 1
        kind = "snapshot" if changes.get("whole") else "changes"
        event = self._sse_event(kind, changes)
        self._ring.append((self._number, event))
        if kind == "snapshot":
            self._snapshot = (self._number, event)

    def _read_changes(self) -> dict[str, Any] | None:
        self.reader.local_facts = self._local_facts()
        found = self.reader.poll()
        # A long run that is read for the first time takes many polls: do not encode after each.
        while self.reader.has_more and time.monotonic() - self._encoded_at < POLL_S:
            found |= self.reader.poll()
        if not found and self.reader.ended and self._number:
            return None
        self._encoded_at = time.monotonic()
        return self._stream.changes()

    def _sse_event(self, kind: str, value: dict[str, Any]) -> bytes:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        return f"id: {self._process_id}-{self._number}\nevent: {kind}\ndata: {text}\n\n".encode()


class Hub:
    """The channels of all runs. Those without viewers are dropped, the least recently used first."""

    def __init__(self, runs: RunFolder) -> None:
        self.runs = runs
        self._channels: OrderedDict[str, RunChannel] = OrderedDict()
        self._facts: tuple[float, dict[str, Any]] = (-math.inf, {})
        self._facts_lock = threading.Lock()
        self._closing = False

    @property
    def viewers(self) -> int:
        return sum(channel.viewers for channel in self._channels.values())

    def check_viewer_limit(self) -> None:
        if self.viewers >= MAX_VIEWERS:
            raise TooManyViewers

    async def channel(self, name: str) -> RunChannel:
        """Return the channel of a run. Raises NoSuchRun."""
        path = await asyncio.to_thread(self.runs.find, name)
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = RunChannel(RunReader(path), local_facts=self._local_facts)
            channel.closing = self._closing
        self._channels.move_to_end(name)
        unused = [key for key, kept in self._channels.items() if not kept.viewers and key != name]
        for key in unused[: max(0, len(self._channels) - MAX_READERS)]:
            del self._channels[key]
        return channel

    def _local_facts(self) -> dict[str, Any]:
        """Return the latest facts of this machine, and refresh them in a thread: nvidia-smi may take seconds."""
        if time.monotonic() - self._facts[0] >= LOCAL_FACTS_S and self._facts_lock.acquire(blocking=False):
            threading.Thread(target=self._describe, daemon=True).start()
        return self._facts[1]

    def _describe(self) -> None:
        try:
            self._facts = (time.monotonic(), describe_machine(run_nvidia_smi=True))
        finally:
            self._facts_lock.release()

    async def close(self) -> None:
        self._closing = True
        for channel in list(self._channels.values()):
            await channel.close()
