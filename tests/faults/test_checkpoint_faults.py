"""Checkpoints under crashes, power cuts, full disks and flipped bits. The disks are those of `disks.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.faults.disks import (
    ADVERSARIES,
    Crash,
    Disk,
    FastFiles,
    FullDisk,
    ModelFile,
    Stuck,
    crashes,
    power_cut,
    sweep,
)

from smolcluster.durable_files import Files, OutputFile, durable_write_text, ensure_folder
from smolcluster.engine.checkpoint.async_saver import Saver
from smolcluster.engine.checkpoint.snapshot import Snapshot, verify
from smolcluster.engine.checkpoint.store import CheckpointStore, folder_name
from smolcluster.errors import DamagedCheckpoint
from smolcluster.observe.events import CheckpointFailed, CheckpointSaved


def snapshot_of(step: int) -> Snapshot:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(3, 2, generator=generator)
    return Snapshot(
        step=step,
        weights={"a.weight": weight, "b.bias": torch.randn(5, generator=generator), "head.weight": weight},
        optimizer={
            "exp_avg/a.weight": torch.randn(3, 2, generator=generator),
            "step/a.weight": torch.tensor(float(step)),
        },
        state={"position": step * 16, "scale": 1.0 / (step + 1)},
        metrics={"val_loss": 1.0 / (step + 1)},
        info={"strategy": "allreduce"},
    )


def assert_same(found: Snapshot, expected: Snapshot) -> None:
    for mine, theirs in ((found.weights, expected.weights), (found.optimizer, expected.optimizer)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert (found.step, found.state, found.metrics, found.info) == (
        expected.step,
        expected.state,
        expected.metrics,
        expected.info,
    )


# Crashes


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is there before, and the save that crashes."""

    keep: int
    before: tuple[tuple[int, bool], ...]  # step, best
    step: int
    best: bool
    damaged: bool = False  # a damaged checkpoint of the same step is in the way


SCENARIOS = {
    "first": Scenario(2, (), 300, best=True),
    "plain": Scenario(2, ((100, True), (200, False)), 300, best=False),
    "best, prunes": Scenario(1, ((100, True), (200, False)), 300, best=True),
    "damaged in the way": Scenario(2, ((100, True), (200, False), (300, False)), 300, best=False, damaged=True),
}


def prepare(scenario: Scenario, root: Path, *, ignore: frozenset[str]) -> Disk:
    root.mkdir()
    disk = Disk(root, ignore=ignore)
    store = CheckpointStore(root / "run" / "checkpoints", keep=scenario.keep, files=disk)
    for step, best in scenario.before:
        store.save(snapshot_of(step), best=best)
    if scenario.damaged:
        victim = store.folder / folder_name(scenario.step) / "state.json"
        node = disk.node(victim)
        assert isinstance(node, ModelFile)
        victim.write_bytes(b"{}")
        node.data = node.durable = b"{}"
    return disk


def violations(scenario: Scenario, tmp_path: Path, *, ignore: frozenset[str] = frozenset()) -> Iterator[str]:
    """Every crash of a save, every adversary: what was found wrong."""

    def save(disk: Disk) -> tuple[bool, bool]:
        """Return whether it is finished, twice."""
        store = CheckpointStore(disk.root / "run" / "checkpoints", keep=scenario.keep, files=disk)
        with contextlib.suppress(Crash):
            store.save(snapshot_of(scenario.step), best=scenario.best)
        return not disk.crashed, not disk.crashed

    def check(left: Path, finished: bool, _: int) -> None:
        check_survived(scenario, left / "run" / "checkpoints", finished=finished)

    return sweep(prepare(scenario, tmp_path / "prepared", ignore=ignore), tmp_path, save, check)


