"""One process does the work while the others wait for it.

Several workers of one machine start at the same moment and want the same download or token file. The first to create
the lock file works; the rest wait until the result is there. The lock only saves work. That the result is right never
depends on it: the one that works writes a temporary file and renames it, and every worker would write the same bytes. So a
lock may be taken over generously, and no platform's own file locking is needed.

A lock is stale when its owner is gone (same host), or when its owner has not touched it for STALE_S (any host).
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

STALE_S = 60.0
POLL_S = 0.05


class Lock:
    """A file that exists while its owner works."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mine = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "nonce": uuid.uuid4().hex})

    def acquire(self) -> bool:
        """True when the lock is ours now, False when another process holds it."""
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        except PermissionError:
            # Windows answers so while a deleted lock is still open elsewhere; anywhere else the folder is not writable.
            if os.name == "nt" and self.path.exists():
                return False
            raise
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(self._mine)
        return True

    def beat(self) -> None:
        """Tell those who wait that we are still at work."""
        try:
            os.utime(self.path)
        except OSError:
            pass  # taken over; harmless, see above

    def release(self) -> None:
        try:
            if self.path.read_text(encoding="utf-8") == self._mine:
                self.path.unlink()
        except OSError:
            pass  # taken over, or still open elsewhere on Windows: then it goes stale


def _owner_is_gone(content: str) -> bool:
    """Whether the owner ran on this host and runs no more. Unsure means no."""
    try:
        owner = json.loads(content)
        if owner["host"] != socket.gethostname() or os.name == "nt":
            return False
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except (ValueError, KeyError, TypeError, OverflowError, OSError):
        return False
    return False


def _wait_for_change(path: Path) -> None:
    """Return when the lock is gone; remove it when it is stale; otherwise wait a moment at a time."""
    seen: tuple[str, int] | None = None
    since = time.monotonic()
    while True:
        try:
            now = (path.read_text(encoding="utf-8"), path.stat().st_mtime_ns)
        except OSError:
            return
        if now != seen:
            seen, since = now, time.monotonic()
        if _owner_is_gone(now[0]) or time.monotonic() - since > STALE_S:
            try:
                path.unlink(missing_ok=True)
            except PermissionError:
                pass  # still open elsewhere on Windows
            return
        time.sleep(POLL_S)


def once(lock_path: Path, *, ready: Callable[[], T | None], produce: Callable[[Callable[[], None]], T]) -> T:
    """The result of `ready()`, made by `produce(beat)` in one of the processes that ask for it at the same time.

    `produce` calls `beat` every few seconds at least. Whatever it raises is raised here, and another process tries.
    """
    result = ready()
    if result is not None:
        return result
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(lock_path)
    while not lock.acquire():
        _wait_for_change(lock_path)
        result = ready()
        if result is not None:
            return result
    try:
        # Another process may have finished between our last look and our lock.
        result = ready()
        return produce(lock.beat) if result is None else result
    finally:
        lock.release()
