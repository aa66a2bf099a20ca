"""Start, control and end the processes of a run on this machine. Nothing here imports torch.

Each is `python -m smolcluster.engine.process.main`: it reads JSON lines from standard input, first its `WorkerSpec`, and writes
events to standard output. Standard error goes to its log.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smolcluster.engine.process.title import title_of
from smolcluster.engine.spec import ENVIRONMENT, SIGNALS_TOGETHER_S, WorkerSpec
from smolcluster.errors import UserError
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.launch.prepare import Prepared
from smolcluster.observe.events import Event, Failed, Notice, from_json
from smolcluster.observe.logs import log_path, tail
from smolcluster.stopping import HANGUP, leave_terminal, stop_signals, terminals

WORKER_MARK = "SMOLCLUSTER_WORKER"  # in the environment of every process of a run
STOP = '{"op": "stop"}'

# Ctrl-C in a terminal signals its process group. Workers are in separate groups: only the launcher handles it.
NEW_GROUP: dict[str, Any] = {"process_group": 0}
if sys.platform == "win32":
    NEW_GROUP = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}


@dataclass(slots=True, eq=False)
class Child:
    """One process, and how it ended."""

    spec: WorkerSpec
    process: subprocess.Popen[bytes]
    log: Path
    failed: Failed | None = None
    finished: bool = False  # it reported the end; exit status 0 alone is not enough
    died: float | None = None  # time of its exit

    @property
    def rank(self) -> int:
        return self.spec.rank

    @property
    def name(self) -> str:
        if self.spec.role == "server":
            return "the server"
        return f"worker {self.rank}" if self.spec.plane == "elastic" else f"worker rank {self.rank}"

    @property
    def crashed(self) -> bool:
        """Return whether it exited without finishing, and not on request."""
        in_order = self.failed is None and (self.finished or self.process.returncode == Interrupted.exit_code)
        return self.died is not None and not in_order

    @property
    def lost_peer(self) -> bool:
        """Return whether it ended only because another rank did."""
        return self.failed is not None and self.failed.kind == "peer"

    @property
    def user_error(self) -> UserError | None:
        """Return the user error that ended it, which a restart would not fix."""
        return UserError(self.failed.message) if self.failed is not None and self.failed.kind == "user" else None


# Events of all processes. (child, None): it closed its output. (None, notice): the user's first signal.
# (None, None): wake up the policy.
Inbox = queue.SimpleQueue[tuple[Child | None, Event | None]]


def check_not_in_worker() -> None:
    if WORKER_MARK in os.environ:
        raise UserError(
            "a worker tried to start workers: importing your task's file calls train; put the call under: "
            'if __name__ == "__main__":'
        )


def make_spec(run: Prepared, *, rank: int, world_size: int, resume: Path | None = None, **more: Any) -> WorkerSpec:
    """Return the spec of a process. Unless `more` says otherwise all ranks are on this machine."""
    fields = {"local_rank": rank, "local_world_size": world_size, "host": socket.gethostname(), **more}
    return WorkerSpec(
        config=run.config.model_dump(mode="json"),
        rank=rank,
        world_size=world_size,
        run_dir=str(run.run_dir.path),
        resume=None if resume is None else str(resume),
        backend=run.backend,
        **fields,
    )


def spawn(
    spec: WorkerSpec, inbox: Inbox, *, module: str = "smolcluster.engine.process.main", standby: bool = False
) -> Child:
    """Start a process and read its events. It imports and waits until `send_line` gives it its spec.

    `standby`: show it as a standby in `ps` until then.
    """
    log = log_path(spec.run_dir, spec.role, spec.rank, spec.host)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stderr, _interrupts_held():
        process = subprocess.Popen(
            [sys.executable, "-m", module, *title_of(spec, standby=standby).split(" ")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**ENVIRONMENT, **os.environ, "PYTHONUNBUFFERED": "1", WORKER_MARK: str(spec.rank)},
            **NEW_GROUP,
        )
    child = Child(spec, process, log)
    threading.Thread(target=_read, args=(child, inbox), daemon=True, name=f"events of {child.name}").start()
    return child


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block SIGINT in the process started inside until it ignores the signal (`PipeChannel`).

    Before it has a separate process group, and while it imports torch, a Ctrl-C for the launcher must not kill it.
    """
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def send_line(child: Child, line: str) -> None:
    assert child.process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # its pipe is broken, or closed
        child.process.stdin.write(line.encode() + b"\n")
        child.process.stdin.flush()


