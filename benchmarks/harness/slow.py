"""Emulate a slow machine: limit a process, or all processes of a program, to a quarter of their core.

With root and the `cpu` controller of cgroups, by a quota: together they run 1 ms of every 4, and time that they do not use is
lost, as on a slow machine. Else by competitors: three busy loops on the same core with the same priority, behind which every
thread that wakes up has to queue.

    with slowed(pid, core=1) as how:      # "quota" or "competitors"
        ...
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.network import ended_by_sigterm

SHARE = 0.25
PERIOD_US = 4000
COMPETITORS = 3
_CGROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))  # version 1, version 2


@contextlib.contextmanager
def slowed(*pids: int, core: int) -> Iterator[str]:
    """Limit all threads of these processes, which already run on this core, until the end of the block."""
    with ended_by_sigterm(), contextlib.ExitStack() as stack:
        group = _make_group()
        if group is not None:
            stack.callback(_remove, group)
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid))
            yield "quota"
        else:
            stack.enter_context(busy(core))
            yield "competitors"


def _make_group() -> Path | None:
    """Create a control group with the quota; return None where that is not possible."""
    quota = round(PERIOD_US * SHARE)
    for parent in _CGROUPS:
        group = parent / f"smolbench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / "cpu.cfs_quota_us").exists():
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        except OSError:
            group.rmdir()
            continue
        return group
    return None


def _remove(group: Path) -> None:
    """Return its processes to the parent group, and remove it."""
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    with contextlib.suppress(OSError):
        group.rmdir()


@contextlib.contextmanager
def busy(core: int) -> Iterator[None]:
    """Run competitors on this core. They end with this process, however it ends."""
    spin = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass"
    with ended_by_sigterm(), contextlib.ExitStack() as stack:
        for _ in range(COMPETITORS):
            process = subprocess.Popen([sys.executable, "-c", spin])
            stack.callback(process.wait)
            stack.callback(process.kill)
            os.sched_setaffinity(process.pid, {core})
        yield
