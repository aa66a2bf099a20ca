"""metrics.jsonl: one JSON object per logged step and rank.

All processes of a run on one machine append to the same file. Each row is a single `write` on a descriptor opened with
O_APPEND, which a local file system does not interleave with other writes (a network file system may: give each machine a
separate run directory). NaN and infinity are the strings "nan", "inf" and "-inf", as in `events`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from smolcluster.observe.events import Event, StepLogged, restore_fields, to_dict

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 10  # read at once, from the end of a file
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)


class MetricsFile:
    """The sink that writes metrics.jsonl. Open it after `truncate_metrics`.

    While the disk is full, rows are lost: `warn` is called for the first.
    """

    def __init__(self, path: str | Path, *, warn: Callable[[str], None] = logger.warning) -> None:
        self.path = Path(path)
        self._warn, self._warned = warn, False
        self._torn = False  # our last row was written only partly
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(self.path, _APPEND, 0o644)
        # End the partial line of a process that was killed while writing.
        if _ends_torn(self.path):
            os.write(self._fd, b"\n")

    def handle(self, event: Event) -> None:
        if self._fd is None or not isinstance(event, StepLogged):
            return
        fields = to_dict(event)
        extra = {f"val_{name}": value for name, value in fields.pop("val_extra", {}).items()}
        row = json.dumps({**extra, **fields}, allow_nan=False).encode() + b"\n"
        try:
            with _exclusive(self._fd):
                if not (self._append(self._fd, row) or self._append(self._fd, row)):
                    raise OSError(f"a row of {len(row)} bytes was only partly written")
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._warn(
                    f"{self.path}: the row of step {event.step} is lost: {error.strerror or error}; is the disk full? "
                    "Training continues, and rows are written again when there is room"
                )

    def _append(self, fd: int, row: bytes) -> bool:
        """Write a row. Return False if it was only partly written (full disk, signal).

        Readers skip the fragment. Another process may append a row before the rest, so the next write ends the line first.
        """
        data = b"\n" + row if self._torn else row
        self._torn = os.write(fd, data) != len(data)
        return not self._torn

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, in the order of the file; none without a file.

    Partial lines (a process was killed while writing) are skipped and counted in a warning; a partial last line is skipped
    silently: it may be being written.
    """
    rows, num_torn = [], 0
    lines = _lines(Path(path))
    for number, line in enumerate(lines, start=1):
        row = json_object(line)
        if row is not None:
            rows.append(restore_fields(StepLogged, row))
        elif number < len(lines):
            num_torn += 1
    if num_torn:
        logger.warning("%s: skipped %d lines that are not complete rows", path, num_torn)
    return rows


def truncate_metrics(path: str | Path, *, after_step: int) -> int:
    """Drop the rows of steps after `after_step`, which a resumed run repeats. Return the number of dropped rows.

    The file is replaced atomically. Call this before any process opens it: an open descriptor would write to the old file.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # another rank may be doing the same
    dropped = 0
    try:
        with path.open("rb") as rows, temporary.open("wb") as file:
            for line in rows:  # line by line: the file may be large
                row = json_object(line)
                if row is not None and not _is_after(row, after_step):
                    file.write(line.rstrip(b"\n") + b"\n")
                else:
                    dropped += bool(line.strip())
            if dropped:
                file.flush()
                os.fsync(file.fileno())
        if dropped:
            temporary.replace(path)
    except FileNotFoundError:
        pass
    finally:
        temporary.unlink(missing_ok=True)
    return dropped


def _is_after(row: dict[str, Any], step: int) -> bool:
    value = row.get("step")
    return isinstance(value, int | float) and value > step


def _lines(path: Path) -> list[bytes]:
    """Return the lines that are not empty; the last may be partial."""
    try:
        return [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except FileNotFoundError:
        return []


def json_object(text: bytes | str) -> dict[str, Any] | None:
    """Parse a JSON object; None for any other text. A prefix of an object is not one, so partial rows are None."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # the first also for bytes that are not UTF-8
        return None
    return found if isinstance(found, dict) else None


def lines_backwards(path: Path, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) from the last of the first `size` bytes to the first. Only the last may lack its line feed."""
    with path.open("rb") as file:
        parts: list[bytes] = []  # of a line whose start is not read yet, last first
        at = size
        while at:
            length = min(CHUNK_BYTES, at)
            at -= length
            file.seek(at)
            chunk = file.read(length)
            end = len(chunk)
            if parts or chunk.endswith(b"\n"):
                begin = chunk.rfind(b"\n", 0, end if parts else end - 1) + 1
            else:
                begin = chunk.rfind(b"\n") + 1
            while begin:
                yield at + begin, b"".join([chunk[begin:end], *reversed(parts)])
                parts.clear()
                end, begin = begin, chunk.rfind(b"\n", 0, begin - 1) + 1
            parts.append(chunk[:end])
        if parts:
            yield 0, b"".join(reversed(parts))


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


@contextlib.contextmanager
def _exclusive(fd: int) -> Iterator[None]:
    """Lock the file for an append on Windows, where appending is seek plus write. POSIX appends are atomic."""
    if sys.platform == "win32":
        import msvcrt

        # Lock one byte far after any row, so that readers do not block.
        os.lseek(fd, 2**31 - 2, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_LOCK, 1)
        try:
            yield
        finally:
            os.lseek(fd, 2**31 - 2, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)
    else:
        yield
