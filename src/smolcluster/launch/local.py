"""Several workers on this machine, and someone who watches them: the mesh plane.

The launcher starts one process per rank, passes their events to the sinks, and ends the run when they are done. It never
imports torch, so the workers' imports are all there is to wait for. When one worker dies the others are stopped within
seconds and one message says which rank it was, of what, and its last log lines. When the launcher itself dies, the
workers notice the end of their standard input and leave.
"""

from __future__ import annotations

import json
import queue
import socket
import time
from pathlib import Path
from typing import Any

from smolcluster.config.schema import Config
from smolcluster.engine import history
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.spec import WorkerSpec
from smolcluster.errors import UserError, WorkerFailed
from smolcluster.launch.outcome import Interrupted, Outcome
from smolcluster.launch.prepare import recorded
from smolcluster.launch.processes import (
    GRACE_S,
    STOP,
    Child,
    Inbox,
    Stopped,
    end_all,
    last_lines,
    refuse_inside_a_worker,
    signals,
    spawn,
    tell,
    wake,
    why_it_ended,
)
from smolcluster.observe.events import Event, Failed, Phase
from smolcluster.observe.observer import Observer, Sink

LOOK_S = 2.0  # silence after which one looks whether a worker is stopped
SETTLE_S = 0.5  # after the first death: others may have died of the same cause a moment earlier


def run_local(
    config: Config,
    *,
    workers: int,
    run_dir: RunDir,
    resume: Path | None = None,
    backend: str | None = None,
    sinks: list[Sink],
    anew: bool = False,
) -> dict[str, Any]:
    """Train on `workers` processes of this machine. Returns the summary; raises when the run fails or is interrupted."""
    refuse_inside_a_worker()
    check_nothing_is_lost(run_dir, resume)
    with run_dir.opened(*recorded(config, run_dir), resume=resume is not None, anew=anew), run_dir.without_journal():
        return _run(config, workers=workers, run_dir=run_dir, resume=resume, backend=backend, sinks=sinks)


def check_nothing_is_lost(run_dir: RunDir, resume: Path | None) -> None:
    """The journal of an elastic run is of no use here, and may be ahead of its checkpoints."""
    if resume is None or resume.resolve() != run_dir.checkpoints.resolve() or not run_dir.journal.is_dir():
        return
    committed = history.last_commit(run_dir.history)
    saved = max(
        (int(path.name[5:]) for path in run_dir.checkpoints.glob("step-*") if path.name[5:].isdigit()), default=0
    )
    if committed > saved:
        back = f", or go back on purpose with --resume {run_dir.checkpoints / f'step-{saved:08d}'}" if saved else ""
        raise UserError(
            f"this run has committed {committed} steps on the elastic plane, and its last checkpoint is of step {saved}; "
            f"continue it there with --plane elastic and its own strategy{back}"
        )


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
    inbox = Inbox()
    children: list[Child] = []
    try:
        with signals(lambda: children, inbox) as interrupts:
            for spec in specs:
                children.append(spawn(spec, inbox))
                tell(children[-1], spec.to_json())
            _watch(children, inbox, observer)
        end_all(children, grace_s=GRACE_S)
        return _conclude(children, outcome, run_dir, config, interrupts=len(interrupts))
    finally:
        end_all(children, grace_s=0.0)
        outcome.send_leftovers(run_dir, config, observer.emit)
        observer.close()


def _watch(children: list[Child], inbox: Inbox, observer: Observer) -> None:
    """Pass events on until every worker has ended, or one has failed."""
    num_open, deadline, stopped = len(children), None, Stopped()
    while num_open:
        wait_s = LOOK_S if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            child, event = inbox.get(timeout=wait_s)
        except queue.Empty:
            if deadline is not None:
                return
            for notice in stopped.look(children):
                observer.emit(notice)
            continue
        if event is not None:
            _handle(event, child, children, observer)
            continue
        assert child is not None
        num_open -= 1
        child.died = time.monotonic()
        status = child.process.wait()
        if not child.finished and status != Interrupted.exit_code and deadline is None:
            deadline = time.monotonic() + SETTLE_S


def _handle(event: Event, child: Child | None, children: list[Child], observer: Observer) -> None:
    if child is None:
        for other in children:
            tell(other, STOP)
            wake(other.process)
    elif isinstance(event, Phase) and event.name == "port":
        for other in children:
            if other is not child:
                tell(other, json.dumps({"op": "port", "port": int(event.detail)}))
        return
    elif isinstance(event, Failed):
        child.failed = event
        return
    elif isinstance(event, Phase) and event.name == "finished":
        child.finished = True
    observer.emit(event)


def _conclude(
    children: list[Child], outcome: Outcome, run_dir: RunDir, config: Config, *, interrupts: int
) -> dict[str, Any]:
    statuses = [child.process.returncode for child in children]
    if all(status == 0 for status in statuses) and outcome.summary is not None:
        return outcome.summary
    world_size = len(children)
    stopped = Interrupted.exit_code in statuses and set(statuses) <= {0, Interrupted.exit_code}
    if stopped or interrupts > 1:
        if outcome.summary is None:
            outcome.write_summary(run_dir, config, world_size=world_size, status="interrupted", members_lost=0)
        raise outcome.interrupted(run_dir)

    user_errors = [c.failed for c in children if c.failed is not None and c.failed.kind == "user"]
    if user_errors:
        raise UserError(user_errors[0].message)
    culprit = find_culprit(children)
    message = f"{culprit.name} failed: {why_it_ended(culprit)}"
    outcome.write_summary(run_dir, config, world_size=world_size, error=message.splitlines()[0])
    raise WorkerFailed(f"{message}{last_lines(culprit)}\nthe whole log: {culprit.log}")


def find_culprit(children: list[Child]) -> Child:
    """The worker that died first of a cause of its own; one that only lost a peer is a victim."""

    def blame(child: Child) -> tuple[int, float]:
        victim = child.failed is not None and child.failed.kind == "peer"
        healthy = child.died is None or child.finished
        return (2 if healthy else 1 if victim else 0, child.died or float("inf"))

    return min(children, key=blame)
