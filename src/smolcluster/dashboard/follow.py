"""Whole lines of a file that others write, as they come.

    the file is not there yet     no lines
    it grew                       the new whole lines; half a line waits for its other half
    it was replaced, cut, emptied all lines again, and `restarted` says so

A poll of a file that did not change is one `stat`. Nothing is read through a symbolic link, and only plain files are read:
a process that may write into a run directory cannot make the reader open something else.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MOST_BYTES = 4 << 20  # of one poll: a long file is read in pieces, and others get their turn between them
_PROOF_BYTES = 64  # before the place we stand at: still the same if the file only grew
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a plain file. Raises OSError for anything else: a link, a folder, a pipe."""
    descriptor = os.open(path, _FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def lstat(path: Path) -> os.stat_result | None:
    """What is there, not through a link; None: nothing, or nothing for us."""
    try:
        return os.lstat(path)
    except (OSError, ValueError):
        return None


def read_at(descriptor: int, position: int, count: int) -> bytes:
    """`count` bytes from `position`, or as many as there are."""
    os.lseek(descriptor, position, os.SEEK_SET)
    parts = []
    while count > 0 and (part := os.read(descriptor, count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_whole(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes | None:
    """A small file; None where there is none, or it is larger than that."""
    with contextlib.suppress(OSError), opened(path) as descriptor:
        found = read_at(descriptor, 0, most_bytes + 1)
        return found if len(found) <= most_bytes else None
    return None


def read_start(path: Path) -> bytes:
    """The first bytes of a file; none where there is none."""
    with contextlib.suppress(OSError), opened(path) as descriptor:
        return read_at(descriptor, 0, 16 << 10)
    return b""


@dataclass(slots=True)
class PollResult:
    """What one poll found."""

    lines: list[bytes] = field(default_factory=list)
    restarted: bool = False  # forget all earlier lines: these are the first
    more: bool = False  # there is more to read already


class LineFollower:
    """`skip_to_last`: of a file that is longer at the first look, only so many of its last bytes are read."""

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES, skip_to_last: int | None = None) -> None:
        self.path = path
        self.modified: float | None = None  # when the file last changed, by its own clock
        self._most_bytes, self._skip_to_last = most_bytes, skip_to_last
        self._seen: tuple[int, int, int, int] | None = None  # device, inode, size, modified
        self._behind = False  # the last poll stopped before the end
        self._position = 0
        self._proof = b""
        self._skipping = False  # inside a line that is longer than a poll, or whose beginning was skipped

    @property
    def size(self) -> int:
        """Of the file, at the last poll."""
        return 0 if self._seen is None else self._seen[2]

    def poll(self) -> PollResult:
        try:
            found = os.lstat(self.path)
            now = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if now == self._seen and not self._behind:
                return PollResult()
            with opened(self.path) as descriptor:
                news = self._read(descriptor, replaced=self._seen is not None and now[:2] != self._seen[:2])
        except OSError:  # not there (any more), or not for us
            gone, self._seen, self._behind = self._seen is not None, None, False
            self._begin_again(0)
            return PollResult(restarted=gone)
        self._seen, self.modified = now, found.st_mtime
        return news

    def _begin_again(self, position: int) -> None:
        self._position, self._proof, self._skipping = position, b"", position > 0

    def _read(self, descriptor: int, *, replaced: bool) -> PollResult:
        size = os.fstat(descriptor).st_size
        news = PollResult()
        start = self._position - len(self._proof)
        if replaced or read_at(descriptor, start, len(self._proof)) != self._proof:
            news.restarted = True
            self._begin_again(0)
        if self._position == 0 and self._skip_to_last is not None and size > self._skip_to_last:
            self._begin_again(size - self._skip_to_last)

        block = read_at(descriptor, self._position, self._most_bytes)
        whole = block[: block.rfind(b"\n") + 1]
        if not whole and len(block) == self._most_bytes:  # a line without an end in sight is not ours: leave it out
            whole, self._skipping = block, True
        elif whole:
            lines = whole.split(b"\n")[:-1]
            news.lines = [line for line in lines[self._skipping :] if line.strip()]
            self._skipping = False
        self._position += len(whole)
        self._proof = (self._proof + whole)[-_PROOF_BYTES:]
        self._behind = news.more = bool(whole) and self._position < size
        return news
