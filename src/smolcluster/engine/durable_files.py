"""The few operations a durable write needs, behind one small object.

A power cut keeps only what was flushed. The contents of a file are safe after `OutputFile.fsync`; its name, and every
rename, only after `fsync_folder` of the folder that holds it. Code that must survive a crash makes all its changes
through a `Files`, so that a test can replace it and fail, or crash, at each operation in turn.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from smolcluster.locks import try_lock, unlock

if sys.platform != "win32":
    import fcntl

# What a file system answers when it does not know an operation (to flush a folder on SMB, to lock on NFS).
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}

TEMPORARY = ".tmp-"  # every unfinished file or folder starts with this


class Closing(ABC):
    """Base of what a `with` block closes."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OutputFile(Closing):
    """A new file, written front to back without a buffer of ours. Use it in a `with` block."""

    def __init__(self, path: Path) -> None:
        self._raw = path.open("xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Writes all of `data`: the system may take less than it is given."""
        rest = memoryview(data).cast("B")
        while rest.nbytes:
            rest = rest[self._raw.write(rest) or 0 :]

    def fsync(self) -> None:
        """Waits until the contents are on the disk itself."""
        fd = self._raw.fileno()
        if sys.platform == "darwin":
            # Plain fsync on macOS stops at the drive's cache.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
                return
        os.fsync(fd)

    def close(self) -> None:
        self._raw.close()


class Files:
    """The real file system. Every change a durable write makes is one of these calls."""

    def create(self, path: Path) -> OutputFile:
        """Opens a file that must not exist yet."""
        return OutputFile(path)

    def mkdir(self, path: Path) -> None:
        """Makes one folder that must not exist yet."""
        path.mkdir()

    def fsync_file(self, path: Path) -> None:
        """Flushes a file that an earlier process wrote, as far as the drive: the next `OutputFile.fsync` goes further."""
        with path.open("r+b") as file:
            os.fsync(file.fileno())

    def fsync_folder(self, path: Path) -> None:
        """Makes the names inside `path` durable. Windows has no such call and journals names by itself."""
        if sys.platform != "win32":
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
            finally:
                os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a folder or file a new name, which must be free."""
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        source.rename(target)

    def replace(self, source: Path, target: Path) -> None:
        """Renames a file over another: readers see the old one or the new one, never a mix."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Removes a file, or a folder with all it holds. Never follows a symbolic link."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self, path: Path) -> Iterator[bool]:
        """Holds `path` as a lock that the system releases when this process dies, however it dies.

        Yields False where the file system has no locks. Raises BlockingIOError when another holder has it.
        """
        with path.open("ab") as file:
            held = True
            try:
                if not try_lock(file.fileno()):
                    raise BlockingIOError(errno.EAGAIN, "another process is writing here", str(path.parent))
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                held = False
            try:
                yield held
            finally:
                if held:
                    unlock(file.fileno())


def temporary_name(name: str) -> str:
    """A name that no one else uses, for something that will be called `name` when it is finished."""
    return f"{TEMPORARY}{name}-{uuid.uuid4().hex[:12]}"


def ensure_folder(path: Path, *, files: Files) -> None:
    """Makes `path` and its missing parents, each durable before the next."""
    if path.is_dir():
        return
    if path.parent != path:
        ensure_folder(path.parent, files=files)
    with contextlib.suppress(FileExistsError):
        files.mkdir(path)
    files.fsync_folder(path.parent)


def size_on_disk(folder: Path) -> int:
    """Return the bytes of all files in a folder, 0 if there is none. Files may go while it looks."""
    total = 0
    for place, _, names in os.walk(folder):  # passes over folders that are gone
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118
    return total


def write_private_text(path: Path, text: str) -> None:
    """Write a text file that only its owner can read, also while it is written. One that is there may be readable: it goes."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def atomic_write_text(path: Path, text: str, *, files: Files | None = None) -> None:
    """Writes a small text file: after a crash at any moment it holds the old text or the new one, whole."""
    files = files or Files()
    temporary = path.with_name(temporary_name(path.name))
    try:
        with files.create(temporary) as file:
            file.write(text.encode("utf-8"))
            file.fsync()
        files.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            files.remove(temporary)
        raise
    files.fsync_folder(path.parent)
