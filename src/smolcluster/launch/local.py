"""Several workers on this machine, and someone who watches them.

The launcher starts one process per rank, passes their events to the sinks, and ends the run when they are done. It never
imports torch, so the workers' imports are all there is to wait for. When one worker dies the others are stopped within
seconds and one message says which rank it was, of what, and its last log lines. When the launcher itself dies, the
workers notice the end of their standard input and leave.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smolcluster.config import dump
from smolcluster.config.schema import Config
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.spec import WorkerSpec
from smolcluster.errors import UserError, WorkerFailed
from smolcluster.launch.outcome import Interrupted, Outcome
from smolcluster.observe.events import Event, Failed, Notice, Phase, from_json
from smolcluster.observe.logs import log_path, tail
from smolcluster.observe.observer import Observer, Sink

WORKER_MARK = "SMOLCLUSTER_WORKER"  # in the environment of every worker
SETTLE_S = 0.5  # after the first death: others may have died of the same cause a moment earlier
GRACE_S = 2.0  # between asking a worker to end and ending it

# Ctrl-C in a terminal reaches every process of its group. Workers are in groups of their own: only the launcher acts on it.
_APART: dict[str, Any] = {"process_group": 0}
if sys.platform == "win32":
    _APART = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}


@dataclass(slots=True)
class _Member:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    failed: Failed | None = None
    finished: bool = False  # it said so itself; an exit status alone proves nothing
    died: float | None = None


# Events of all workers in one queue; None ends a worker's. What comes from nobody is the user's wish to stop.
_Inbox = queue.SimpleQueue[tuple[_Member | None, Event | None]]


def run_local(
    config: Config,
    *,
    workers: int,
    run_dir: RunDir,
    resume: Path | None = None,
    backend: str | None = None,
    sinks: list[Sink],
) -> dict[str, Any]:
    """Train on `workers` processes of this machine. Returns the summary; raises when the run fails or is interrupted."""
    if WORKER_MARK in os.environ:
        raise UserError(
            "a worker tried to start workers of its own: it imports the file that your task is in, and that file calls train; "
            'put the call under: if __name__ == "__main__":'
        )
    with run_dir.opened(dump(config), resume=resume is not None):
        return _run(config, workers=workers, run_dir=run_dir, resume=resume, backend=backend, sinks=sinks)


def _run(
    config: Config,
    *,
    workers: int,
    run_dir: RunDir,
    resume: Path | None,
    backend: str | None,
    sinks: list[Sink],
) -> dict[str, Any]:
    host = socket.gethostname()
    specs = [
        WorkerSpec(
            config=config.model_dump(mode="json"),
            rank=rank,
            world_size=workers,
            local_rank=rank,
            local_world_size=workers,
            host=config.cluster.workers[rank] if rank < len(config.cluster.workers) else host,
            run_dir=str(run_dir.path),
            resume=None if resume is None else str(resume),
            backend=backend,
        )
        for rank in range(workers)
    ]
    outcome = Outcome()
    observer = Observer([outcome, *sinks])
    inbox = _Inbox()
    members: list[_Member] = []
    try:
        with _signals(members, inbox) as interrupts:
            members.extend(_start(spec) for spec in specs)
            _watch(members, inbox, observer)
        _end_all(members, grace_s=GRACE_S)
        return _conclude(members, outcome, run_dir, config, interrupts=len(interrupts))
    finally:
        _end_all(members, grace_s=0.0)
        observer.close()


def _start(spec: WorkerSpec) -> _Member:
    log = log_path(spec.run_dir, "worker", spec.rank, spec.host)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "smolcluster.engine.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONUNBUFFERED": "1", WORKER_MARK: str(spec.rank)},
            **_APART,
        )
    member = _Member(spec.rank, process, log)
    _tell(member, spec.to_json())
    return member


def _tell(member: _Member, line: str) -> None:
    """A worker that is already gone is noticed elsewhere."""
    assert member.process.stdin is not None
    with contextlib.suppress(OSError):
        member.process.stdin.write(line.encode() + b"\n")
        member.process.stdin.flush()


# Watching


def _watch(members: list[_Member], inbox: _Inbox, observer: Observer) -> None:
    """Pass events on until every worker has ended, or one has failed."""
    for each in members:
        threading.Thread(target=_read, args=(each, inbox), daemon=True, name=f"events-{each.rank}").start()
    open_members, deadline = len(members), None
    while open_members:
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            member, event = inbox.get(timeout=wait_s)
        except queue.Empty:
            return
        if event is not None:
            _handle(event, member, members, observer)
            continue
        assert member is not None
        open_members -= 1
        member.died = time.monotonic()
        status = member.process.wait()
        if not member.finished and status != Interrupted.exit_code and deadline is None:
            deadline = time.monotonic() + SETTLE_S


def _read(member: _Member, inbox: _Inbox) -> None:
    """One thread per worker: its standard output, line by line; the end of it is None."""
    assert member.process.stdout is not None
    for line in member.process.stdout:
        with contextlib.suppress(ValueError):  # a torn last line of a killed process
            inbox.put((member, from_json(line.decode(errors="replace"))))
    inbox.put((member, None))


def _handle(event: Event, member: _Member | None, members: list[_Member], observer: Observer) -> None:
    if member is None:
        for other in members:
            _tell(other, json.dumps({"op": "stop"}))
    elif isinstance(event, Phase) and event.name == "port":
        for other in members:
            if other.rank != member.rank:
                _tell(other, json.dumps({"op": "port", "port": int(event.detail)}))
        return
    elif isinstance(event, Failed):
        member.failed = event
        return
    elif isinstance(event, Phase) and event.name == "finished":
        member.finished = True
    observer.emit(event)


@contextlib.contextmanager
def _signals(members: list[_Member], inbox: _Inbox) -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM asks the workers to save and leave; the second ends them. Yields those that came."""
    came: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        came.append(number)
        if len(came) == 1:
            message = "stopping after this step and saving; once more to stop at once"
            inbox.put((None, Notice(level="WARNING", message=message)))
        else:
            for member in members:
                member.process.kill()

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# The end


