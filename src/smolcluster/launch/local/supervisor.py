"""Supervise the processes of a run on this machine: one loop, three policies. Nothing here imports torch.

                          mesh (mesh.py)          restart (restart/launcher.py)      elastic (elastic.py)
    a worker dies         the run ends            all restart from the newest        it is restarted; the others keep
                                                  checkpoint                         training
    the server dies                                                                  its standby resumes from the journal
    three deaths in a                             the worker is dropped; the run     the worker is dropped; the run ends
    row, no progress                              ends if too few remain             with the server or the last worker
    a user error          the run ends            the run ends; a machine that       the worker is dropped; the run ends
                                                  joined later only leaves           with the server or the last worker
    first Ctrl-C,         all save and exit       all save and exit; not on the      the server saves and makes its
    SIGTERM, SIGHUP                               leader: this machine's only        workers exit
    SIGSTOP of a worker   a warning               a warning

    The second Ctrl-C kills every process. One that has not exited GRACE_S after the end of the run is killed.
    The launcher's death closes the standard input of every process: they exit.

A `Policy` is a column of this table; the `Supervisor` is what they share.
"""

from __future__ import annotations

import contextlib
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from smolcluster.config.schema import Config
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.spec import WorkerSpec
from smolcluster.engine.summary import write_summary
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.launch.local.outcome import Outcome
from smolcluster.launch.local.processes import (
    Child,
    Inbox,
    ask_to_stop,
    end_all,
    exit_reason,
    is_stopped,
    send_line,
    signals,
    spawn,
)
from smolcluster.observe.events import Event, Failed, Phase, RunFinished
from smolcluster.observe.observer import Observer, Sink

GRACE_S = 2.0  # between SIGTERM and SIGKILL
MAX_DEATHS = 3  # in a row, without progress between them
TICK_S = 0.1


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """The spec of one process of the run, across its restarts."""

    spec: WorkerSpec
    child: Child | None = None
    progress: bool = False  # since its last death
    deaths: int = 0  # in a row, without progress between them

    def count_death(self, *, steady: bool = True) -> bool:
        """Return whether to restart it. Progress resets the count only if the process was `steady`."""
        self.deaths = 1 if self.progress and steady else self.deaths + 1
        self.progress = False
        return self.deaths < MAX_DEATHS


class Policy(ABC):
    """How one kind of run reacts to its processes. The supervisor calls one method at a time, on one thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.group: list[Child] = []  # members of one process group

    @abstractmethod
    def begin(self) -> None:
        """Start the first processes."""

    @abstractmethod
    def on_port(self, child: Child, port: int) -> None:
        """Send the port of rank 0 or the server to the other processes."""

    def on_event(self, child: Child, event: Event) -> Event | None:
        """Handle an event of a process. Return the event for the sinks; None to drop it."""
        return event

    def stop(self) -> None:
        """Request that the processes save and exit, at the user's first signal."""
        ask_to_stop(self.group)

    def on_exit(self, child: Child) -> None:  # noqa: B027
        """Handle the exit of a process."""

    @abstractmethod
    def tick(self) -> bool:
        """Do what is due; called after events and at least every TICK_S. Return whether the run is over."""

    @abstractmethod
    def conclude(self) -> dict[str, Any]:
        """Return the summary once all processes have exited, or raise the run's error."""