def _read(child: Child, inbox: Inbox) -> None:
    """Queue the events of one process, then None. Runs in a separate thread."""
    assert child.process.stdout is not None
    with contextlib.suppress(ValueError):  # `end_all` closed it during the read
        for line in child.process.stdout:
            with contextlib.suppress(ValueError):  # a torn last line of a killed process
                inbox.put((child, from_json(line.decode(errors="replace"))))
    inbox.put((child, None))


@contextlib.contextmanager
def signals(children: Callable[[], Iterable[Child]], inbox: Inbox) -> Iterator[list[int]]:
    """At the first Ctrl-C, SIGTERM or SIGHUP queue a notice; at the second kill all children. Yield the signals so far.

    Two at once count as one: `timeout` signals both the process and its group.
    """
    came: list[int] = []
    first_at, shown = -math.inf, terminals()

    def on_signal(number: int, _frame: object) -> None:
        nonlocal first_at
        if number == HANGUP:
            leave_terminal(shown)
        if not came:
            first_at = time.monotonic()
        elif time.monotonic() - first_at < SIGNALS_TOGETHER_S:
            return
        came.append(number)
        if len(came) == 1:
            message = "stopping after this step and saving; press Ctrl-C again to exit at once"
            notice = (None, Notice(level="WARNING", message=message))
            later = threading.Timer(
                2 * SIGNALS_TOGETHER_S, inbox.put, [notice]
            )  # after that a second signal is handled
            later.daemon = True
            later.start()
        else:
            for child in children():
                child.process.kill()

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    previous = {number: signal.signal(number, on_signal) for number in stop_signals()}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Return whether it is stopped (SIGSTOP, Ctrl-Z)."""
    if sys.platform == "win32" or process.returncode is not None:
        return False
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def resume_stopped(process: subprocess.Popen[bytes]) -> None:
    """Send SIGCONT to a stopped process, so that it can exit."""
    if sys.platform != "win32" and is_stopped(process):
        process.send_signal(signal.SIGCONT)


def ask_to_stop(children: Iterable[Child]) -> None:
    """Request that processes save and exit."""
    for child in children:
        send_line(child, STOP)
        resume_stopped(child.process)


def exit_reason(child: Child) -> str:
    """Return its own error message, or what its exit status means."""
    status, failed = child.process.returncode, child.failed
    if failed is not None:
        return failed.message if failed.kind != "peer" else f"lost another rank: {failed.message}"
    if status is not None and status < 0:
        return f"killed by {_signal_name(-status)}"
    if status in (0, Interrupted.exit_code):
        return f"exited before the end of the run, with status {status}"
    return f"exited with status {status}"


def log_tail(child: Child) -> str:
    """Return its traceback or the end of its log, indented, and the path of the log; starts with a line break."""
    failed = child.failed
    lines = (failed.traceback.rstrip().splitlines() if failed and failed.traceback else tail(child.log, 12))[-12:]
    return "".join(f"\n  | {line}" for line in lines) + f"\nfull log: {child.log}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_all(children: Iterable[Child], *, grace_s: float) -> None:
    """Send SIGTERM, wait `grace_s`, then SIGKILL. Close the pipes."""
    children = list(children)
    running = [child for child in children if child.process.poll() is None]
    for child in running:
        child.process.terminate()
        resume_stopped(child.process)
    wait_for(running, timeout_s=grace_s)
    for child in running:
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait()
    for child in children:
        close_pipes(child.process)


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def end_by_closing(processes: Iterable[subprocess.Popen[bytes]], *, timeout_s: float) -> None:
    """End processes that exit when their standard input is closed; kill those that do not within `timeout_s`."""
    processes, deadline = list(processes), time.monotonic() + timeout_s
    for process in processes:
        close_pipes(process)
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(children: Iterable[Child], *, timeout_s: float) -> None:
    """Wait until all have exited, at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
