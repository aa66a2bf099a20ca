"""The journal under kills, power cuts, full disks, failing flushes and flipped bits.

The server of these tests keeps one number and adds 1, 2, 3, ... to it, a record each. What it recovers must be the state
after some number of records: of all that were acknowledged when it was killed, of all that were flushed when the power
went. The disks are those of `disks.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.faults.disks import Crash, Disk, FastFiles, FullDisk, Stuck, sweep
from tests.places import small_disk
from torch import Tensor

from smolcluster.durable_files import Files, OutputFile, size_on_disk
from smolcluster.engine.checkpoint.safetensors_writer import tensor_bytes
from smolcluster.engine.checks import check_server_disk
from smolcluster.engine.elastic.wal.journal import Journal, JournalFull
from smolcluster.engine.elastic.wal.log_files import JournalRecord
from smolcluster.engine.elastic.wal.recovery import DamagedJournal
from smolcluster.errors import UserError


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


# What is written is read


TENSORS: list[Tensor | None] = [
    None,
    torch.arange(12, dtype=torch.float32).reshape(3, 4),
    torch.tensor(2.5),
    torch.empty(0, 3),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor([True, False, True]),
    torch.arange(-3, 4, dtype=torch.int8),
    torch.arange(10, dtype=torch.int64)[::2],
    torch.randn(4, 6, dtype=torch.float64).t(),
    torch.ones(3, requires_grad=True),
    torch.zeros(2, dtype=torch.float8_e4m3fn),
]


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    metas: list[dict[str, Any]] = [{}, {"step": 3, "é": ["ü", None, 1.5, math.inf]}, {"long": "x" * 1000}]
    written = [(metas[i % 3], tensor) for i, tensor in enumerate(TENSORS)]
    with Journal(tmp_path / "a" / "journal") as journal:
        journal.recover()
        for meta, tensor in written:
            journal.append(meta, tensor)
    with Journal(tmp_path / "a" / "journal") as journal:
        recovered = journal.recover()
    assert (recovered.state, recovered.meta) == (None, None)
    assert [record.meta for record in recovered.records] == [meta for meta, _ in written]
    for record, (_, tensor) in zip(recovered.records, written, strict=True):
        if tensor is None:
            assert record.payload is None
            continue
        assert (record.payload.dtype, record.payload.shape) == (tensor.dtype, tensor.shape)
        assert record.payload.data_ptr() % 64 == 0 or not tensor.numel()
        assert tensor_bytes(record.payload) == tensor_bytes(tensor)
        record.payload.zero_()  # memory of its own: the file does not change
    with Journal(tmp_path / "a" / "journal") as journal:
        assert torch.equal(journal.recover().records[1].payload, TENSORS[1])


def test_a_snapshot_takes_the_place_of_the_log(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(4, 3)
    with Journal(tmp_path) as journal:
        journal.recover()
        for step in range(3):
            journal.append({"step": step})
        journal.snapshot({"step": 3}, {"head": weight, "tied": weight}, wait=True)
        weight += 1  # it was copied
        assert [path.name for path in logs(tmp_path)] == ["log-00000001"]
        journal.append({"step": 3})
    with Journal(tmp_path) as journal:
        recovered = journal.recover()
        assert recovered.meta == {"step": 3}
        assert torch.equal(recovered.state["head"], weight - 1)
        assert recovered.state["head"] is recovered.state["tied"]
        assert [record.meta for record in recovered.records] == [{"step": 3}]
        # A newer one of the very same moment counts, too: it may say something else.
        journal.snapshot({"step": 3, "epoch": 2}, {}, wait=True)
        journal.snapshot({"step": 3, "epoch": 3}, {})
    with Journal(tmp_path) as journal:
        recovered = journal.recover()
        assert (recovered.meta, recovered.state, recovered.records) == ({"step": 3, "epoch": 3}, {}, [])


def test_a_snapshot_is_due_when_the_log_outgrows_the_state(tmp_path: Path) -> None:
    with Journal(tmp_path, snapshot_bytes=10_000, snapshot_ratio=8) as journal:
        journal.recover()
        journal.append({}, torch.zeros(2000))
        assert not journal.should_snapshot
        journal.append({}, torch.zeros(2000))
        assert journal.should_snapshot
        journal.snapshot({}, {"state": torch.zeros(1000)}, wait=True)
        journal.append({}, torch.zeros(7000))
        assert not journal.should_snapshot, "28 kB of log, 8 x 4 kB of state"
    with Journal(tmp_path, snapshot_bytes=10_000, snapshot_ratio=8) as journal:
        journal.recover()
        assert not journal.should_snapshot
        journal.append({}, torch.zeros(1000))
        assert journal.should_snapshot, "what was there before counts"


def test_a_snapshot_is_due_after_so_many_records_however_small(tmp_path: Path) -> None:
    """A coordinator's records are small, and its restart reads them all."""
    with Journal(tmp_path, files=FastFiles(), sync_s=None) as journal:
        journal.recover()
        for number in range(500):
            assert not journal.should_snapshot
            journal.append({"number": number})
    with Journal(tmp_path, files=FastFiles(), sync_s=None) as journal:
        assert len(journal.recover().records) == 500
        assert journal.should_snapshot, "what was there before counts"
        journal.snapshot({}, {}, wait=True)
        assert not journal.should_snapshot
        journal.append({})
        assert not journal.should_snapshot


