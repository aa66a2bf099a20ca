"""One reader for each run, shared by all its viewers.

A reader is polled twice a second while it has viewers, and not at all while it has none. Each change is written as JSON once
and the same bytes go to every viewer, so that fifty cost hardly more than one. The last changes are kept in a ring: a viewer
whose connection broke goes on where it was (Last-Event-ID). One that reads too slowly is not waited for, and nothing
is buffered for it: when its place has left the ring it gets a snapshot.

    viewer at 40 -> ring 38..45: gets 41..45        viewer at 12 -> ring 38..45: gets a snapshot at 45
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
BEAT_S = 3.0  # silence after which a viewer gets a heartbeat
RING = 64
MOST_VIEWERS = 200
MOST_READERS = 16
LOCAL_FACTS_S = 5.0  # between two looks at this machine
P = ParamSpec("P")
T = TypeVar("T")


class TooManyViewers(Exception):
    """The limit of viewers is reached."""


def to_its_end(work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Let an async method run to its end where its caller leaves: its thread cannot be called back, and nobody else may use
    the reader before that has ended."""

    @functools.wraps(work)
    async def run(*args: P.args, **named: P.kwargs) -> T:
        return await asyncio.shield(asyncio.ensure_future(work(*args, **named)))

    return run


class RunChannel:
    """One run, and its latest changes."""

    def __init__(self, reader: RunReader, *, look_around: Callable[[], dict[str, Any]]) -> None:
        """`look_around` returns the facts of this machine."""
        self.reader, self._look_around = reader, look_around
        self._teller = SnapshotStream(reader)
        self.viewers = 0
        self.closing = False
        self._boot = secrets.token_hex(4)  # numbers of an earlier process mean nothing here
        self._number = 0
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=RING)
        self._snapshot: tuple[int, bytes] | None = None
        self._news = asyncio.Condition()
        self._reading = asyncio.Lock()  # a reader is used by one thread at a time
        self._task: asyncio.Task[None] | None = None
        self._told_at = 0.0
        self._failed = False  # the task that follows the run has ended with an error

    @to_its_end
    async def snapshot(self) -> dict[str, Any]:
        """The whole picture, read to the end."""
        async with self._reading:
            self.reader.local_facts = await asyncio.to_thread(self._look_around)
            await asyncio.to_thread(self.reader.poll_to_the_end)
            whole = await asyncio.to_thread(self._teller.snapshot)
            # Viewers get it now: one that comes later has it in its snapshot, and must not get it again.
            self._put(await asyncio.to_thread(self._teller.changes))
        await self._notify()
        return whole

    async def frames(self, last_id: str | None) -> AsyncGenerator[bytes, None]:
        """What one viewer is sent: a snapshot or what it missed, then changes and heartbeats as they come. It ends when the run
        can be followed no longer: a picture that stands still must not look alive. A viewer that reconnects starts it again."""
        at = self._place_of(last_id)
        self.viewers += 1
        try:
            yield b"retry: 1000\n\n"
            if self._number == 0:
                await self._look()
            if (self._task is None or self._task.done()) and not self.closing:
                self._task = asyncio.create_task(self._follow())
            while True:
                if at is None or (self._ring and at < self._ring[0][0] - 1):
                    at, frame = await self._whole()
                    yield frame
                elif at < self._number:
                    missed = b"".join(frame for number, frame in self._ring if number > at)
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
        """Send the last changes, and then to all viewers that there will be no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            with contextlib.suppress(Exception):
                await self._look()
        self.closing = True
        await self._notify()

    def _place_of(self, last_id: str | None) -> int | None:
        boot, _, number = (last_id or "").partition("-")
        if boot != self._boot or not re.fullmatch(r"[0-9]{1,15}", number) or int(number) > self._number:
            return None
        return int(number)

    async def _wait(self, at: int) -> bool:
        """Until there is something after `at`; False when there was nothing for a while."""
        try:
            async with asyncio.timeout(BEAT_S), self._news:
                await self._news.wait_for(lambda: self._number > at or self.closing or self._failed)
        except TimeoutError:
            return False
        return True

    @to_its_end
    async def _whole(self) -> tuple[int, bytes]:
        """The picture as it is now, written once for all requests before the next change."""
        async with self._reading:
            if self._snapshot is None or self._snapshot[0] != self._number:
                whole = await asyncio.to_thread(self._teller.snapshot)
                self._snapshot = (self._number, await asyncio.to_thread(self._frame, "snapshot", whole))
            return self._snapshot

    async def _follow(self) -> None:
        self._failed = False
        try:
            while self.viewers:
                await self._look()
                await asyncio.sleep(0.02 if self.reader.behind else POLL_ENDED_S if self.reader.ended else POLL_S)
        except Exception:
            self._failed = True
            await self._notify()
            raise  # asyncio logs it

    @to_its_end
    async def _look(self) -> None:
        async with self._reading:
            self._put(await asyncio.to_thread(self._poll))
        await self._notify()

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _put(self, told: dict[str, Any] | None) -> None:
        """Into the ring, for all viewers."""
        if told is None:
            return
        self._number += 1
        kind = "snapshot" if told.get("whole") else "changes"
        frame = self._frame(kind, told)
        self._ring.append((self._number, frame))
        if kind == "snapshot":
            self._snapshot = (self._number, frame)

    def _poll(self) -> dict[str, Any] | None:
        self.reader.local_facts = self._look_around()
        found = self.reader.poll()
        # A long run that is read for the first time is not drawn after every piece of it.
        while self.reader.behind and time.monotonic() - self._told_at < POLL_S:
            found |= self.reader.poll()
        if not found and self.reader.ended and self._number:
            return None
        self._told_at = time.monotonic()
        return self._teller.changes()

    def _frame(self, kind: str, told: dict[str, Any]) -> bytes:
        text = json.dumps(told, allow_nan=False, separators=(",", ":"))
        return f"id: {self._boot}-{self._number}\nevent: {kind}\ndata: {text}\n\n".encode()


class Hub:
    """All channels. Readers without viewers are dropped, the longest unused first."""

    def __init__(self, runs: RunFolder) -> None:
        self.runs = runs
        self._channels: OrderedDict[str, RunChannel] = OrderedDict()
        self._here: tuple[float, dict[str, Any]] = (-math.inf, {})
        self._looking = threading.Lock()
        self._closing = False

    @property
    def viewers(self) -> int:
        return sum(channel.viewers for channel in self._channels.values())

    def check_room(self) -> None:
        if self.viewers >= MOST_VIEWERS:
            raise TooManyViewers

    async def channel(self, name: str) -> RunChannel:
        """Raises NoSuchRun."""
        path = await asyncio.to_thread(self.runs.find, name)
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = RunChannel(RunReader(path), look_around=self._look_around)
            channel.closing = self._closing
        self._channels.move_to_end(name)
        unused = [key for key, kept in self._channels.items() if not kept.viewers and key != name]
        for key in unused[: max(0, len(self._channels) - MOST_READERS)]:
            del self._channels[key]
        return channel

    def _look_around(self) -> dict[str, Any]:
        """This machine, where rows do not tell of it: as it was at the last look. Asking a driver may take seconds, and nobody
        waits for that: the answer is there the next time."""
        if time.monotonic() - self._here[0] >= LOCAL_FACTS_S and self._looking.acquire(blocking=False):
            threading.Thread(target=self._look_again, daemon=True).start()
        return self._here[1]

    def _look_again(self) -> None:
        try:
            self._here = (time.monotonic(), describe_machine(ask_nvidia=True))
        finally:
            self._looking.release()

    async def close(self) -> None:
        self._closing = True
        for channel in list(self._channels.values()):
            await channel.close()
