"""A server of tests that journals: it keeps one number and adds 1, 2, 3, ... to it, a record each.

What it recovers must be the state after some number of records: of all that were acknowledged when it was killed, of all that
were flushed when the power went.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tests.faults.disks import Crash, FastFiles

from smolcluster.durable_files import Files, OutputFile
from smolcluster.engine.elastic.wal.journal import Journal
from smolcluster.engine.elastic.wal.log_files import JournalRecord


class Server:
    """Adds up 1, 2, 3, ... and journals each number before it counts."""

    def __init__(self, folder: Path, *, files: Files | None = None, sync_s: float | None = None) -> None:
        self.journal = Journal(folder, files=files, sync_s=sync_s)
        self.count, self.total = 0, torch.zeros(2)
        try:
            recovered = self.journal.recover()
        except BaseException:
            self.bury()
            raise
        self.replayed = recovered.records
        if recovered.state is not None:
            self.count, self.total = recovered.meta["count"], recovered.state["total"]
        for record in recovered.records:
            self.apply(record)
        self.synced = self.count

    def apply(self, record: JournalRecord) -> None:
        assert record.meta == {"number": self.count + 1}
        assert record.payload is not None
        self.total = self.total + record.payload
        self.count += 1

    def append(self) -> None:
        number = self.count + 1
        payload = torch.tensor([number, -number], dtype=torch.float32)
        self.journal.append({"number": number}, payload)
        self.apply(JournalRecord({"number": number}, payload))

    def sync(self) -> None:
        self.journal.sync()
        self.synced = self.count

    def snapshot(self, *, wait: bool = True) -> None:
        self.journal.snapshot({"count": self.count}, {"total": self.total}, wait=wait)

    def close(self) -> None:
        self.journal.close()

    def bury(self) -> None:
        """What the kernel does when a process is dead."""
        for segment in (*self.journal._retired, self.journal._current):
            if segment is not None:
                with contextlib.suppress(OSError):
                    segment.file.close()
        with contextlib.suppress(Crash):
            self.journal._saver.close()
        self.journal._closing.close()

    def check(self) -> None:
        """The state is that after `count` records, no more, no less."""
        expected = self.count * (self.count + 1) / 2
        assert torch.equal(self.total, torch.tensor([expected, -expected]))


class Hooked(FastFiles):
    """Calls `written(path, write, data)` and `flushed(path, fsync)` for each write and each flush."""

    def __init__(
        self, *, written: Callable[..., None] | None = None, flushed: Callable[..., None] | None = None
    ) -> None:
        self.written, self.flushed = written, flushed

    def create(self, path: Path) -> OutputFile:
        file = super().create(path)
        if self.written is not None:
            file.write = partial(self.written, path, file.write)  # type: ignore[method-assign]
        if self.flushed is not None:
            file.fsync = partial(self.flushed, path, file.fsync)  # type: ignore[method-assign]
        return file


def reopen(folder: Path, *, sync_s: float | None = None) -> Server:
    server = Server(folder, files=FastFiles(), sync_s=sync_s)
    server.check()
    return server


def found(folder: Path, *, snapshot: bool = True) -> int:
    """How many records survived; the journal goes on working."""
    server = reopen(folder)
    count = server.count
    server.append()
    if snapshot:
        server.snapshot()
    server.append()
    server.close()
    again = reopen(folder)
    again.close()
    assert again.count == count + 2
    assert len(again.replayed) == 1 or not snapshot
    return count


def logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("log-*"))
