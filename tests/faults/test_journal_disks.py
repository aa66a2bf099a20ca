"""The journal on full and failing disks, and with flipped bits. Its server is that of `journaled.py`."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.faults.disks import FastFiles, FullDisk, Stuck
from tests.faults.journaled import Hooked, Server, found, logs, reopen
from tests.places import small_disk

from smolcluster.durable_files import size_on_disk
from smolcluster.engine.checks import check_server_disk
from smolcluster.engine.elastic.wal.journal import Journal, JournalFull
from smolcluster.engine.elastic.wal.recovery import DamagedJournal
from smolcluster.errors import UserError

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


def test_after_a_failed_flush_nothing_is_marked_as_synced_until_a_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A second fsync would succeed though the first has lost the pages: a sync marker would be false."""
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
def synced(tmp_path: Path) -> Path:
    """A snapshot after 2 records, then 4 in two log files, all flushed."""
    server = reopen(tmp_path / "synced")
    server.append()
    server.append()
    server.snapshot()
    server.append()
    server.append()
    server.close()
    server = reopen(tmp_path / "synced")
    server.append()
    server.append()
    server.close()
    return tmp_path / "synced"


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
def test_no_flipped_bit_loses_a_synced_record(synced: Path, index: int, tmp_path: Path) -> None:
    name = logs(synced)[index].name
    good = (synced / name).read_bytes()
    copy = tmp_path / "copy"
    last_seal = len(good) - 32
    num_whole, errors = 0, []
    for what, bad in [*damages(good), ("truncated", good[: last_seal - 1])][: None if index == 0 else -1]:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(synced, copy)
        (copy / name).write_bytes(bad)
        try:
            assert recovered_count(copy) == 6, what
            num_whole += 1
        except DamagedJournal as error:
            errors.append(str(error))
    assert all(str(copy / name) in error and "restore it from a copy" in error for error in errors)
    # A sync marker at the end of a file may be lost: the records before it are whole.
    assert num_whole == 32
    assert len(errors) == len(good) - 32 + (index == 0)


def test_damage_among_the_last_records_keeps_those_before_it_and_is_an_error(
    synced: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a sync marker after it, this is what a power cut leaves: no promise is broken, and it is logged."""
    path = logs(synced)[1]
    good = path.read_bytes()[:-32]
    copy = tmp_path / "copy"
    counts = set()
    for what, bad in list(damages(good))[32:]:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(synced, copy)
        (copy / path.name).write_bytes(bad)
        caplog.clear()
        counts.add(recovered_count(copy))
        assert any(r.levelno == logging.ERROR and path.name in r.getMessage() for r in caplog.records), what
    assert counts == {4, 5}


@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "manifest.json"])
def test_a_damaged_snapshot_is_an_error_when_the_log_before_it_is_gone(synced: Path, name: str) -> None:
    (file,) = synced.glob(f"snapshots/step-*/{name}")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedJournal, match=name):
        reopen(synced)


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


def test_a_missing_log_file_is_found(synced: Path) -> None:
    first, second = logs(synced)
    backup = first.read_bytes()
    first.unlink()
    with pytest.raises(DamagedJournal, match=f"{first.name}: missing"):
        reopen(synced)
    first.write_bytes(backup)
    server = reopen(synced)
    server.append()
    server.close()
    second.unlink()
    with pytest.raises(DamagedJournal, match=r"[0-9] records that were safe on the disk cannot be read"):
        reopen(synced)


def test_what_was_cut_off_stays_so(synced: Path) -> None:
    """Whole records behind a gap are never taken up again, although later ones get the same numbers."""
    last = logs(synced)[-1]
    flipped = bytearray(last.read_bytes()[:-32])
    flipped[40] ^= 1
    last.write_bytes(flipped)
    for expected in (4, 5, 6, 7):
        server = reopen(synced)
        assert server.count == expected
        server.append()
        server.close()
    assert found(synced) == 8


def test_other_files_in_the_folder_are_no_matter(synced: Path) -> None:
    (synced / "log-notes.txt").write_text("mine")
    (synced / "log-1").write_text("mine")
    assert recovered_count(synced) == 6


def test_a_record_is_json(tmp_path: Path) -> None:
    """Nothing in a log file needs this program to be read."""
    with Journal(tmp_path) as journal:
        journal.recover()
        journal.append({"step": 7}, torch.tensor([1.0]))
    raw = logs(tmp_path)[0].read_bytes()
    start = raw.index(b"[{")
    assert json.loads(raw[start : raw.index(b" ", start)]) == [{"step": 7}, ["float32", [1]]]
