"""Follow a file that another process writes, line by line.

    no file yet                   no lines
    it grew                       the new complete lines
    replaced, truncated           all lines again, and `restarted` is set

A poll of an unchanged file is one `stat`. Only plain files are read, and no symbolic links: a process that may write into a
run directory cannot make the reader open something else.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_BYTES = 4 << 20  # of one poll: a long file is read in pieces
_ANCHOR_BYTES = 64  # before the current position: unchanged if the file was only appended to
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a plain file. Raises OSError for anything else: a link, a folder, a pipe."""
    descriptor = os.open(path, _FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def lstat(path: Path) -> os.stat_result | None:
    """Return the status of a path, without following a link; None if it is not available."""
    try:
        return os.lstat(path)
    except (OSError, ValueError):
        return None


def read_at(descriptor: int, position: int, count: int) -> bytes:
    """Read `count` bytes from `position`, fewer at the end of the file."""
    os.lseek(descriptor, position, os.SEEK_SET)
    parts = []
    while count > 0 and (part := os.read(descriptor, count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_file(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes | None:
    """Read a small file; None if it is missing or larger."""
    with contextlib.suppress(OSError), opened(path) as descriptor:
        found = read_at(descriptor, 0, max_bytes + 1)
        return found if len(found) <= max_bytes else None
    return None


def read_start(path: Path) -> bytes:
    """Read the first 16 KiB of a file; empty if it is missing."""
    with contextlib.suppress(OSError), opened(path) as descriptor:
        return read_at(descriptor, 0, 16 << 10)
    return b""


@dataclass(slots=True)
class PollResult:
    lines: list[bytes] = field(default_factory=list)
    restarted: bool = False  # discard earlier lines
    more: bool = False  # the poll stopped before the end of the file


class LineFollower:
    """Reads the new lines of a file. `skip_to_last`: begin at most this number of bytes before the end of the file."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, skip_to_last: int | None = None) -> None:
        self.path = path
        self.modified: float | None = None  # when the file last changed
        self._max_bytes, self._skip_to_last = max_bytes, skip_to_last
        self._seen: tuple[int, int, int, int] | None = None  # device, inode, size, modified
        self._behind = False  # the last poll stopped before the end
        self._position = 0
        self._anchor = b""
        self._skipping = False  # inside a line whose beginning was not read, or that is longer than a poll

    @property
    def size(self) -> int:
        """The size of the file at the last poll."""
        return 0 if self._seen is None else self._seen[2]

    def poll(self) -> PollResult:
        try:
            found = os.lstat(self.path)
            now = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if now == self._seen and not self._behind:
                return PollResult()
            with opened(self.path) as descriptor:
                result = self._read(descriptor, replaced=self._seen is not None and now[:2] != self._seen[:2])
        except OSError:  # no file, or not readable
            removed, self._seen, self._behind = self._seen is not None, None, False
            self._seek(0)
            return PollResult(restarted=removed)
        self._seen, self.modified = now, found.st_mtime
        return result

    def _seek(self, position: int) -> None:
        self._position, self._anchor, self._skipping = position, b"", position > 0

    def _read(self, descriptor: int, *, replaced: bool) -> PollResult:
        size = os.fstat(descriptor).st_size
        result = PollResult()
        start = self._position - len(self._anchor)
        if replaced or read_at(descriptor, start, len(self._anchor)) != self._anchor:
            result.restarted = True
            self._seek(0)
        if self._position == 0 and self._skip_to_last is not None and size > self._skip_to_last:
            self._seek(size - self._skip_to_last)

        block = read_at(descriptor, self._position, self._max_bytes)
        complete = block[: block.rfind(b"\n") + 1]
        if not complete and len(block) == self._max_bytes:  # skip a line longer than a poll
            complete, self._skipping = block, True
        elif complete:
            lines = complete.split(b"\n")[:-1]
            result.lines = [line for line in lines[self._skipping :] if line.strip()]
            self._skipping = False
        self._position += len(complete)
        self._anchor = (self._anchor + complete)[-_ANCHOR_BYTES:]
        self._behind = result.more = bool(complete) and self._position < size
        return result