def test_two_servers_cannot_use_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.recover()
        with pytest.raises(UserError, match=f"another server is using the journal {tmp_path}; stop it"):
            Journal(tmp_path)
        journal.append({"a": 1})
    journal.close()
    with Journal(tmp_path) as journal:
        assert len(journal.recover().records) == 1


def test_the_log_is_flushed_and_sealed_in_the_background(tmp_path: Path) -> None:
    flushed = threading.Event()

    def flush(path: Path, fsync: Callable[[], None]) -> None:
        if path.name.startswith("log-"):
            flushed.set()

    server = Server(tmp_path, files=Hooked(flushed=flush), sync_s=0.01)
    for _ in range(3):
        flushed.clear()
        server.append()
        assert flushed.wait(300)
    server.close()


# Killed


class Killed(Hooked):
    """The process dies when it has written so many bytes of log."""

    def __init__(self) -> None:
        super().__init__(written=self._write)
        self.left: int | None = None

    def _write(self, _: Path, write: Callable[..., None], data: bytes | memoryview) -> None:
        view = memoryview(data)
        if self.left is not None and view.nbytes > self.left:
            write(view[: self.left])
            self.left = 0
            raise Crash
        if self.left is not None:
            self.left -= view.nbytes
        write(view)


def kill_at(folder: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    files = Killed()
    server = Server(folder, files=files)
    server.append()
    server.append()
    files.left = num_bytes
    with monkeypatch.context() as patch:
        patch.setattr(os, "truncate", lambda *_: None)  # a dead process does not clear up
        try:
            server.append()
        except Crash:
            return True
        finally:
            server.bury()
    return False


def test_killed_at_every_byte_of_an_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 0
    while kill_at(tmp_path / str(num_bytes), num_bytes, monkeypatch):
        assert found(tmp_path / str(num_bytes)) == 2
        num_bytes += 1
    assert num_bytes > 64
    assert found(tmp_path / str(num_bytes)) == 3


def test_killed_again_and_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Torn records, in several log files: each recovery goes on where the last whole one ended."""
    for life in range(6):
        server = reopen(tmp_path)
        assert server.count == life
        server.append()
        server.close()
        last = logs(tmp_path)[-1]
        last.write_bytes(last.read_bytes()[:-32] + b"SJ1R\x09")  # without its seal, but with the start of a record
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "torn" in caplog.text
    assert found(tmp_path) == 6


CHILD = """
import sys
from pathlib import Path
import torch
from smolcluster.engine.elastic.wal.journal import Journal

journal = Journal(Path(sys.argv[1]), sync_s=0.005, snapshot_bytes=200_000, snapshot_ratio=0)
recovered = journal.recover()
number = recovered.meta["count"] if recovered.meta else 0
for record in recovered.records:
    number += 1
    assert record.meta == {"number": number} and torch.equal(record.payload, torch.full((500,), float(number)))
print("found", number, flush=True)
while True:
    number += 1
    journal.append({"number": number}, torch.full((500,), float(number)))
    print(number, flush=True)
    if journal.should_snapshot:
        journal.snapshot({"count": number}, {"state": torch.full((1000,), float(number))})
"""


def test_after_kill_9_every_acknowledged_record_is_there_once(tmp_path: Path) -> None:
    rng = random.Random(5)
    acknowledged = 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        word, number = child.stdout.readline().split()
        # One more than was acknowledged may be there: it was written, but the process died before it could say so.
        assert word == "found"
        assert acknowledged <= int(number) <= acknowledged + 1
        stop_at = int(number) + rng.randint(200, 900)
        lines = []
        while not lines or int(lines[-1]) < stop_at:
            lines.append(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        lines += child.stdout.readlines()
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
        assert [int(line) for line in lines] == list(range(int(number) + 1, int(number) + 1 + len(lines)))
        acknowledged = int(lines[-1])
    with Journal(tmp_path) as journal:
        recovered = journal.recover()
        assert recovered.meta is not None, "no snapshot was written"
        numbers = [record.meta["number"] for record in recovered.records]
        assert numbers == list(range(recovered.meta["count"] + 1, recovered.meta["count"] + 1 + len(numbers)))
        assert acknowledged <= recovered.meta["count"] + len(numbers) <= acknowledged + 1


# Power cuts


def short_life(server: Server) -> None:
    server.append()
    server.sync()
    server.append()
    server.snapshot()
    server.append()


def long_life(server: Server) -> None:
    """All that a server does, in one thread."""
    server.append()
    server.append()
    server.sync()
    server.append()
    server.snapshot()
    server.append()
    server.sync()
    server.snapshot()
    server.append()
    server.append()


@dataclasses.dataclass(frozen=True)
class Scenario:
    life: Callable[[Server], None]
    before: int  # records of a server that was killed before


SCENARIOS = {"the first": Scenario(short_life, 0), "after a kill": Scenario(long_life, 2)}


def violations(scenario: Scenario, tmp_path: Path, *, ignore: frozenset[str] = frozenset()) -> Iterator[str]:
    """Every crash, every adversary: what was found wrong."""

    def live(disk: Disk) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the fewest and the most records that a kill, and a power cut, may leave."""
        server = None
        with contextlib.suppress(Crash):
            server = Server(disk.root / "run" / "journal", files=disk)
            scenario.life(server)
            server.close()
        if server is None:
            return (scenario.before, scenario.before), (0, scenario.before)
        server.bury()
        return (server.count, server.count + 1), (server.synced if disk.crashed else server.count, server.count + 1)

    def check(left: Path, expected: tuple[int, int], number: int) -> None:
        survived = found(left / "run" / "journal", snapshot=number % 4 == 0)
        assert expected[0] <= survived <= expected[1], f"{survived} of {expected[0]} to {expected[1]} records"

    prepared = Disk(tmp_path / "prepared", ignore=ignore)
    prepared.root.mkdir()
    if scenario.before:
        server = Server(prepared.root / "run" / "journal", files=prepared)
        for _ in range(scenario.before):
            server.append()
        server.bury()
    return sweep(prepared, tmp_path, live, check)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A sweep finds the same trouble a thousand times."""
    caplog.set_level(logging.CRITICAL, logger="smolcluster.engine.elastic.wal")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_at_any_operation_loses_nothing_that_was_flushed(name: str, tmp_path: Path) -> None:
    assert list(violations(SCENARIOS[name], tmp_path)) == []


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("forgotten", ["fsync", "fsync_folder"])
def test_the_sweep_would_notice_a_forgotten_flush(forgotten: str, tmp_path: Path) -> None:
    assert next(violations(SCENARIOS["the first"], tmp_path, ignore=frozenset({forgotten})), None) is not None


class Counting(Hooked):
    """Knows how much of each file was flushed, and calls back in the middle of the first flush of a record."""

    def __init__(self, callback: Callable[[], None]) -> None:
        super().__init__(flushed=self._flush)
        self.callback = [callback]
        self.sizes: dict[str, int] = {}

    def _flush(self, path: Path, fsync: Callable[[], None]) -> None:
        size = path.stat().st_size
        if size > 32 and self.callback:
            self.callback.pop()()
        self.sizes[path.name] = size


def test_what_comes_during_a_flush_is_flushed_by_the_next(tmp_path: Path) -> None:
    """A record, and a new log file behind it, while the file before is being flushed."""

    def meanwhile() -> None:
        server.append()
        with server.journal._lock:
            server.journal._open_segment()
        server.append()

    files = Counting(meanwhile)
    server = Server(tmp_path, files=files)
    server.append()
    server.sync()
    first, second = logs(tmp_path)
    assert files.sizes[first.name] < first.stat().st_size
    server.sync()
    assert files.sizes[first.name] == first.stat().st_size
    assert files.sizes[second.name] == second.stat().st_size - 32, "all but the seal"
    server.close()
    assert found(tmp_path) == 3


# A full or failing disk


KINDS: dict[str, tuple[Callable[[Server], None], set[str]]] = {
    "append": (Server.append, {"write"}),
    "append in a new file": (Server.append, {"write", "create"}),
    "sync": (Server.sync, {"write", "fsync"}),
    "snapshot": (Server.snapshot, {"write", "fsync", "create", "mkdir", "fsync_folder", "close"}),
}


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_full_at_any_operation_costs_nothing_else(
    kind: str, clears: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported, nothing is half done, and when there is room all goes on: also when clearing up fails, too."""
    act, expected = KINDS[kind]
    failed: set[str] = set()
    for full_at in range(100):
        folder, disk, errors = tmp_path / str(full_at), FullDisk(), []
        server = Server(folder, files=disk)
        for _ in range(3):
            server.append()
        with monkeypatch.context() as patch:
            if not clears:
                patch.setattr(os, "truncate", lambda *_: None)
            if kind == "append in a new file":
                disk.full_at = 0
                with pytest.raises(JournalFull):
                    server.append()
            disk.count, disk.full_at, disk.failed = 0, full_at, []
            for _ in range(2):
                try:
                    act(server)
                except JournalFull as error:
                    errors.append(str(error))
        count = server.count
        failed.update(disk.failed)
        disk.full_at = None
        server.append()
        server.append()
        server.close()
        assert found(folder) == count + 2
        if not errors and not disk.failed:
            break
        assert all("No space left" in error and str(folder) in error for error in errors)
    assert full_at < 99, "the disk was never large enough"
    assert failed >= expected


def test_a_snapshot_that_fails_in_the_background_is_an_error_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk()
    server = Server(tmp_path, files=disk)
    server.append()
    disk.count, disk.full_at = 0, 3
    server.snapshot(wait=False)
    server.journal._saver.wait()
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert "a snapshot cannot be written" in caplog.text
    assert "No space left" in caplog.text
    disk.full_at = 0
    server.snapshot(wait=False)
    assert "a snapshot cannot be started" in caplog.text
    disk.full_at = None
    server.append()
    server.close()
    again = reopen(tmp_path)
    assert (again.count, len(again.replayed)) == (2, 2)
    again.close()


def test_a_disk_that_is_full_when_a_server_starts_is_told(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.append()
    server.close()
    failed = []
    for full_at in range(100):
        disk = FullDisk()
        disk.full_at = full_at
        try:
            Server(tmp_path, files=disk).close()
        except JournalFull as error:
            assert "the journal cannot be opened for writing: [Errno 28] No space left" in str(error)  # noqa: PT017
            failed.append(disk.failed[0])
        else:
            break
    assert {"fsync_file", "create", "write", "fsync"} <= set(failed)
    assert found(tmp_path) == 1


@pytest.mark.parametrize("state_bytes", [4_000, 40_000])
def test_a_journal_never_takes_more_than_its_bound(tmp_path: Path, state_bytes: int) -> None:
    """Nor more than it is allowed, while snapshots are slow."""
    slow = threading.Event()

    class Slow(FastFiles):
        def mkdir(self, path: Path) -> None:
            super().mkdir(path)
            if path.name.startswith(".tmp-step"):
                slow.wait(0.01)  # never set: a disk that takes its time

    state, gradient, allowed = torch.zeros(state_bytes // 4), torch.zeros(500), 2 * state_bytes + 60_000
    most = snapshots = 0
    with Journal(tmp_path, files=Slow(), sync_s=None) as journal:
        journal.recover()
        journal.bound_disk(allowed)
        journal.snapshot({"step": 0}, {"state": state}, wait=True)
        for step in range(400):
            journal.append({"step": step}, gradient)
            most = max(most, size_on_disk(tmp_path))
            if journal.should_snapshot:
                journal.snapshot({"step": step + 1}, {"state": state})
                snapshots += 1
    # Manifests, the records that step over the limits; and what is renamed while it is counted is counted twice.
    overhead = 2 * 2_500 + 5_000 + 2 * (state_bytes + 2_500)
    assert allowed + overhead < 400 * 2_000 / 2, "what was appended is far more"
    assert most <= allowed + overhead
    assert snapshots >= 5
    with Journal(tmp_path, files=FastFiles(), sync_s=None) as journal:
        recovered = journal.recover()
        assert recovered.meta["step"] + len(recovered.records) == 400


def test_the_room_for_a_journal() -> None:
    warned: list[str] = []

    def room(free: int, *, again: bool = False) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
            return check_server_disk(
                Path("run"),
                checkpoint_bytes=10,
                keep=3,
                least_bytes=20,
                most_bytes=100,
                there_bytes=5,
                again=again,
                warn=warned.append,
            )

    assert room(1000) == 100
    assert room(100) == 55, "beside three checkpoints, the best and the next"
    assert not warned
    assert room(30) == 20
    assert "max_checkpoints_to_keep" in warned.pop()
    with pytest.raises(UserError, match="the server's journal 20 B at least"):
        room(24)
    assert room(24, again=True) == 20, "a server that comes back goes on"
    assert "make room" in warned.pop()


def open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


@pytest.mark.parametrize("sync_s", [None, 0.001])
def test_retries_on_a_full_disk_leave_no_files_behind(tmp_path: Path, sync_s: float | None) -> None:
    full = threading.Event()

    def write_if_it_fits(_: Path, write: Callable[..., None], data: bytes | memoryview) -> None:
        if full.is_set() and memoryview(data).nbytes > 1000:  # a small frame still does
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(data)

    files, gradient = Hooked(written=write_if_it_fits), torch.arange(500.0)
    with Journal(tmp_path, files=files, sync_s=sync_s) as journal:
        journal.recover()
        journal.append({"n": 0}, gradient)
        before, open_before = logs(tmp_path), open_files()
        full.set()
        for _ in range(50):
            with pytest.raises(JournalFull):
                journal.append({"n": 1}, gradient)
        assert logs(tmp_path) == before
        assert open_files() <= open_before + 1
        full.clear()
        journal.append({"n": 1}, gradient)
        journal.snapshot({"n": 2}, {"state": gradient}, wait=True)
        full.set()
        with pytest.raises(JournalFull):  # in the file that the snapshot needs
            journal.append({"n": 2}, gradient)
        full.clear()
        journal.append({"n": 2}, gradient)
    with Journal(tmp_path, files=FastFiles(), sync_s=None) as journal:
        recovered = journal.recover()
        assert recovered.meta == {"n": 2}
        assert [record.meta for record in recovered.records] == [{"n": 2}]


def test_a_snapshot_that_failed_is_tried_again_before_the_log_has_doubled(tmp_path: Path) -> None:
    """Though not at every step: each try writes the whole state."""

    class NoFolders(FastFiles):
        broken = False

        def mkdir(self, path: Path) -> None:
            if self.broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().mkdir(path)

    files, gradient, tries = NoFolders(), torch.arange(500.0), []
    with Journal(tmp_path, files=files, sync_s=None, snapshot_bytes=100_000, snapshot_ratio=0.0) as journal:
        journal.recover()
        journal.snapshot({"n": 0}, {"state": gradient}, wait=True)
        files.broken = True
        for n in range(1, 401):
            journal.append({"n": n}, gradient)
            if journal.should_snapshot:
                tries.append(n)
                with pytest.raises(JournalFull):
                    journal.snapshot({"n": n}, {"state": gradient}, wait=True)
        due = tries[0]
        assert [n - due for n in tries[:7]] == [0, 1, 3, 7, 15, 31, 63]
        assert {b - a for a, b in itertools.pairwise(tries[7:])} == {64}
        files.broken = False
        while not journal.should_snapshot:
            n += 1
            journal.append({"n": n}, gradient)
        journal.snapshot({"n": n}, {"state": gradient}, wait=True)
        assert len(logs(tmp_path)) == 1
        assert not journal.should_snapshot
        journal.append({"n": n + 1}, gradient)
        assert not journal.should_snapshot, "the log that was replaced still counts"


def test_a_really_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, kilobytes=256) as disk:
        fill_it(disk)


def fill_it(disk: Path) -> None:
    folder = disk / "journal"
    big = torch.zeros(1 << 13)  # 32 KiB
    ballast = disk / "ballast"

    def free() -> int:
        return shutil.disk_usage(disk).free

    with Journal(folder) as journal:
        journal.recover()
        journal.append({"n": 0}, big)
        ballast.write_bytes(b"x" * (free() - (20 << 10)))
        before = free()
        for _ in range(3):
            with pytest.raises(JournalFull, match=r"a record cannot be written: .*No space left"):
                journal.append({"n": 1}, big)
        assert free() >= before - (12 << 10), "what a failed append took is given back, but for new files"
        with pytest.raises(JournalFull, match=r"a snapshot cannot be written: .*No space left"):
            journal.snapshot({"n": 1}, {"state": big}, wait=True)
        journal.append({"n": 1})
        ballast.unlink()
        journal.append({"n": 2}, big)
        journal.snapshot({"n": 3}, {"state": big}, wait=True)
        journal.append({"n": 3}, big)
    with Journal(folder) as journal:
        recovered = journal.recover()
        assert recovered.meta == {"n": 3}
        assert [record.meta for record in recovered.records] == [{"n": 3}]
        assert len(logs(folder)) == 2


def test_an_interrupted_append_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst moment: the bytes are all written, but the caller will never know, and appends that record again."""
    interrupt = threading.Event()

    def write_then(_: Path, write: Callable[..., None], data: bytes | memoryview) -> None:
        write(data)
        if interrupt.is_set() and memoryview(data).nbytes == 8:
            interrupt.clear()
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "truncate", lambda *_: None)
    server = Server(tmp_path, files=Hooked(written=write_then))
    server.append()
    interrupt.set()
    with pytest.raises(KeyboardInterrupt):
        server.append()
    server.append()
    server.append()
    server.bury()
    assert found(tmp_path) == 3


def test_after_a_failed_flush_nothing_is_sealed_until_a_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A second fsync would succeed though the first has lost the pages: a seal would be a lie."""
    failing = threading.Event()

    def fail(path: Path, fsync: Callable[[], None]) -> None:
        if failing.is_set() and path.name.startswith("log-"):
            failing.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    server = Server(tmp_path, files=Hooked(flushed=fail))
    server.append()
    assert not server.journal.should_snapshot
    failing.set()
    with pytest.raises(JournalFull, match="Input/output error"):
        server.sync()
    server.append()
    server.sync()
    assert b"SJ1S" not in logs(tmp_path)[-1].read_bytes()
    assert server.journal.should_snapshot
    server.snapshot()
    assert not server.journal.should_snapshot
    server.append()
    server.sync()
    assert b"SJ1S" in logs(tmp_path)[-1].read_bytes()
    server.close()
    assert found(tmp_path) == 3


def test_a_flush_that_fails_in_the_background_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tried = threading.Semaphore(0)

    def fail(path: Path, fsync: Callable[[], None]) -> None:
        if path.read_bytes().count(b"SJ1R"):
            tried.release()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    server = Server(tmp_path, files=Hooked(flushed=fail), sync_s=0.001)
    for _ in range(3):
        server.append()
        assert tried.acquire(timeout=300)
    server.close()
    messages = [r.getMessage() for r in caplog.records if "a power cut could lose" in r.getMessage()]
    assert len(messages) == 1
    assert found(tmp_path) == 3


def test_old_files_that_cannot_be_removed_mislead_no_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path, files=Stuck())
    for _ in range(3):
        server.append()
        server.append()
        server.snapshot()
    server.append()
    server.close()
    assert len(logs(tmp_path)) == 4
    assert "cannot remove" in caplog.text
    assert found(tmp_path) == 7
    assert len(logs(tmp_path)) == 2, "those after the last snapshot"


# Damage


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A snapshot after 2 records, then 4 in two log files, all flushed."""
    server = reopen(tmp_path / "sealed")
    server.append()
    server.append()
    server.snapshot()
    server.append()
    server.append()
    server.close()
    server = reopen(tmp_path / "sealed")
    server.append()
    server.append()
    server.close()
    return tmp_path / "sealed"


def recovered_count(folder: Path) -> int:
    server = reopen(folder)
    server.close()
    return server.count


def damages(good: bytes) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(13)
    for position in range(len(good)):
        flipped = bytearray(good)
        flipped[position] ^= 1 << rng.randrange(8)
        yield f"flip {position}", bytes(flipped)


@pytest.mark.parametrize("index", [0, 1])
def test_no_flipped_bit_loses_a_sealed_record(sealed: Path, index: int, tmp_path: Path) -> None:
    name = logs(sealed)[index].name
    good = (sealed / name).read_bytes()
    copy = tmp_path / "copy"
    last_seal = len(good) - 32
    num_whole, errors = 0, []
    for what, bad in [*damages(good), ("truncated", good[: last_seal - 1])][: None if index == 0 else -1]:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sealed, copy)
        (copy / name).write_bytes(bad)
        try:
            assert recovered_count(copy) == 6, what
            num_whole += 1
        except DamagedJournal as error:
            errors.append(str(error))
    assert all(str(copy / name) in error and "restore it from a copy" in error for error in errors)
    # A seal at the end of a file may be lost: the records before it are whole.
    assert num_whole == 32
    assert len(errors) == len(good) - 32 + (index == 0)


def test_damage_among_the_last_records_keeps_those_before_it_and_is_an_error(
    sealed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a seal behind it, this is what a power cut leaves: no promise is broken, but it is told."""
    path = logs(sealed)[1]
    good = path.read_bytes()[:-32]
    copy = tmp_path / "copy"
    counts = set()
    for what, bad in list(damages(good))[32:]:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sealed, copy)
        (copy / path.name).write_bytes(bad)
        caplog.clear()
        counts.add(recovered_count(copy))
        assert any(r.levelno == logging.ERROR and path.name in r.getMessage() for r in caplog.records), what
    assert counts == {4, 5}


