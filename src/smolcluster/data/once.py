"""One process does the work while the others wait for it.

Several workers of one machine start at the same moment and want the same download or token file. The first to lock a file
works; the rest wait until it is done, or dead. The lock only saves work. That the result is right never depends on it: the one
that works writes a temporary file and renames it, and every worker would write the same bytes. So where a file system has no
locks all of them work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from smolcluster.locks import try_lock

T = TypeVar("T")

POLL_S = 0.05


def once(lock_path: Path, *, ready: Callable[[], T | None], produce: Callable[[], T]) -> T:
    """The result of `ready()`, made by `produce()` in one of the processes that ask for it at the same time.

    Whatever `produce` raises is raised here, and another process tries.
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
            with contextlib.suppress(OSError):  # another was quicker, or it is still open elsewhere on Windows
                path.unlink()