def check_survived(scenario: Scenario, folder: Path, *, finished: bool) -> None:
    store = CheckpointStore(folder, keep=scenario.keep, files=FastFiles())
    loaded = store.load_latest()
    good_before = [step for step, _ in scenario.before if not (scenario.damaged and step == scenario.step)]
    allowed = [scenario.step] if finished else [*good_before[-1:], scenario.step]
    if loaded is None:
        assert not finished, "a finished save is gone"
        assert not scenario.before, "all checkpoints are gone"
    else:
        path, snapshot = loaded
        assert snapshot.step in allowed, f"loaded step {snapshot.step}, not one of {allowed}"
        assert_same(snapshot, snapshot_of(snapshot.step))
        # A crash leaves nothing half done under a final name.
        for path in store.list():
            if not (scenario.damaged and path.name == folder_name(scenario.step)):
                verify(path)
        if scenario.before:
            best = store.load("best")
            assert best.step in {100, scenario.step if scenario.best else 100}
            assert_same(best, snapshot_of(best.step))

    # A pointer is whole and names what is there, except where that had to be moved out of the way.
    for pointer in (folder / "latest", folder / "best"):
        if pointer.exists() and not scenario.damaged:
            assert (folder / pointer.read_text(encoding="utf-8").removesuffix("\n")) in store.list(), pointer.name

    # The next save works, and clears up.
    store.save(snapshot_of(400))
    assert_same(store.load(), snapshot_of(400))
    assert not list(folder.glob(".tmp-*"))
    assert len(store.list()) <= scenario.keep + 1
    assert (folder / "latest").read_text(encoding="utf-8") == "step-00000400\n"


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_at_any_operation_leaves_the_previous_or_the_new_checkpoint(name: str, tmp_path: Path) -> None:
    assert list(violations(SCENARIOS[name], tmp_path)) == []


@pytest.mark.parametrize("forgotten", ["fsync", "fsync_folder"])
def test_the_sweep_would_notice_a_forgotten_flush(forgotten: str, tmp_path: Path) -> None:
    assert next(violations(SCENARIOS["plain"], tmp_path, ignore=frozenset({forgotten})), None) is not None


def test_an_atomic_write_is_old_or_new_at_every_crash(tmp_path: Path) -> None:
    prepared = Disk(tmp_path / "prepared")
    prepared.root.mkdir()
    durable_write_text(prepared.root / "file", "old text", files=prepared)
    for crash_at, when in crashes(prepared.operations):
        disk = prepared.copy_to(tmp_path / "disk")
        disk.crash_at, disk.when = crash_at, when
        with contextlib.suppress(Crash):
            durable_write_text(disk.root / "file", "the new text", files=disk)
        assert disk.crashed == (crash_at >= 0)
        for adversary in ADVERSARIES:
            text = power_cut(disk.tree, adversary())["file"]
            assert text in ([b"the new text"] if crash_at < 0 else [b"old text", b"the new text"])


def test_atomic_write_leaves_the_old_text_when_it_fails(tmp_path: Path) -> None:
    class Failing(Files):
        def replace(self, source: Path, target: Path) -> None:
            raise OSError(errno.EIO, "broken")

    path = tmp_path / "file"
    durable_write_text(path, "old ä\n")
    with pytest.raises(OSError, match="broken"):
        durable_write_text(path, "new", files=Failing())
    assert path.read_text(encoding="utf-8") == "old ä\n"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    durable_write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "new"


def test_output_file_copes_with_short_writes_and_never_overwrites(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "file") as file:
        real = file._raw

        class Short:
            def write(self, data: memoryview) -> int:
                return real.write(data[:3]) or 0

        file._raw = Short()  # type: ignore[assignment]
        file.write(b"0123456789")
        file._raw = real
    assert (tmp_path / "file").read_bytes() == b"0123456789"
    with pytest.raises(FileExistsError):
        OutputFile(tmp_path / "file")
    with pytest.raises(FileExistsError):
        Files().rename(tmp_path / "file", tmp_path)


def test_ensure_folder_makes_parents_durable_in_order(tmp_path: Path) -> None:
    calls = []

    class Recorded(Files):
        def mkdir(self, path: Path) -> None:
            calls.append(("mkdir", path.name))
            super().mkdir(path)

        def fsync_folder(self, path: Path) -> None:
            calls.append(("fsync", path.name))
            super().fsync_folder(path)

    ensure_folder(tmp_path / "a" / "b", files=Recorded())
    assert calls == [("mkdir", "a"), ("fsync", tmp_path.name), ("mkdir", "b"), ("fsync", "a")]
    ensure_folder(tmp_path / "a" / "b", files=Recorded())
    assert len(calls) == 4


# A full disk


