"""File locks that the system releases when their holder dies. On Windows they lock one byte far beyond the end of the file, so
that it can still be read and written."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

T = TypeVar("T")

POLL_S = 0.05
_FAR = 2**31 - 2


def try_lock(fd: int) -> bool:
    """Lock a file; return False if another process has it locked. Raises OSError on file systems without locks."""
    try:
        if sys.platform == "win32":
            os.lseek(fd, _FAR, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int) -> None:
    if sys.platform == "win32":
        os.lseek(fd, _FAR, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(fd, fcntl.LOCK_UN)


def run_once(lock_path: Path, *, ready: Callable[[], T | None], produce: Callable[[], T]) -> T:
    """Return `ready()`, or if that is None the result of `produce()`, which one process at a time calls.

    An exception of `produce` is raised here, and the next process tries. The lock only saves work: on a file system without
    locks all processes do it.
    """
    result = ready()
    if result is None:
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(lock_path):
            result = ready()  # another process may have finished before our lock
            return produce() if result is None else result
    return result


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, and remove it in the end."""
    with path.open("ab") as file:
        with contextlib.suppress(OSError):
            while not try_lock(file.fileno()):
                time.sleep(POLL_S)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # removed by another process, or still open there (Windows)
                path.unlink()
