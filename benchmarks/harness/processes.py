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

from benchmarks.harness.network import ended_by_sigterm
from benchmarks.harness.workload import ROOT, child_environment
from smolcluster.errors import SmolclusterError

GONE_S = 5.0
LAST_TO_GO = "torch_shm"  # torch's daemon that removes shared memory when its processes are gone, then goes by itself


@contextlib.contextmanager
def started(
    command: Sequence[str], *, environ: Mapping[str, str] | None = None, listen: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """A command, with everything it starts; nothing of it is left at the end. With `listen`, it is spoken to by pipes."""
    environ = {**child_environment(), **(environ or {})}
    with tempfile.TemporaryFile() as output, ended_by_sigterm():
        stdin, stdout = (subprocess.PIPE, subprocess.PIPE) if listen else (None, output)
        process = subprocess.Popen(command, env=environ, cwd=ROOT, stdin=stdin, stdout=stdout, stderr=output)
        try:
            yield process
        except SmolclusterError as error:
            output.seek(0)
            words = output.read().decode(errors="replace").strip()[-8000:]
            raise SmolclusterError(f"{error}; `{' '.join(command[:3])} ...` said:\n{words}") from error
        finally:
            family = [process.pid, *descendants(process.pid)]
            process.kill()  # first, so that it starts nobody again
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            for pid in family[1:]:
                with contextlib.suppress(OSError):
                    if not (Path("/proc") / str(pid) / "comm").read_text().startswith(LAST_TO_GO):
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


def bytes_between(machines: Sequence[Collection[int]]) -> int:
    """Bytes sent over TCP from a process of one machine to a process of another, as the kernel counts them.

    Machines are sets of processes here, all on this one. `ss` of iproute2 knows the open connections: what went over closed
    ones is not in it.
    """
    listed = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
    return crossed(listed, {pid: number for number, pids in enumerate(machines) for pid in pids})


def crossed(listed: str, machine_of: Mapping[int, int]) -> int:
    """The sum over a listing of `ss -tinpHO`. A connection is in it twice, once for each end."""
    ends: dict[tuple[str, str], tuple[int, int]] = {}  # own and other address -> machine, bytes sent
    for line in listed.splitlines():
        sent = re.search(r"bytes_sent:(\d+)", line)
        owners = [machine_of[int(pid)] for pid in re.findall(r"pid=(\d+)", line) if int(pid) in machine_of]
        if owners:
            own, other = (re.sub(r"[\[\]]|::ffff:", "", address) for address in line.split()[3:5])
            ends[own, other] = owners[0], int(sent[1]) if sent is not None else 0
    return sum(
        sent
        for (own, other), (machine, sent) in ends.items()
        if (other, own) in ends and ends[other, own][0] != machine
    )