@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "manifest.json"])
def test_a_damaged_snapshot_is_an_error_when_the_log_before_it_is_gone(sealed: Path, name: str) -> None:
    (file,) = sealed.glob(f"snapshots/step-*/{name}")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedJournal, match=name):
        reopen(sealed)


def test_a_damaged_snapshot_falls_back_when_the_log_before_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class StuckForGood(Stuck):
        def rename(self, source: Path, target: Path) -> None:
            if source.name.startswith("step-"):  # the snapshot before is kept, too
                raise PermissionError(errno.EACCES, "in use", str(source))
            super().rename(source, target)

    server = Server(tmp_path, files=StuckForGood())
    server.append()
    server.snapshot()
    server.append()
    server.append()
    server.snapshot()
    server.append()
    server.close()
    newest = sorted(tmp_path.glob("snapshots/step-*"))[-1]
    (newest / "state.json").write_bytes(b"{}")
    server = reopen(tmp_path)
    assert (server.count, len(server.replayed)) == (4, 3)
    assert "is damaged, trying the one before it" in caplog.text
    server.close()
    # But not when part of that log is gone.
    (tmp_path / "log-00000002").unlink()
    with pytest.raises(DamagedJournal, match=r"log-00000003: 1 records that were safe on the disk cannot be read"):
        reopen(tmp_path)
    (tmp_path / "log-00000001").unlink()
    with pytest.raises(DamagedJournal, match=r"log-00000001: missing"):
        reopen(tmp_path)


