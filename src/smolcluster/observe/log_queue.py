"""A log file read as a queue: unsent lines are read in order, and the offset after the last acknowledged line is saved.

    worker-rank0-mini2.log         written by the process, including its standard error; never changed here
    worker-rank0-mini2.log.sent    the offset, replaced atomically after every acknowledgement

The file is the buffer, so no line is lost in a crash or an outage. Each line gets a timestamp in nanoseconds that depends only
on the file:

    a record           its time, but at least one nanosecond after the previous line
    any other line     one nanosecond after the previous line: for example text printed while crashing

So timestamps are unique, increase through the file and are the same in every reading: a line that is sent again, because of a
crash before its offset was saved, is the same entry, and the receiver can drop it as a duplicate. A file that was truncated in
place is read from its start: nothing in it has been sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from smolcluster.durable_files import atomic_write
from smolcluster.locks import try_lock

PRINTED = "STDERR"  # the level of lines that are not records
BLOCK_BYTES = 512 * 1024  # of one read; a longer line is split
_HEAD_BYTES = 512  # distinguish the file from others with the same name
_JUMP_NS = 600 * 10**9  # if the clock is set back further than this, its new time is used
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LEVEL = re.compile(r"[A-Za-z][\w ]{0,19}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line, ready to be sent."""

    time_ns: int
    level: str
    logger: str  # empty for a line that is not a record
    text: str
    end: int  # where the next line begins in the file


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The offset of the next line, and the timestamp of the previous one."""

    offset: int
    time_ns: int


def entries_in(data: bytes, start: LogPosition) -> Iterator[LogEntry]:
    """Yield the lines of `data`, which begins at `start`, without empty ones."""
    offset, time_ns = start.offset, start.time_ns
    # Split at line feeds only: a progress bar has carriage returns inside its line.
    for line in data.split(b"\n"):
        offset += len(line) + 1
        text = line.decode("utf-8", "replace").rstrip("\r")
        if text.strip():
            record_ns, level, logger = _record(text)
            time_ns = _stamp(record_ns, time_ns)
            yield LogEntry(time_ns, level, logger, text, min(offset, start.offset + len(data)))


def _stamp(record_ns: int | None, before_ns: int) -> int:
    if record_ns is None or 0 <= before_ns - record_ns <= _JUMP_NS:
        return before_ns + 1
    return record_ns


def _record(text: str) -> tuple[int | None, str, str]:
    """Return time, level and logger of a record of `logs.JsonFormatter`; other lines have no time."""
    try:
        fields = json.loads(text) if text.startswith("{") else None
        if isinstance(fields, dict) and _LEVEL.fullmatch(level := str(fields["level"])):
            moment = datetime.fromisoformat(str(fields["time"]))
            if moment.tzinfo is not None:
                time_ns = (moment - _EPOCH) // timedelta(microseconds=1) * 1000
                return max(0, time_ns), level, str(fields.get("logger", ""))
    except (ValueError, KeyError, RecursionError, OverflowError):
        pass
    return None, PRINTED, ""


class LogQueue:
    """One log file, for one reader at a time. Lines are not kept in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._saved = path.with_name(path.name + ".sent")
        self._file: io.FileIO | None = None
        self._position = LogPosition(0, 0)
        self._known_head = (0, "")  # length and digest of the file's head

    def claim(self) -> bool:
        """Lock the file for this reader. Return False if it is missing or another process holds the lock."""
        if self._file is None:
            try:
                file = self.path.open("rb", buffering=0)  # a buffer would keep the contents of a truncated file
            except FileNotFoundError:
                return False
            if not _lock(file.fileno()):
                file.close()
                return False
            self._file = file
            self._position = self._load()
            self._remember_head()
        return True

    def read(self, *, final: bool = False) -> list[LogEntry]:
        """Return the next unacknowledged lines, at most a block. `final`: include a last line without a line feed."""
        if self._was_truncated():
            self._position = self._beginning()
        while data := self._pending():
            length = data.rfind(b"\n") + 1  # of complete lines
            if length == 0 and (final or len(data) == BLOCK_BYTES):
                length = len(data)
            if entries := list(entries_in(data[:length], self._position)):
                return entries
            if length == 0:
                break
            self._position = LogPosition(self._position.offset + length, self._position.time_ns)  # only empty lines
        return []

    def acknowledge(self, entry: LogEntry) -> None:
        """Save that this line and all earlier ones are sent."""
        self._position = LogPosition(entry.end, entry.time_ns)
        self._remember_head()
        self._save()

    def unsent_bytes(self) -> int:
        """Return the number of unacknowledged bytes."""
        size = self._size()
        # A file smaller than the offset was truncated: it is read from its start.
        return size - self._position.offset if size >= self._position.offset else size

    def close(self) -> None:
        if self._file is not None:
            self._file.close()  # which releases the lock
            self._file = None

    def _pending(self) -> bytes:
        assert self._file is not None
        self._file.seek(self._position.offset)
        return self._file.read(BLOCK_BYTES)

    def _size(self) -> int:
        if self._file is None:  # not claimed yet: nothing is known to be sent
            return self.path.stat().st_size if self.path.exists() else 0
        return os.fstat(self._file.fileno()).st_size

    def _remember_head(self) -> None:
        """Remember the head of the file, which does not change while it grows."""
        length = min(self._position.offset, _HEAD_BYTES)
        if length > self._known_head[0]:
            self._known_head = (length, self._head(length))

    def _was_truncated(self) -> bool:
        """Return True if the file was truncated in place (logrotate with copytruncate), even if it has grown again."""
        length, digest = self._known_head
        return self._size() < self._position.offset or (length > 0 and self._head(length) != digest)

    # The saved position is not fsynced: after a power failure lines are sent again, and dropped as duplicates.

    def _load(self) -> LogPosition:
        try:
            known: dict[str, Any] = json.loads(self._saved.read_text(encoding="utf-8"))
            position, head = LogPosition(int(known["offset"]), int(known["time_ns"])), str(known["head"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return self._beginning()
        if position.offset < 0 or head != self._head(min(position.offset, self._size())):
            return self._beginning()  # another file with the same name
        return LogPosition(
            min(position.offset, self._size()), position.time_ns
        )  # a shorter file: its lost end was sent

    def _save(self) -> None:
        position = self._position
        head = self._known_head[1] or self._head(0)
        known = {"offset": position.offset, "time_ns": position.time_ns, "head": head}
        with atomic_write(self._saved, flush=False) as file:
            file.write(json.dumps(known).encode() + b"\n")

    def _head(self, offset: int) -> str:
        assert self._file is not None
        self._file.seek(0)
        return hashlib.sha256(self._file.read(min(offset, _HEAD_BYTES))).hexdigest()[:16]

    def _beginning(self) -> LogPosition:
        """Return the start of the file, saved before anything is sent so that a later reading has the same timestamps.

        Lines before the first record get timestamps just before it; if there is no record yet, a second ago.
        """
        self._position, self._known_head = LogPosition(0, 0), (0, "")
        times = (_record(line.decode("utf-8", "replace"))[0] for line in self._pending().split(b"\n"))
        first_ns = next((time_ns for time_ns in times if time_ns is not None), None)
        self._position = LogPosition(0, time.time_ns() - 10**9 if first_ns is None else max(0, first_ns - 10**6))
        with contextlib.suppress(OSError):
            self._save()
        return self._position


def _lock(fd: int) -> bool:
    """Lock the log file itself: nothing else locks it."""
    try:
        return try_lock(fd)
    except OSError:  # a file system without locks: the receiver drops the duplicates of two readers
        return True