def test_a_full_disk_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    disk = FullDisk()
    CheckpointStore(tmp_path / "count", keep=2, files=disk).save(snapshot_of(100))
    seen = set()
    for full_at in range(disk.count):
        disk = FullDisk()
        store = CheckpointStore(tmp_path / str(full_at), keep=2, files=disk)
        store.save(snapshot_of(100), best=True)
        saved: list[CheckpointSaved] = []
        failed: list[CheckpointFailed] = []
        with Saver(store, on_saved=saved.append, on_failed=failed.append) as saver:
            disk.count, disk.full_at = 0, full_at
            saver.submit(snapshot_of(200))
            saver.wait()
            if not failed:  # the folder is already there, so that this save needs fewer operations
                assert not disk.failed
                continue
            assert [f.step for f in failed] == [200]
            assert "No space left" in failed[0].reason
            assert saved == []
            seen.update(disk.failed)
            left = store.load()
            assert left.step in (100, 200)
            assert_same(left, snapshot_of(left.step))
            assert not list(store.folder.glob(".tmp-*")), "the failed write was not cleaned up"

            disk.full_at = None
            saver.submit(snapshot_of(300))
            saver.wait()
        assert [s.step for s in saved] == [300]
        assert_same(store.load(), snapshot_of(300))
        assert_same(store.load("best"), snapshot_of(100))
    assert seen == {"mkdir", "create", "write", "fsync", "close", "fsync_folder"}


def test_a_failed_removal_of_old_checkpoints_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=1, files=Stuck())
    for step in (1, 2, 3):
        store.save(snapshot_of(step))
    assert [path.name for path in store.list()] == ["step-00000003"]
    assert "cannot remove" in caplog.text
    CheckpointStore(tmp_path, keep=1).save(snapshot_of(4))
    assert not list(tmp_path.glob(".tmp-*"))


# Damage


@pytest.fixture
def two(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, files=FastFiles())
    store.save(snapshot_of(100), best=True)
    store.save(snapshot_of(200))
    return store


CONTENTS = ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("name", CONTENTS)
def test_every_flipped_bit_and_every_truncation_is_found(two: CheckpointStore, name: str) -> None:
    folder = two.folder / "step-00000200"
    file = folder / name
    good = file.read_bytes()
    rng = random.Random(7)
    damages = [good[:length] for length in range(len(good))] + [good + b"\0", good + b" "]
    for position in range(len(good)):
        flipped = bytearray(good)
        flipped[position] ^= 1 << rng.randrange(8)
        damages.append(bytes(flipped))
    for damage in damages:
        file.write_bytes(damage)
        with pytest.raises(DamagedCheckpoint, match=rf"step-00000200/{name}: "):
            verify(folder)
    file.write_bytes(good)
    verify(folder)


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing"])
@pytest.mark.parametrize("name", CONTENTS)
def test_damage_falls_back_to_the_previous_one_loudly(
    two: CheckpointStore, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = two.folder / "step-00000200" / name
    good = file.read_bytes()
    rng = random.Random(11)
    for _ in range(4):
        if damage == "flip":
            flipped = bytearray(good)
            flipped[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
            file.write_bytes(flipped)
        elif damage == "truncate":
            file.write_bytes(good[: rng.randrange(len(good))])
        else:
            file.unlink(missing_ok=True)
        caplog.clear()
        loaded = two.load_latest()
        assert loaded[0].name == "step-00000100"
        assert_same(loaded[1], snapshot_of(100))
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert f"step-00000200/{name}" in record.getMessage()

    # Training goes on from the older one and comes to the same step again: the damaged folder gives way.
    two.save(snapshot_of(200))
    assert_same(two.load(), snapshot_of(200))
    assert len(list(two.folder.glob("damaged-step-00000200-*"))) == 1


def test_nothing_good_left_is_an_error_not_a_fresh_start(two: CheckpointStore) -> None:
    for path in two.list():
        (path / "state.json").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match=r"no good checkpoint .* 2 damaged .*step-00000100/state.json: 0 bytes"):
        two.load_latest()


@pytest.mark.parametrize("pointer", ["latest", "best"])
def test_damaged_pointers_mislead_no_one(two: CheckpointStore, pointer: str) -> None:
    good = (two.folder / pointer).read_bytes()
    damages = [b"", b"\xff\xfe", b"../../etc\n", b"/etc\n", b"step-00000900\n", b"x" * 10_000]
    for bit in range(len(good) * 8):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << (bit % 8)
        damages.append(bytes(flipped))
    for damage in damages:
        (two.folder / pointer).write_bytes(damage)
        assert two.load().step == 200
        assert two.load("best").step == 100
    (two.folder / pointer).unlink()
    assert (two.load().step, two.load("best").step) == (200, 100)
    # What is best survives pruning without its pointer, too.
    two.save(snapshot_of(300))
    two.save(snapshot_of(400))
    assert two.load("best").step == 100
