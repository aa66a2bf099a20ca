"""The processes of a run on this machine: started, told, listened to, ended. Nothing here imports torch.

Each is `python -m smolcluster.engine.process.main`: it reads JSON lines on standard input, first its `WorkerSpec`, and writes
events to standard output. What it prints besides goes to its log.
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

# Ctrl-C in a terminal reaches every process of its group. Workers are in groups of their own: only the launcher acts on it.
APART: dict[str, Any] = {"process_group": 0}
if sys.platform == "win32":
    APART = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}


@dataclass(slots=True, eq=False)
class Child:
    """One process, and what it has said of its end."""

    spec: WorkerSpec
    process: subprocess.Popen[bytes]
    log: Path
    failed: Failed | None = None
    finished: bool = False  # it said so itself; an exit status alone proves nothing
    died: float | None = None

    @property
    def rank(self) -> int:
        return self.spec.rank

    @property
    def name(self) -> str:
        if self.spec.role == "server":
            return "the server"
        return f"worker {self.rank}" if self.spec.plane == "elastic" else f"worker rank {self.rank}"

    @property
    def fell(self) -> bool:
        """Whether it has ended otherwise than in order."""
        in_order = self.failed is None and (self.finished or self.process.returncode == Interrupted.exit_code)
        return self.died is not None and not in_order

    @property
    def victim(self) -> bool:
        """Whether it only lost another rank."""
        return self.failed is not None and self.failed.kind == "peer"

    @property
    def mistake(self) -> UserError | None:
        """The user's mistake that ended it: starting it again would not mend that."""
        return UserError(self.failed.message) if self.failed is not None and self.failed.kind == "user" else None


# Events of all processes in one queue; None ends a process's. A notice without a process is the user's wish to stop, None
# without a process something else that the policy should look at.
Inbox = queue.SimpleQueue[tuple[Child | None, Event | None]]


def refuse_inside_a_worker() -> None:
    if WORKER_MARK in os.environ:
        raise UserError(
            "a worker tried to start workers of its own: it imports the file that your task is in, and that file calls train; "
            'put the call under: if __name__ == "__main__":'
        )


def make_spec(run: Prepared, *, rank: int, world_size: int, resume: Path | None = None, **more: Any) -> WorkerSpec:
    """The spec of a process here. Unless `more` says otherwise all ranks are on this machine."""
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
    """Start the process for this spec and read its events. It imports and waits; `tell` it its spec to set it going.

    `standby`: it may have to wait for long, and `ps` shows it as such until then.
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
            **APART,
        )
    child = Child(spec, process, log)
    threading.Thread(target=_read, args=(child, inbox), daemon=True, name=f"events of {child.name}").start()
    return child


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """A process that is started here has SIGINT blocked until it ignores it (`PipeChannel`).

    For a moment it is still in our group, and then it imports torch: a Ctrl-C that came for us must not end it.
    """
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tell(child: Child, line: str) -> None:
    """A process that is already gone is noticed elsewhere."""
    assert child.process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # its pipe is broken, or closed
        child.process.stdin.write(line.encode() + b"\n")
        child.process.stdin.flush()


def _read(child: Child, inbox: Inbox) -> None:
    """One thread per process: its standard output, line by line; the end of it is None."""
    assert child.process.stdout is not None
    with contextlib.suppress(ValueError):  # closed at the end of the run, while we were reading
        for line in child.process.stdout:
            with contextlib.suppress(ValueError):  # a torn last line of a killed process
                inbox.put((child, from_json(line.decode(errors="replace"))))
    inbox.put((child, None))


@contextlib.contextmanager
def signals(children: Callable[[], Iterable[Child]], inbox: Inbox) -> Iterator[list[int]]:
    """Put a notice of no process into the inbox at the first Ctrl-C, SIGTERM or SIGHUP; kill all at the second. Yields both.

    Two at once are one: `timeout` sends its signal to the process and to its group.
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
            message = "stopping after this step and saving; once more to stop at once"
            notice = (None, Notice(level="WARNING", message=message))
            later = threading.Timer(2 * SIGNALS_TOGETHER_S, inbox.put, [notice])  # from then on a second one counts
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


def wake(process: subprocess.Popen[bytes]) -> None:
    """One that is stopped could not end in order."""
    if sys.platform != "win32" and is_stopped(process):
        process.send_signal(signal.SIGCONT)


def ask_to_stop(children: Iterable[Child]) -> None:
    """Let them save and leave."""
    for child in children:
        tell(child, STOP)
        wake(child.process)


def why_it_ended(child: Child) -> str:
    """In a few words: its own, or what its exit status tells."""
    status, failed = child.process.returncode, child.failed
    if failed is not None:
        return failed.message if failed.kind != "peer" else f"lost another rank: {failed.message}"
    if status is not None and status < 0:
        return f"killed by {_signal_name(-status)}"
    if status in (0, Interrupted.exit_code):
        return f"left in the middle of the run, with status {status}"
    return f"exited with status {status}"


def last_lines(child: Child) -> str:
    """Its traceback, or the end of its log, each line marked; and where the rest is. After a line break."""
    failed = child.failed
    lines = (failed.traceback.rstrip().splitlines() if failed and failed.traceback else tail(child.log, 12))[-12:]
    return "".join(f"\n  | {line}" for line in lines) + f"\nthe whole log: {child.log}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_all(children: Iterable[Child], *, grace_s: float) -> None:
    """Nothing is left running: ask, wait a little, end."""
    children = list(children)
    running = [child for child in children if child.process.poll() is None]
    for child in running:
        child.process.terminate()
        wake(child.process)
    wait_for(running, within_s=grace_s)
    for child in running:
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait()
    for child in children:
        for stream in (child.process.stdin, child.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def wait_for(children: Iterable[Child], *, within_s: float) -> None:
    """Until they have ended, or the time is over."""
    deadline = time.monotonic() + within_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
