"""Checkpoints under crashes, power cuts, full disks and flipped bits.

`Disk` passes every operation of a save on to the real file system and keeps a model of what a power cut would leave:
the contents of a file survive from its fsync on, the names in a folder from the fsync of that folder on. A sweep
crashes at every operation in turn, lets each adversary decide what is left, and opens the folder again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from smolcluster.durable_files import Files, OutputFile, atomic_write_text
from smolcluster.engine.checkpoint.async_saver import Saver
from smolcluster.engine.checkpoint.snapshot import Snapshot, verify
from smolcluster.engine.checkpoint.store import CheckpointStore, folder_name
from smolcluster.errors import DamagedCheckpoint
from smolcluster.observe.events import CheckpointFailed, CheckpointSaved


class Crash(BaseException):
    """The process is gone."""


@dataclasses.dataclass
class ModelFile:
    data: bytes = b""
    durable: bytes = b""


@dataclasses.dataclass
class ModelFolder:
    names: dict[str, Node] = dataclasses.field(default_factory=dict)
    durable: dict[str, Node] = dataclasses.field(default_factory=dict)


Node = ModelFile | ModelFolder


class Disk(Files):
    """The real files under `root`, a model of their durable part, and a crash at one operation.

    `when` is before, half or after: whether the operation that crashes has taken effect. `ignore` names operations that
    the model takes for no-ops: a disk that lies, or a save that forgot them.
    """

    def __init__(self, root: Path, *, ignore: frozenset[str] = frozenset()) -> None:
        self.root = root
        self.tree = ModelFolder()
        self.ignore = ignore
        self.operations: list[str] = []
        self.crash_at, self.when, self.crashed = -1, "before", False

    def operate(self, kind: str, effect: Callable[[], object], half: Callable[[], object] | None = None) -> None:
        if self.crashed:
            raise Crash
        here = len(self.operations) == self.crash_at
        self.operations.append(kind)
        if not here:
            effect()
            return
        self.crashed = True
        if self.when == "after":
            effect()
        elif self.when == "half" and half is not None:
            half()
        raise Crash

    def copy_to(self, root: Path) -> Disk:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.root, root)
        disk = Disk(root, ignore=self.ignore)
        disk.tree = copy.deepcopy(self.tree)
        return disk

    def node(self, path: Path) -> Node:
        node: Node = self.tree
        for part in path.relative_to(self.root).parts:
            assert isinstance(node, ModelFolder)
            node = node.names[part]
        return node

    def folder(self, path: Path) -> ModelFolder:
        node = self.node(path)
        assert isinstance(node, ModelFolder)
        return node

    def create(self, path: Path) -> OutputFile:
        opened = []

        def effect() -> None:
            node = ModelFile()
            opened.append(DiskFile(self, path, node))
            self.folder(path.parent).names[path.name] = node

        try:
            self.operate("create", effect)
        except Crash:
            for file in opened:
                file.close()
            raise
        return opened[0]

    def mkdir(self, path: Path) -> None:
        def effect() -> None:
            path.mkdir()
            self.folder(path.parent).names[path.name] = ModelFolder()

        self.operate("mkdir", effect)

    def fsync_folder(self, path: Path) -> None:
        def effect() -> None:
            if "fsync_folder" not in self.ignore:
                folder = self.folder(path)
                folder.durable = dict(folder.names)

        self.operate("fsync_folder", effect)

    def _move(self, source: Path, target: Path) -> None:
        source.replace(target)
        self.folder(target.parent).names[target.name] = self.folder(source.parent).names.pop(source.name)

    def rename(self, source: Path, target: Path) -> None:
        assert not target.exists()
        self.operate("rename", lambda: self._move(source, target))

    def replace(self, source: Path, target: Path) -> None:
        self.operate("replace", lambda: self._move(source, target))

    def remove(self, path: Path) -> None:
        def half() -> None:
            for child in sorted(path.iterdir())[::2] if path.is_dir() else []:
                child.unlink()
                del self.folder(path).names[child.name]

        def effect() -> None:
            super(Disk, self).remove(path)
            del self.folder(path.parent).names[path.name]

        self.operate("remove", effect, half)

    @contextlib.contextmanager
    def lock(self, path: Path) -> Iterator[bool]:
        self.operate("lock", lambda: None)
        yield True


class DiskFile(OutputFile):
    def __init__(self, disk: Disk, path: Path, node: ModelFile) -> None:
        super().__init__(path)
        self.disk, self.node = disk, node

    def _write(self, data: bytes) -> None:
        super().write(data)
        self.node.data += data

    def write(self, data: bytes | memoryview) -> None:
        whole = bytes(data)
        self.disk.operate("write", lambda: self._write(whole), lambda: self._write(whole[: len(whole) // 2]))

    def fsync(self) -> None:
        def effect() -> None:
            if "fsync" not in self.disk.ignore:
                self.node.durable = self.node.data

        self.disk.operate("fsync", effect)

    def close(self) -> None:
        super().close()
        if not self.disk.crashed:
            self.disk.operate("close", lambda: None)


# What is left of names and contents that were not flushed. Each adversary is one way in which a file system may choose.


@dataclasses.dataclass
class Survivor:
    names: Callable[[ModelFolder], dict[str, Node]]
    data: Callable[[ModelFile], bytes]


def kept() -> Survivor:
    """kill -9: the kernel lives on and has everything."""
    return Survivor(lambda folder: folder.names, lambda file: file.data)


def lost() -> Survivor:
    return Survivor(lambda folder: folder.durable, lambda file: file.durable)


def renamed_before_data() -> Survivor:
    """Names reached the disk, contents did not: files are there and empty."""
    return Survivor(lambda folder: folder.names, lambda file: file.durable)


def zeroed() -> Survivor:
    """Names and lengths reached the disk, contents did not."""
    return Survivor(lambda folder: folder.names, lambda file: file.durable.ljust(len(file.data), b"\0"))


def mixed(seed: int) -> Callable[[], Survivor]:
    """Every change to a folder reaches the disk or not, each by itself, and contents in part."""

    def make() -> Survivor:
        rng = random.Random(seed)

        def names(folder: ModelFolder) -> dict[str, Node]:
            chosen = {}
            for name in sorted(folder.names.keys() | folder.durable.keys()):
                node = rng.choice([folder.names, folder.durable]).get(name)
                if node is not None:
                    chosen[name] = node
            return chosen

        def data(file: ModelFile) -> bytes:
            some = file.data[: rng.randint(0, len(file.data))]
            return file.data if file.durable == file.data else rng.choice([some, some.ljust(len(file.data), b"\0")])

        return Survivor(names, data)

    return make


ADVERSARIES = [kept, lost, renamed_before_data, zeroed, *(mixed(seed) for seed in range(3))]


Left = dict[str, "Left | bytes"]


def power_cut(folder: ModelFolder, survivor: Survivor) -> Left:
    """What is found when the machine is on again."""
    left: Left = {}
    for name, node in survivor.names(folder).items():
        left[name] = power_cut(node, survivor) if isinstance(node, ModelFolder) else survivor.data(node)
    return left


def build(left: Left, path: Path) -> None:
    path.mkdir()
    for name, item in left.items():
        if isinstance(item, bytes):
            (path / name).write_bytes(item)
        else:
            build(item, path / name)


def timeless(left: Left) -> str:
    """What is left as text, without what differs from one run to the next: random names, times and their hashes."""
    return re.sub(r"-[0-9a-f]{12}\b|\"(created|sha256)\": \"[^\"]*\"", "", str(left))


class FastFiles(Files):
    """The real files without flushing, which no test here can see."""

    def create(self, path: Path) -> OutputFile:
        file = super().create(path)
        file.fsync = lambda: None  # type: ignore[method-assign]
        return file

    def fsync_folder(self, path: Path) -> None:
        pass


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


def run(scenario: Scenario, prepared: Disk, root: Path, *, crash_at: int, when: str) -> Disk:
    """Saves with a crash at one operation; -1 for none."""
    disk = prepared.copy_to(root)
    disk.crash_at, disk.when = crash_at, when
    store = CheckpointStore(root / "run" / "checkpoints", keep=scenario.keep, files=disk)
    with contextlib.suppress(Crash):
        store.save(snapshot_of(scenario.step), best=scenario.best)
    assert disk.crashed == (crash_at >= 0), "the fault did not fire"
    return disk


def violations(scenario: Scenario, tmp_path: Path, *, ignore: frozenset[str] = frozenset()) -> Iterator[str]:
    """Every crash, every adversary: what was found wrong."""
    prepared = prepare(scenario, tmp_path / "prepared", ignore=ignore)
    count = len(run(scenario, prepared, tmp_path / "disk", crash_at=-1, when="after").operations)
    assert count > 15
    seen = set()
    folder = tmp_path / "left"
    for crash_at, when in [(k, when) for k in range(count) for when in ("before", "half", "after")] + [(-1, "after")]:
        disk = run(scenario, prepared, tmp_path / "disk", crash_at=crash_at, when=when)
        for index, adversary in enumerate(ADVERSARIES):
            left = power_cut(disk.tree, adversary())
            finished = crash_at < 0
            if (timeless(left), finished) in seen:
                continue
            seen.add((timeless(left), finished))
            shutil.rmtree(folder, ignore_errors=True)
            build(left, folder)
            try:
                check_survived(scenario, folder / "run" / "checkpoints", finished=finished)
            except (AssertionError, DamagedCheckpoint) as error:
                last = disk.operations[-1]
                yield f"{when} operation {crash_at} of {count} ({last}), adversary {index}: {error}"
    assert len(seen) > count, "the adversaries have no effect"


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
    atomic_write_text(prepared.root / "file", "old text", files=prepared)
    count = len(prepared.operations)
    for crash_at, when in [(k, when) for k in range(count) for when in ("before", "half", "after")] + [(-1, "after")]:
        disk = prepared.copy_to(tmp_path / "disk")
        disk.crash_at, disk.when = crash_at, when
        with contextlib.suppress(Crash):
            atomic_write_text(disk.root / "file", "the new text", files=disk)
        assert disk.crashed == (crash_at >= 0)
        for adversary in ADVERSARIES:
            text = power_cut(disk.tree, adversary())["file"]
            assert text in ([b"the new text"] if crash_at < 0 else [b"old text", b"the new text"])


# A full disk


class FullDisk(Files):
    """Has no space left from operation `full_at` on, until `full_at` is None. A write stores half before it fails."""

    def __init__(self) -> None:
        self.count = 0
        self.full_at: int | None = None
        self.failed: list[str] = []

    def takes_space(self, kind: str) -> bool:
        self.count += 1
        if self.full_at is None or self.count <= self.full_at:
            return False
        self.failed.append(kind)
        return True

    def check(self, kind: str) -> None:
        if self.takes_space(kind):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def create(self, path: Path) -> OutputFile:
        self.check("create")
        return FullDiskFile(self, path)

    def mkdir(self, path: Path) -> None:
        self.check("mkdir")
        super().mkdir(path)

    def fsync_folder(self, path: Path) -> None:
        self.check("fsync_folder")


class FullDiskFile(OutputFile):
    def __init__(self, disk: FullDisk, path: Path) -> None:
        super().__init__(path)
        self.disk = disk

    def write(self, data: bytes | memoryview) -> None:
        if self.disk.takes_space("write"):
            super().write(bytes(data)[: memoryview(data).nbytes // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(data)

    def fsync(self) -> None:
        self.disk.check("fsync")

    def close(self) -> None:
        super().close()
        self.disk.check("close")


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
    class Stuck(Files):
        def remove(self, path: Path) -> None:
            raise PermissionError(errno.EACCES, "in use", str(path))

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
