"""The supervisor of a run's processes on this machine: one loop for three kinds of runs. Nothing here imports torch.

                          mesh (mesh.py)          restart (restart/launcher.py)      elastic (elastic.py)
    a worker dies         the run ends            all start again, from the          it is started again; training
                                                  newest checkpoint                  goes on meanwhile
    the server dies                                                                  its standby goes on from the journal
    three deaths in a                             the worker is left out; the run    the worker is given up; the run ends
    row, no progress                              ends if too few remain             with the server or the last worker
    a user's mistake      the run ends            the run ends; a machine that       the worker is given up; the run ends
                                                  came later only leaves             with the server or the last worker
    first Ctrl-C,         all save and leave      all save and leave; where the      the server saves and sends the
    SIGTERM, SIGHUP                               run is not led: this machine's     workers home
    SIGSTOP of a worker   a notice                a notice

    the second Ctrl-C kills every process. One that has not left GRACE_S after the end of the run is killed.
    the launcher's death ends the standard input of every process: they leave.

A `Policy` is a column of this table; a `Supervisor` is what they share.
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
    is_stopped,
    signals,
    spawn,
    tell,
    why_it_ended,
)
from smolcluster.observe.events import Event, Failed, Phase, RunFinished
from smolcluster.observe.observer import Observer, Sink

GRACE_S = 2.0  # between asking a process to end and killing it
MOST_DEATHS = 3  # in a row, without progress between them
TICK_S = 0.1


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """A place for a process of the run, and the process that fills it now."""

    spec: WorkerSpec
    child: Child | None = None
    progress: bool = False  # since its last death
    deaths: int = 0  # in a row, without progress between them

    def count_death(self, *, steady: bool = True) -> bool:
        """Return whether it is worth filling again. Progress counts only if the process was `steady`."""
        self.deaths = 1 if self.progress and steady else self.deaths + 1
        self.progress = False
        return self.deaths < MOST_DEATHS


class Policy(ABC):
    """What a kind of run does about its processes. The supervisor calls one method at a time, on one thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.crew: list[Child] = []  # those that wait for each other

    @abstractmethod
    def begin(self) -> None:
        """Start the first processes."""

    @abstractmethod
    def listens(self, child: Child, port: int) -> None:
        """Pass on where rank 0 or the server listens."""

    def shown(self, child: Child, event: Event) -> Event | None:
        """Note an event, and return it as the sinks are to see it."""
        return event

    def stop(self) -> None:
        """Ask the processes to save and leave: the user wishes it."""
        ask_to_stop(self.crew)

    def ended(self, child: Child) -> None:  # noqa: B027
        """Answer the end of a process, in order or not."""

    @abstractmethod
    def tick(self) -> bool:
        """Do what is due. Called at the start, after events and at least every TICK_S. Return whether the run is over."""

    @abstractmethod
    def conclude(self) -> dict[str, Any]:
        """Return the summary when all processes have ended, or raise why there is none."""


class Supervisor:
    """Starts processes, passes their events to the sinks, and leaves none running."""

    def __init__(
        self, config: Config, run_dir: RunDir, sinks: Iterable[Sink], *, module: str, command: str = "train"
    ) -> None:
        self.config, self.run_dir, self.module = config, run_dir, module
        self.outcome = Outcome(command=command)
        self.observer = Observer([self.outcome, *sinks])
        self.inbox = Inbox()
        self.children: list[Child] = []  # all that have not ended
        self.interrupts: list[int] = []  # signals to stop; the second has killed all
        self.stopping = False  # no process is to be started any more
        self.restarts = 0
        self._stopped: set[Child] = set()

    def run(self, policy: Policy) -> dict[str, Any]:
        """See a run through. Return its summary, or raise why there is none."""
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
            self.outcome.send_leftovers(self.run_dir, self.config, self.observer.emit)
            self.observer.close()

    def _listen(self, policy: Policy) -> None:
        """Handle all that has happened; wait TICK_S for the first of it."""
        try:
            self._handle(policy, *self.inbox.get(timeout=TICK_S))
            while True:
                self._handle(policy, *self.inbox.get_nowait())
        except queue.Empty:
            self._name_stopped(policy.crew)

    def _name_stopped(self, crew: list[Child]) -> None:
        """Warn once of each process that is stopped: the others would wait for it in silence."""
        stopped = {child for child in crew if is_stopped(child.process)}
        for child in stopped - self._stopped:
            remedy = f"it goes on with: kill -CONT {child.process.pid}"
            self.warn(f"{child.name} is stopped, and the others wait for it; {remedy}")
        self._stopped = stopped

    def _handle(self, policy: Policy, child: Child | None, event: Event | None) -> None:
        if child is None:
            if event is not None:  # the user's wish to stop
                self.stopping = True
                self.observer.emit(event)
                policy.stop()
        elif event is None:
            child.process.wait()
            child.died = time.monotonic()
            self.end([child])
            policy.ended(child)
        elif isinstance(event, Failed):
            child.failed = event  # shown when it has ended
        elif isinstance(event, Phase) and event.name == "port":
            policy.listens(child, int(event.detail))
        else:
            child.finished |= isinstance(event, Phase) and event.name == "finished"
            if (shown := policy.shown(child, event)) is not None:
                self.observer.emit(shown)

    # For policies

    def start(self, spec: WorkerSpec, *, told: bool = True, standby: bool = False) -> Child:
        """Start a process. One that is not `told` its spec imports what it will need, and waits."""
        child = spawn(spec, self.inbox, module=self.module, standby=standby)
        self.children.append(child)
        if told:
            tell(child, spec.to_json())
        return child

    def end(self, children: Sequence[Child]) -> None:
        end_all(children, grace_s=GRACE_S)
        self.children = [child for child in self.children if child not in children]

    def report(self, child: Child) -> None:
        """Show the sinks how a process has fallen."""
        failed = Failed(rank=child.rank, kind="error", message=why_it_ended(child))
        self.observer.emit(child.failed or failed)

    def warn(self, message: str) -> None:
        self.observer.notice("WARNING", message)

    def complete(self, summary: dict[str, Any], **known: Any) -> RunFinished:
        """The end of the run with its summary, and what only the launcher knows; on the disk as well."""
        known["restarts"] = self.restarts
        if self.restarts:
            known["wall_s"] = time.time() - self.outcome.started  # a process that came later knows its own time only
        if not known.items() <= summary.items():
            with contextlib.suppress(OSError):  # a full disk must not hide how the run went
                write_summary(self.run_dir.summary, summary | known)
        return RunFinished(summary=summary | known)

    def conclude(self, failure: SmolclusterError | None, **fields: Any) -> dict[str, Any]:
        """Return the summary of a run that has finished. Write one for any other, and raise why."""
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


def find_culprit(children: Iterable[Child]) -> Child:
    """Return the one that died first of a cause of its own; one that only lost a peer is a victim."""
    return min(children, key=lambda child: (2 if not child.fell else int(child.victim), child.died or float("inf")))
