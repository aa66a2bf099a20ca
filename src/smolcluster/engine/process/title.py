"""The title of a process in `ps`: its role, its rank and its run.

The launcher starts each process with these as arguments, which only people read. A standby process gets its role
later, and overwrites its arguments. That works on Linux; elsewhere `ps` keeps showing a standby process as such.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

from smolcluster.engine.spec import WorkerSpec


def title_of(spec: WorkerSpec, *, standby: bool = False) -> str:
    """`smolcluster worker rank 1 of runs/demo`."""
    run = f" of {spec.run_dir}" if spec.run_dir else ""
    return f"smolcluster {'standby ' if standby else ''}{spec.role} rank {spec.rank}{run}"


def set_title(title: str) -> None:
    """Show `title` as this process's command line, cut to the space of the original."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end: numbers 48 and 49 in proc(5)
        if 0 < start < end:
            text = os.fsencode(title).replace(b"\0", b" ")[: end - start - 1]
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, text, len(text))
