"""Commands that start processes of their own: found in /proc, and ended with all they have started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.network import ended_by_sigterm
from benchmarks.workload import ROOT, child_environment
from smolcluster.errors import SmolclusterError

GONE_S = 5.0


@contextlib.contextmanager
def started(
    command: Sequence[str], *, environ: Mapping[str, str] | None = None, listen: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """A command, with everything it starts; nothing of it is left at the end. With `listen`, its output is a pipe."""
    environ = {**child_environment(), **(environ or {})}
    with tempfile.TemporaryFile() as output, ended_by_sigterm():
        stdout = subprocess.PIPE if listen else output
        process = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=stdout, stderr=output)
        try:
            yield process
        except SmolclusterError as error:
            output.seek(0)
            words = output.read().decode(errors="replace").strip()[-8000:]
            raise SmolclusterError(f"{error}; `{' '.join(command[:4])} ...` said:\n{words}") from error
        finally:
            family = [process.pid, *descendants(process.pid)]
            process.kill()  # first, so that it starts nobody again
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            for pid in family[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + GONE_S
            while any(map(environment_of, family[1:])) and time.monotonic() < deadline:
                time.sleep(0.005)  # they are not our children: there is nothing to wait for


def descendants(pid: int) -> list[int]:
    """Processes started by this one, and by those."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def environment_of(pid: int) -> dict[str, str]:
    """Empty when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(item.decode(errors="replace").partition("=")[::2] for item in raw.split(b"\0") if item)


def socket_bytes(pids: Collection[int]) -> int:
    """Bytes that the TCP sockets of these processes have sent, as the kernel counts them (`ss` of iproute2)."""
    listed = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
    total = 0
    for line in listed.splitlines():
        owner, sent = re.search(r"pid=(\d+)", line), re.search(r"bytes_sent:(\d+)", line)
        if owner is not None and sent is not None and int(owner[1]) in pids:
            total += int(sent[1])
    return total