def _conclude(
    members: list[_Member], outcome: Outcome, run_dir: RunDir, config: Config, *, interrupts: int
) -> dict[str, Any]:
    statuses = [member.process.returncode for member in members]
    if all(status == 0 for status in statuses) and outcome.summary is not None:
        return outcome.summary
    world_size = len(members)
    stopped = Interrupted.exit_code in statuses and set(statuses) <= {0, Interrupted.exit_code}
    if stopped or interrupts > 1:
        if outcome.summary is None:
            outcome.write_summary(run_dir, config, world_size=world_size, status="interrupted", members_lost=0)
        raise outcome.interrupted(run_dir)

    user_errors = [m.failed for m in members if m.failed is not None and m.failed.kind == "user"]
    if user_errors:
        raise UserError(user_errors[0].message)
    culprit = find_culprit(members)
    message = describe_failure(culprit)
    outcome.write_summary(run_dir, config, world_size=world_size, error=message.splitlines()[0])
    raise WorkerFailed(f"{message}\nthe whole log: {culprit.log}")


def find_culprit(members: list[_Member]) -> _Member:
    """The worker that died first of a cause of its own; one that only lost a peer is a victim."""

    def blame(member: _Member) -> tuple[int, float]:
        victim = member.failed is not None and member.failed.kind == "peer"
        healthy = member.died is None or member.finished
        return (2 if healthy else 1 if victim else 0, member.died or float("inf"))

    return min(members, key=blame)


def describe_failure(member: _Member) -> str:
    status, failed = member.process.returncode, member.failed
    if failed is not None:
        reason = failed.message if failed.kind != "peer" else f"lost another rank: {failed.message}"
    elif status is not None and status < 0:
        reason = f"killed by {_signal_name(-status)}"
    elif status in (0, Interrupted.exit_code):
        reason = f"left in the middle of the run, with status {status}"
    else:
        reason = f"exited with status {status}"
    lines = (failed.traceback.rstrip().splitlines() if failed and failed.traceback else tail(member.log, 12))[-12:]
    shown = "\n".join(f"  | {line}" for line in lines)
    return f"worker rank {member.rank} failed: {reason}" + (f"\n{shown}" if shown else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end_all(members: list[_Member], *, grace_s: float) -> None:
    """Nothing is left running: ask, wait a little, end."""
    running = [m for m in members if m.process.poll() is None]
    for member in running:
        member.process.terminate()
    deadline = time.monotonic() + grace_s
    for member in running:
        try:
            member.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            member.process.kill()
            member.process.wait()
    for member in members:
        for stream in (member.process.stdin, member.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
