"""A log file read as a queue: what was not sent yet is taken from it in order, and what was sent is remembered.

    worker-rank0-mini2.log         written by the process, its standard error included; never changed here
    worker-rank0-mini2.log.sent    up to which byte it has been sent, replaced as a whole after every acknowledgement

The file is the buffer: it holds every line before anybody thinks of sending it, so no crash and no outage loses one. Each
line gets a time in nanoseconds that follows from the file alone:

    a record                  its own time; where that is not later than the line's before, one nanosecond more than it
    a line that is no record  one nanosecond more than the line before: what was printed while crashing

A file that was emptied in place begins anew: what is in it then has not been sent.

So times are unique, rise through the file, and are the same whenever and however often the file is read. A line that is sent
again, because a crash came between its acknowledgement and the note of it, is the same entry to the last digit, and the
receiver can drop it as a duplicate.
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

from smolcluster.locks import try_lock

PRINTED = "STDERR"  # the level of lines that are no records
BLOCK_BYTES = 512 * 1024  # read at once at most; a longer line is cut into pieces
_HEAD_BYTES = 512  # of the file that tell it from another with the same name
_JUMP_NS = 600 * 10**9  # a clock that is set back further than this is followed: it was wrong before
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LEVEL = re.compile(r"[A-Za-z][\w ]{0,19}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line, ready to be sent."""

    time_ns: int
    level: str
    logger: str  # empty for a line that is no record
    text: str
    end: int  # where the next line begins in the file


@dataclass(frozen=True, slots=True)
class Place:
    """How far a file has been read, and the time of the last line there."""

    offset: int
    time_ns: int


def entries_in(data: bytes, place: Place) -> Iterator[Entry]:
    """The lines of `data`, which begins at `place`. Empty ones are left out."""
    offset, time_ns = place.offset, place.time_ns
    # At line feeds only: a progress bar has carriage returns inside its line.
    for line in data.split(b"\n"):
        offset += len(line) + 1
        text = line.decode("utf-8", "replace").rstrip("\r")
        if text.strip():
            said_ns, level, logger = _record(text)
            time_ns = _stamp(said_ns, time_ns)
            yield Entry(time_ns, level, logger, text, min(offset, place.offset + len(data)))


def _stamp(said_ns: int | None, before_ns: int) -> int:
    if said_ns is None or 0 <= before_ns - said_ns <= _JUMP_NS:
        return before_ns + 1
    return said_ns


def _record(text: str) -> tuple[int | None, str, str]:
    """Time, level and logger of one of our records; a line of any other kind has no time."""
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


class Follower:
    """One log file, for one reader at a time. Nothing here blocks for long, and nothing is kept in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory = path.with_name(path.name + ".sent")
        self._file: io.FileIO | None = None
        self._place = Place(0, 0)
        self._seen = (0, "")  # of the file's head: how many bytes, and their digest
        self.told: dict[str, str] = {}  # notes of earlier readers of this file, for later ones

    def claim(self) -> bool:
        """Whether this reader has the file. A file that another process sends from is left to it."""
        if self._file is None:
            try:
                file = self.path.open("rb", buffering=0)  # a buffer would show what was there before it was emptied
            except FileNotFoundError:
                return False
            if not _lock(file.fileno()):
                file.close()
                return False
            self._file = file
            self._place = self._remembered()
            self._see()
        return True

    def read(self, *, final: bool = False) -> list[Entry]:
        """What has not been acknowledged yet, a block at most. `final`: the file is complete, a last half line counts."""
        if self._was_cut():
            self._place = self._beginning()
        while data := self._pending():
            whole = data.rfind(b"\n") + 1
            if whole == 0 and (final or len(data) == BLOCK_BYTES):
                whole = len(data)
            if entries := list(entries_in(data[:whole], self._place)):
                return entries
            if whole == 0:
                break
            self._place = Place(self._place.offset + whole, self._place.time_ns)  # nothing but empty lines
        return []

    def acknowledge(self, entry: Entry) -> None:
        """This line and all before it have arrived, or never will."""
        self._place = Place(entry.end, entry.time_ns)
        self._see()
        self._remember()

    def left(self) -> int:
        """Bytes that have not been acknowledged."""
        size = self._size()
        return size - self._place.offset if size >= self._place.offset else size  # less: it was cut, and begins anew

    def close(self) -> None:
        if self._file is not None:
            self._file.close()  # and with it goes the lock
            self._file = None

    def _pending(self) -> bytes:
        assert self._file is not None
        self._file.seek(self._place.offset)
        return self._file.read(BLOCK_BYTES)

    def _size(self) -> int:
        if self._file is None:  # not claimed yet: all of it is still to be sent, as far as we know
            return self.path.stat().st_size if self.path.exists() else 0
        return os.fstat(self._file.fileno()).st_size

    def _see(self) -> None:
        """The first bytes of a file do not change while it grows. So what was seen once holds, whatever is there now."""
        length = min(self._place.offset, _HEAD_BYTES)
        if length > self._seen[0]:
            self._seen = (length, self._head(length))

    def _was_cut(self) -> bool:
        """Emptied in place, as logrotate does with copytruncate, and perhaps grown again."""
        length, digest = self._seen
        return self._size() < self._place.offset or (length > 0 and self._head(length) != digest)

    # The memory of what was sent. It is not flushed to the disk: if a power cut takes it back, lines are sent again, as they
    # were, and dropped as duplicates.

    def _remembered(self) -> Place:
        try:
            known: dict[str, Any] = json.loads(self._memory.read_text(encoding="utf-8"))
            place, head = Place(int(known["offset"]), int(known["time_ns"])), str(known["head"])
            told = {str(key): str(value) for key, value in known["told"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return self._beginning()
        if place.offset < 0 or head != self._head(min(place.offset, self._size())):
            return self._beginning()  # another file with the same name
        self.told = told
        return Place(min(place.offset, self._size()), place.time_ns)  # its end may have been lost, but was sent

    def _remember(self) -> None:
        place = self._place
        head = self._seen[1] or self._head(0)
        known = {"offset": place.offset, "time_ns": place.time_ns, "head": head, "told": self.told}
        temporary = self._memory.with_name(f"{self._memory.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(known) + "\n", encoding="utf-8")
            temporary.replace(self._memory)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _head(self, offset: int) -> str:
        assert self._file is not None
        self._file.seek(0)
        return hashlib.sha256(self._file.read(min(offset, _HEAD_BYTES))).hexdigest()[:16]

    def _beginning(self) -> Place:
        """Lines before the first record have no time to follow: they come just before it. Where there is none yet, they get
        the time of a second ago, for a record may be on its way into the file.

        It is remembered before anything is sent, so that it holds when the file is read again.
        """
        self._place, self._seen = Place(0, 0), (0, "")
        said = (_record(line.decode("utf-8", "replace"))[0] for line in self._pending().split(b"\n"))
        first_ns = next((time_ns for time_ns in said if time_ns is not None), None)
        self._place = Place(0, time.time_ns() - 10**9 if first_ns is None else max(0, first_ns - 10**6))
        with contextlib.suppress(OSError):
            self._remember()
        return self._place


def _lock(fd: int) -> bool:
    """On the log file itself: nothing else locks it."""
    try:
        return try_lock(fd)
    except OSError:  # a file system without locks: entries that two readers send are dropped as duplicates
        return True
