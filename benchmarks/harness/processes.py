"""Commands and the processes that they start: found in /proc, and ended together."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.network import Network, ended_by_sigterm
from smolcluster.errors import SmolclusterError

ROOT = Path(__file__).resolve().parents[2]
GONE_S = 5.0
WAIT_S = 300.0
LAST_TO_GO = "torch_shm"  # torch's daemon that removes shared memory when its processes are gone, then ends by itself


# Commands


def child_environment() -> dict[str, str]:
    """Return an environment in which a process finds this project and computes with one thread."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for processes that are started inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def smolcluster_command() -> list[str]:
    """Return the installed command, or the module where there is none."""
    script = Path(sys.executable).parent / "smolcluster"
    return [str(script)] if script.is_file() else [sys.executable, "-m", "smolcluster"]


def train_command(run_dir: Path, overrides: Mapping[str, object], *options: str, config: str = "gpt") -> list[str]:
    """Return `smolcluster train CONFIG` with these overrides. Those that are None keep the value of the configuration."""
    command = [*smolcluster_command(), "train", config, "--run-dir", str(run_dir), *options, "--override"]
    return [*command, *(f"{key}={value}" for key, value in overrides.items() if value is not None)]


@contextlib.contextmanager
def started(
    command: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    listen: bool = False,
    network: Network | None = None,
    host: int = 0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command, on a host of the network if there is one; end it with all its descendants.

    `listen`: its standard input and output are pipes. Its other output is added to a `SmolclusterError` of the block.
    """
    environ = {**child_environment(), **(environ or {})}
    with tempfile.TemporaryFile() as output, ended_by_sigterm():
        stdin, stdout = (subprocess.PIPE, subprocess.PIPE) if listen else (None, output)
        with contextlib.nullcontext() if network is None else network.inside(host):
            environ = environ if network is None else network.environment(environ)
            process = subprocess.Popen(command, env=environ, cwd=ROOT, stdin=stdin, stdout=stdout, stderr=output)
        try:
            yield process
        except SmolclusterError as error:
            output.seek(0)
            words = output.read().decode(errors="replace").strip()[-8000:]
            raise SmolclusterError(f"{error}; `{' '.join(command[:3])} ...` wrote:\n{words}") from error
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    family = [process.pid, *descendants(process.pid)]
    process.kill()  # first, so that it restarts none of the others
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
        time.sleep(0.005)  # they are not our children, so there is nothing to wait for


def wait_until(question: Callable[[], bool], process: subprocess.Popen[bytes], *, what: str) -> None:
    """Wait for what a process writes to files. Raise if it ends before."""
    deadline = time.monotonic() + WAIT_S
    while not question():
        if process.poll() is not None:
            raise SmolclusterError(f"waited for {what}, and the process ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise SmolclusterError(f"waited {WAIT_S:g} s for {what}")
        time.sleep(0.1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# Processes


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
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
    """Return the environment of a process; empty when it has ended."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(item.decode(errors="replace").partition("=")[::2] for item in raw.split(b"\0") if item)


def bytes_between(machines: Sequence[Collection[int]]) -> int:
    """Return the bytes that the kernel has sent over TCP from processes of one machine to those of another.

    A machine is a set of processes here, all of this computer. `ss` of iproute2 lists open connections: the bytes of closed
    ones are not counted.
    """
    listed = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
    return crossed(listed, {pid: number for number, pids in enumerate(machines) for pid in pids})


def crossed(listed: str, machine_of: Mapping[int, int]) -> int:
    """Return the sum over a listing of `ss -tinpHO`, which has every connection twice, once for each end."""
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