def test_a_missing_log_file_is_found(sealed: Path) -> None:
    first, second = logs(sealed)
    backup = first.read_bytes()
    first.unlink()
    with pytest.raises(DamagedJournal, match=f"{first.name}: missing"):
        reopen(sealed)
    first.write_bytes(backup)
    server = reopen(sealed)
    server.append()
    server.close()
    second.unlink()
    with pytest.raises(DamagedJournal, match=r"[0-9] records that were safe on the disk cannot be read"):
        reopen(sealed)


def test_what_was_cut_off_stays_so(sealed: Path) -> None:
    """Whole records behind a gap are never taken up again, although later ones get the same numbers."""
    last = logs(sealed)[-1]
    flipped = bytearray(last.read_bytes()[:-32])
    flipped[40] ^= 1
    last.write_bytes(flipped)
    for expected in (4, 5, 6, 7):
        server = reopen(sealed)
        assert server.count == expected
        server.append()
        server.close()
    assert found(sealed) == 8


def test_other_files_in_the_folder_are_no_matter(sealed: Path) -> None:
    (sealed / "log-notes.txt").write_text("mine")
    (sealed / "log-1").write_text("mine")
    assert recovered_count(sealed) == 6


def test_a_record_is_json(tmp_path: Path) -> None:
    """Nothing in a log file needs this program to be read."""
    with Journal(tmp_path) as journal:
        journal.recover()
        journal.append({"step": 7}, torch.tensor([1.0]))
    raw = logs(tmp_path)[0].read_bytes()
    start = raw.index(b"[{")
    assert json.loads(raw[start : raw.index(b" ", start)]) == [{"step": 7}, ["float32", [1]]]
