"""The journal under kills and power cuts. Its server is that of `journaled.py`, the disks are those of `disks.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.disks import Crash, Disk, FastFiles, sweep
from tests.faults.journaled import Hooked, Server, found, logs, reopen
from torch import Tensor

from smolcluster.engine.checkpoint.safetensors_writer import tensor_bytes
from smolcluster.engine.elastic.wal.journal import Journal
from smolcluster.errors import UserError

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


def test_the_log_is_flushed_and_marked_as_synced_in_the_background(tmp_path: Path) -> None:
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
        last.write_bytes(
            last.read_bytes()[:-32] + b"SJ1R\x09"
        )  # without its sync marker, but with the start of a record
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
    """A sweep finds the same defect a thousand times."""
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
    assert files.sizes[second.name] == second.stat().st_size - 32, "all but the sync marker"
    server.close()
    assert found(tmp_path) == 3
