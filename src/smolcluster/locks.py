"""File locks that the system releases when their holder dies, however it dies. On Windows they lock one byte, far beyond
what any file of ours holds, so that they are in nobody's way who reads or writes."""

from __future__ import annotations

import os
import sys

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_FAR = 2**31 - 2


def try_lock(fd: int) -> bool:
    """Return False when another holder has it. Raises OSError where it cannot be locked: some file systems have no locks."""
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
