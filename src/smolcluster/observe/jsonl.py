"""metrics.jsonl: one JSON object per logged step and rank.

All processes of a run on one machine append to the same file. Each row is a single `write` on a descriptor opened with
O_APPEND, which a local file system does not interleave with another (a network file system may: give each machine a run
directory of its own). NaN and infinity are the strings "nan", "inf" and "-inf", as in `events`.
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

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)


class MetricsFile:
    """The sink that writes metrics.jsonl. Open it after `truncate_metrics`, not before.

    A disk that is full costs the rows of that time and no more: `warn` is called for the first.
    """

    def __init__(self, path: str | Path, *, warn: Callable[[str], None] = logger.warning) -> None:
        self.path = Path(path)
        self._warn, self._warned = warn, False
        self._torn = False  # the last row that was written here is not whole
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(self.path, _APPEND, 0o644)
        # A process that was killed while writing may have left half a line. End it, or the next row would join it.
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
                    raise OSError(f"a row of {len(row)} bytes could not be written whole")
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._warn(
                    f"{self.path}: the row of step {event.step} is lost: {error.strerror or error}; is the disk full? "
                    "Training goes on, and rows are written again when there is room"
                )

    def _append(self, fd: int, row: bytes) -> bool:
        """Whether all of it was written.

        A short write (the disk was full for a moment, a signal) leaves a fragment, which readers skip. Its rest might land
        behind another process's row, so whatever comes next ends the fragment and is written whole.
        """
        data = b"\n" + row if self._torn else row
        self._torn = os.write(fd, data) != len(data)
        return not self._torn

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, in the order they were written.

    No file means no rows. Lines that are not whole (a process was killed while writing) are skipped and counted in a
    warning; the last one is skipped silently, because it may be being written right now.
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
        logger.warning("%s: skipped %d lines that are not whole rows", path, num_torn)
    return rows


def truncate_metrics(path: str | Path, *, after_step: int) -> int:
    """Drop the rows of steps beyond `after_step`, atomically; how many were dropped.

    A resumed run repeats those steps. Call it before any process opens the file: a descriptor that is open already
    would go on writing to the old file.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # another rank may be doing the same
    dropped = 0
    try:
        with path.open("rb") as rows, temporary.open("wb") as file:
            for line in rows:  # one at a time: the file may be large
                row = json_object(line)
                if row is not None and not _beyond(row, after_step):
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


def _beyond(row: dict[str, Any], step: int) -> bool:
    value = row.get("step")
    return isinstance(value, int | float) and value > step


def _lines(path: Path) -> list[bytes]:
    """The lines that are not empty; the last may be torn."""
    try:
        return [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except FileNotFoundError:
        return []


def json_object(text: bytes | str) -> dict[str, Any] | None:
    """Return the object that a text is, None for any other text. A prefix of an object is none: a torn row cannot pass."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # the first also for bytes that are not UTF-8
        return None
    return found if isinstance(found, dict) else None


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


@contextlib.contextmanager
def _exclusive(fd: int) -> Iterator[None]:
    """POSIX appends are atomic and need no lock; on Windows appending is seek plus write, so there a lock is taken."""
    if sys.platform == "win32":
        import msvcrt

        # One byte far beyond any row, so that readers of the file are not in its way.
        os.lseek(fd, 2**31 - 2, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_LOCK, 1)
        try:
            yield
        finally:
            os.lseek(fd, 2**31 - 2, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)
    else:
        yield
