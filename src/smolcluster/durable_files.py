"""Atomic and durable writes: the file operations that they need, behind one small interface.

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
from typing import IO, Self

from smolcluster.locks import try_lock, unlock

if sys.platform != "win32":
    import fcntl

# Errors of a file system without an operation (flushing a folder on SMB, locking on NFS).
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}

TEMPORARY = ".tmp-"  # every unfinished file or folder starts with this


class Closing(ABC):
    """A context manager that calls `close`."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OutputFile(Closing):
    """A new file, written front to back, unbuffered. Use it in a `with` block."""

    def __init__(self, path: Path) -> None:
        self._raw = path.open("xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Write all of `data`."""
        rest = memoryview(data).cast("B")
        while rest.nbytes:
            rest = rest[self._raw.write(rest) or 0 :]

    def fsync(self) -> None:
        """Wait until the contents are on stable storage."""
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
    """The real file system. A durable write only uses these calls."""

    def create(self, path: Path) -> OutputFile:
        """Create a file that must not exist."""
        return OutputFile(path)

    def mkdir(self, path: Path) -> None:
        """Create a folder that must not exist."""
        path.mkdir()

    def fsync_file(self, path: Path) -> None:
        """Flush a file that an earlier process wrote."""
        with path.open("r+b") as file:
            os.fsync(file.fileno())

    def fsync_folder(self, path: Path) -> None:
        """Make the names inside `path` durable. Windows needs no such call."""
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
        """Rename a folder or file; the new name must be free."""
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        source.rename(target)

    def replace(self, source: Path, target: Path) -> None:
        """Replace a file atomically."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with its contents. Does not follow symbolic links."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self, path: Path) -> Iterator[bool]:
        """Hold `path` as a lock, which the system releases when this process dies.

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
    """Return a unique temporary path for a file or folder that becomes `name` when it is finished."""
    return f"{TEMPORARY}{name}-{uuid.uuid4().hex[:12]}"


def ensure_folder(path: Path, *, files: Files) -> None:
    """Create `path` and its missing parents, each durable before the next."""
    if path.is_dir():
        return
    if path.parent != path:
        ensure_folder(path.parent, files=files)
    with contextlib.suppress(FileExistsError):
        files.mkdir(path)
    files.fsync_folder(path.parent)


def size_on_disk(folder: Path) -> int:
    """Return the bytes of all files in a folder, 0 if it does not exist. Files may disappear meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):  # skips folders that are gone
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size  # noqa: PTH118
    return total


def write_private_text(path: Path, text: str) -> None:
    """Write a text file that only its owner can read, also while it is written. Replaces an existing file."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


@contextlib.contextmanager
def atomic_write(path: Path, *, mode: int = 0o666, flush: bool = True) -> Iterator[IO[bytes]]:
    """Write a file atomically: to a temporary file in its folder, flushed, then renamed.

    After a crash or a power cut the file is the old one or the new one, complete. The folder is not flushed, so a power cut
    can undo the rename: use `durable_write_text` for what must not be lost. Without `flush`, the
    promise holds only for a crash of the process.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def durable_write_text(path: Path, text: str, *, files: Files | None = None) -> None:
    """Write a small text file atomically and durably: when this returns, the new text survives a power cut."""
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
