"""Stream the output of processes and the files of a run as they are written."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from smolcluster.launch.cluster.agent.base import home_of, say
from smolcluster.launch.cluster.agent.files import PAST_BYTES
from smolcluster.launch.cluster.agent.processes import states

FOLLOW_S = 0.1  # polling interval of `follow`
COPY_S = 0.5  # polling interval of `copy`
BEAT_S = 2.0  # silence before a heartbeat is sent
CHUNK_BYTES = 256 << 10
SMALL_BYTES = 4 << 20  # limit for a file that is sent completely
DIGEST_BYTES = 4096


def follow(
    folder: str,
    name: str,
    processes: list[str] | None = None,
    past: int = 20,
    on: bool = True,
    at: dict[str, list[int]] | None = None,
    **_: Any,
) -> None:
    """Send what processes print, from the last `past` lines on. `on`: until all have ended; else only what is there.

    Each line carries the position of the next one (inode and offset). A client that reconnects sends it back as `at`.
    """
    outputs = {process: _Output(number, offset) for process, (number, offset) in (at or {}).items()}
    beat = time.monotonic()
    while True:
        found = states(folder, name)
        chosen = [process for process in found if processes is None or process in processes]
        over = not on or bool(
            chosen and not any(found[process]["alive"] or found[process]["state"] == "starting" for process in chosen)
        )
        for process in chosen:
            path = home_of(folder, name) / "processes" / process / "output.log"
            if process not in outputs:
                outputs[process] = _Output.first_seen(path, past)
                say(process=process, at=outputs[process].at)
            for line in outputs[process].lines(path, over=over):
                say(line=line, process=process, at=outputs[process].at)
                beat = time.monotonic()
        if over:
            return
        if time.monotonic() - beat > BEAT_S:
            say(beat=True)
            beat = time.monotonic()
        time.sleep(FOLLOW_S)


class _Output:
    """The read position in the output of one process.

    A line ends with a line feed, or before a carriage return as progress bars print it. A very long line is split.
    """

    _END = re.compile(rb"\r?\n|\r(?=[^\n])")

    def __init__(self, number: int, offset: int) -> None:
        self._number, self._offset = number, offset

    @property
    def at(self) -> list[int]:
        return [self._number, self._offset]

    @classmethod
    def first_seen(cls, path: Path, past: int) -> _Output:
        """Return the position of the last `past` lines."""
        try:
            with path.open("rb") as file:
                seen = os.fstat(file.fileno())
                start = max(0, seen.st_size - PAST_BYTES)
                file.seek(start)
                ends = [end.end() for end in cls._END.finditer(file.read(PAST_BYTES))]
                begins = [0, *ends] if start == 0 else ends or [0]
                return cls(seen.st_ino, start + begins[max(0, len(begins) - 1 - past)])
        except OSError:
            return cls(-1, 0)  # no output yet

    def lines(self, path: Path, *, over: bool) -> Iterator[str]:
        """Yield new lines. `over`: no more will come, so the last may lack its line feed."""
        with contextlib.suppress(OSError), path.open("rb") as file:
            seen = os.fstat(file.fileno())
            if seen.st_ino != self._number or seen.st_size < self._offset:
                yield from self._rest(path.with_name(path.name + ".1"))
                self._number, self._offset = seen.st_ino, 0
            yield from self._read(file, over=over)

    def _rest(self, aside: Path) -> Iterator[str]:
        """Yield the unread lines of a log that was rotated."""
        with contextlib.suppress(OSError), aside.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if number != self._number and self._number >= 0:
                yield "[lines missing: the log was rotated twice since the last read]"
                self._offset = 0
            self._number = number
            yield from self._read(file, over=True)

    def _read(self, file: BinaryIO, *, over: bool) -> Iterator[str]:
        while True:
            begin, done = self._offset, 0
            file.seek(begin)
            chunk = file.read(CHUNK_BYTES)
            for end in self._END.finditer(chunk):
                line, bare = chunk[done : end.start()], end.group() == b"\r"
                done = end.end()
                self._offset = begin + done
                if line or not bare:
                    yield line.decode("utf-8", "replace")
            full = len(chunk) == CHUNK_BYTES
            if chunk[done:] and (done == 0 if full else over):
                self._offset = begin + len(chunk)
                yield chunk[done:].decode("utf-8", "replace")
            if not full:
                return


def copy(folder: str, name: str, run: str, have: dict[str, list[Any]], **_: Any) -> None:
    """Send the files of a run as they are written, until the client disconnects.

    `have`: for each file the client's number of bytes and their digest (`digest_of`). Rows and logs are sent incrementally,
    small files completely.
    """
    home = home_of(folder, name)
    known: dict[str, tuple[int, int]] = {}  # growing files: inode and bytes sent; others: time and size
    beat, up_to_date = time.monotonic(), False
    while True:
        new = False
        for place, path in _files_of(home, run):
            with contextlib.suppress(OSError):
                grows = path.suffix in (".jsonl", ".log")
                sent = _copy_new(place, path, known, have) if grows else _copy_all(place, path, known)
                new = new or sent
        if new:
            beat = time.monotonic()
            continue
        if not up_to_date or time.monotonic() - beat > BEAT_S:
            say(up_to_date=True)
            beat, up_to_date = time.monotonic(), True
        time.sleep(COPY_S)


def _files_of(home: Path, run: str) -> list[tuple[str, Path]]:
    base = home / "runs" / run
    small = [base / "config.yaml", base / "summary.json", *base.glob("checkpoints/*/manifest.json")]
    grow = [base / "metrics.jsonl", base / "history.jsonl", *base.glob("logs/*.log")]
    found = [(path.relative_to(base).as_posix(), path) for path in (*small, *grow)]
    return [*found, *((f"logs/{path.name}", path) for path in (home / "logs" / run).glob("*.log"))]


def _copy_new(place: str, path: Path, known: dict[str, tuple[int, int]], have: dict[str, list[Any]]) -> bool:
    with path.open("rb") as file:
        seen = os.fstat(file.fileno())
        if place not in known:
            size, digest = have.get(place, [0, ""])
            known[place] = (seen.st_ino, size if size <= seen.st_size and digest_of(file, size) == digest else 0)
        number, at = known[place]
        if number != seen.st_ino or seen.st_size < at:  # it was replaced or truncated
            at = 0
        file.seek(at)
        data = file.read(CHUNK_BYTES)
    known[place] = (seen.st_ino, at + len(data))
    if data or (at == 0 and place in have):
        say(file=place, at=at, data=base64.b64encode(data).decode())
        have.pop(place, None)
    return bool(data)


def digest_of(file: BinaryIO, size: int) -> str:
    """Return the digest of the last DIGEST_BYTES of a growing file's first `size` bytes."""
    file.seek(max(0, size - DIGEST_BYTES))
    return hashlib.sha256(file.read(min(size, DIGEST_BYTES))).hexdigest() if size else ""


def _copy_all(place: str, path: Path, known: dict[str, tuple[int, int]]) -> bool:
    seen = path.stat()
    if known.get(place) == (seen.st_mtime_ns, seen.st_size) or seen.st_size > SMALL_BYTES:
        return False
    known[place] = (seen.st_mtime_ns, seen.st_size)
    say(file=place, data=base64.b64encode(path.read_bytes()).decode())
    return True
