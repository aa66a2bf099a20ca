"""A file lock, so that one process of a machine makes a download or token file while the others wait for it.

The lock only saves work; correctness does not depend on it: results are written to a temporary file and renamed, and every
process would write the same bytes. On a file system without locks all processes do the work.
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


def run_once(lock_path: Path, *, ready: Callable[[], T | None], produce: Callable[[], T]) -> T:
    """Return `ready()`, or if that is None the result of `produce()`, which one process at a time calls.

    An exception of `produce` is raised here, and the next process tries.
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