class Supervisor:
    """Start processes, pass their events to the sinks, and leave none running."""

    def __init__(
        self, config: Config, run_dir: RunDir, sinks: Iterable[Sink], *, module: str, command: str = "train"
    ) -> None:
        self.config, self.run_dir, self.module = config, run_dir, module
        self.outcome = Outcome(command=command)
        self.observer = Observer([self.outcome, *sinks])
        self.inbox = Inbox()
        self.children: list[Child] = []  # not exited
        self.interrupts: list[int] = []  # signals to stop; the second kills all
        self.stopping = False  # start no more processes
        self.restarts = 0
        self._stopped: set[Child] = set()

    def run(self, policy: Policy) -> dict[str, Any]:
        """Run a policy to its end. Return the summary, or raise the run's error."""
        try:
            with signals(lambda: self.children, self.inbox) as self.interrupts:
                try:
                    policy.begin()
                    while not policy.tick():
                        self._listen(policy)
                finally:
                    self.end(self.children)
                return policy.conclude()
        finally:
            self.outcome.flush_loki(self.run_dir, self.config, self.observer.emit)
            self.observer.close()

    def _listen(self, policy: Policy) -> None:
        """Handle all queued events; wait up to TICK_S for the first."""
        try:
            self._handle(policy, *self.inbox.get(timeout=TICK_S))
            while True:
                self._handle(policy, *self.inbox.get_nowait())
        except queue.Empty:
            self._report_stopped(policy.group)

    def _report_stopped(self, group: list[Child]) -> None:
        """Warn once of each process that SIGSTOP has stopped: the others wait for it."""
        stopped = {child for child in group if is_stopped(child.process)}
        for child in stopped - self._stopped:
            self.warn(f"{child.name} is stopped and the others wait for it; resume it: kill -CONT {child.process.pid}")
        self._stopped = stopped

    def _handle(self, policy: Policy, child: Child | None, event: Event | None) -> None:
        if child is None:
            if event is not None:  # the user's first signal
                self.stopping = True
                self.observer.emit(event)
                policy.stop()
        elif event is None:
            child.process.wait()
            child.died = time.monotonic()
            self.end([child])
            policy.on_exit(child)
        elif isinstance(event, Failed):
            child.failed = event  # reported after its exit
        elif isinstance(event, Phase) and event.name == "port":
            policy.on_port(child, int(event.detail))
        else:
            child.finished |= isinstance(event, Phase) and event.name == "finished"
            if (shown := policy.on_event(child, event)) is not None:
                self.observer.emit(shown)

    # For policies

    def start(self, spec: WorkerSpec, *, send_spec: bool = True, standby: bool = False) -> Child:
        """Start a process. Without `send_spec` it imports torch and waits for its spec."""
        child = spawn(spec, self.inbox, module=self.module, standby=standby)
        self.children.append(child)
        if send_spec:
            send_line(child, spec.to_json())
        return child

    def end(self, children: Sequence[Child]) -> None:
        end_all(children, grace_s=GRACE_S)
        self.children = [child for child in self.children if child not in children]

    def report(self, child: Child) -> None:
        """Emit the failure of a process."""
        failed = Failed(rank=child.rank, kind="error", message=exit_reason(child))
        self.observer.emit(child.failed or failed)

    def warn(self, message: str) -> None:
        self.observer.notice("WARNING", message)

    def complete(self, summary: dict[str, Any], **known: Any) -> RunFinished:
        """Add what only the launcher knows to the summary, in the event and in summary.json."""
        known["restarts"] = self.restarts
        if self.restarts:
            known["wall_s"] = (
                time.time() - self.outcome.started
            )  # a restarted process knows only the time since its restart
        if not known.items() <= summary.items():
            with contextlib.suppress(OSError):  # a full disk must not hide the result
                write_summary(self.run_dir.summary, summary | known)
        return RunFinished(summary=summary | known)

    def conclude(self, failure: SmolclusterError | None, **fields: Any) -> dict[str, Any]:
        """Return the summary of a finished run. For any other write one, and raise the error."""
        summary = self.outcome.summary
        status = None if summary is None else summary["status"]
        fields["restarts"] = self.restarts
        if failure is not None:
            if status != "failed" and not isinstance(failure, UserError):
                error = str(failure).splitlines()[0]
                self.outcome.write_summary(self.run_dir, self.config, error=error, **fields)
            raise failure
        if summary is not None and status == "finished":
            return summary
        if summary is None:
            fields = {"status": "interrupted", "members_lost": 0, **fields}
            self.outcome.write_summary(self.run_dir, self.config, **fields)
        raise self.outcome.interrupted(self.run_dir)


def first_failure(children: Iterable[Child]) -> Child:
    """Return the child that was first to crash by itself, else the first that lost a peer."""
    return min(
        children, key=lambda child: (2 if not child.crashed else int(child.lost_peer), child.died or float("inf"))
    )
