"""Disks of tests: a model of what a power cut leaves, a full one, fast ones, and one that removes nothing.

`Disk` passes every operation on to the real file system and keeps a model of what a power cut would leave: the contents of a
file survive from its fsync on, the names in a folder from the fsync of that folder on. `sweep` crashes at every operation in
turn, lets each adversary decide what is left, and opens the folder again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from smolcluster.durable_files import Files, OutputFile
from smolcluster.errors import SmolclusterError


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

    def fsync_file(self, path: Path) -> None:
        def effect() -> None:
            node = self.node(path)
            assert isinstance(node, ModelFile)
            if "fsync" not in self.ignore:
                node.durable = node.data

        self.operate("fsync_file", effect)

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
    """Each name reaches the disk or not, and of what was not flushed some part, with zeros before, in or after it."""

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
            start, end = sorted(rng.randint(len(file.durable), len(file.data)) for _ in range(2))
            holed = file.data[:start] + bytes(end - start) + file.data[end:]
            return rng.choice([file.data[:end], file.data[:start].ljust(len(file.data), b"\0"), holed])

        return Survivor(names, data)

    return make


ADVERSARIES = [kept, lost, renamed_before_data, zeroed, *(mixed(seed) for seed in range(4))]


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


def crashes(operations: Sequence[str]) -> list[tuple[int, str]]:
    """No crash, and one at each of these operations: before it, when it is half done, and after it."""
    divisible = ("write", "remove")
    each = [(k, when) for k in range(len(operations)) for when in ("before", "half", "after")]
    return [(-1, "after"), *((k, when) for k, when in each if when != "half" or operations[k] in divisible)]


def sweep(
    prepared: Disk, folder: Path, act: Callable[[Disk], tuple[Any, Any]], check: Callable[[Path, Any, int], None]
) -> Iterator[str]:
    """Act with every crash, let every adversary choose what is left, and check that; yield what is wrong.

    `act` returns what is expected after a kill, and after a power cut. `check` gets what is left, the one or the other, and
    a number.
    """
    disk = prepared.copy_to(folder / "disk")
    act(disk)
    operations = disk.operations
    seen = set()
    for crash_at, when in crashes(operations):
        disk = prepared.copy_to(folder / "disk")
        disk.crash_at, disk.when = crash_at, when
        if_killed, if_cut = act(disk)
        assert disk.crashed == (crash_at >= 0), "the fault did not fire"
        for index, adversary in enumerate(ADVERSARIES):
            left, expected = power_cut(disk.tree, adversary()), if_killed if adversary is kept else if_cut
            key = (timeless(left), expected)
            if key in seen:
                continue
            seen.add(key)
            shutil.rmtree(folder / "left", ignore_errors=True)
            build(left, folder / "left")
            try:
                check(folder / "left", expected, len(seen))
            except (AssertionError, SmolclusterError) as error:
                yield f"{when} operation {crash_at} ({disk.operations[-1]}), adversary {index}: {error}"
    assert len(seen) > len(operations), "the adversaries have no effect"


class FastFiles(Files):
    """The real files without flushing, which no test here can see."""

    def create(self, path: Path) -> OutputFile:
        file = super().create(path)
        file.fsync = lambda: None  # type: ignore[method-assign]
        return file

    def fsync_file(self, path: Path) -> None:
        pass

    def fsync_folder(self, path: Path) -> None:
        pass


class Stuck(FastFiles):
    """Removes nothing."""

    def remove(self, path: Path) -> None:
        raise PermissionError(errno.EACCES, "in use", str(path))


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

    def fsync_file(self, path: Path) -> None:
        self.check("fsync_file")

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
