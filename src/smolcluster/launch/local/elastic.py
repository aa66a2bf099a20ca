"""Run a server and its workers on this machine, on the elastic plane. Each process that dies is restarted (supervisor.py).

A worker keeps its rank. The server is replaced by a standby process that has imported everything: it listens on the same port,
replays the journal, and the workers reconnect. The launcher never imports torch. The server's events are the run's; events of
local workers are passed on for displays that show each worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smolcluster.comm.addresses import dial_address, is_loopback, join_address
from smolcluster.comm.elastic.transport.security import check_bind, load_keyring
from smolcluster.config.schema import Config
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import SmolclusterError, UserError, WorkerFailed
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.launch.local.processes import (
    Child,
    ask_to_stop,
    check_not_in_worker,
    exit_reason,
    log_tail,
    make_spec,
    send_line,
    wait_for,
)
from smolcluster.launch.local.supervisor import Policy, Slot, Supervisor
from smolcluster.launch.prepare import Prepared
from smolcluster.observe.events import Event, Progress, RunFinished, StepLogged
from smolcluster.observe.logs import LauncherLogSink
from smolcluster.observe.observer import Sink

STEADY_S = 60.0  # a process that ran for this time was healthy
PAUSE_S = 0.5  # before a worker is restarted; doubles with every death in a row
LEAVE_S = 5.0  # limit for workers to leave after the server has finished

_PROCESS = "smolcluster.engine.process.warm_elastic"


def run_elastic(
    run: Prepared, *, port: int | None = None, sinks: Sequence[Sink], command: str = "train"
) -> dict[str, Any]:
    """Serve a run with `run.workers` workers on this machine; others may join. Return the summary, or raise.

    `port` None: a free port if the server binds to loopback, else cluster.port.
    """
    check_not_in_worker()
    cluster = run.config.cluster
    check_bind(cluster.bind, load_keyring(cluster.token, os.environ))
    if port is None:
        port = 0 if is_loopback(cluster.bind) else cluster.port
    with run.opened(), _journal(run.run_dir, run.resume):
        sinks = [LauncherLogSink(run.run_dir.path, host=socket.gethostname()), *sinks]
        supervisor = Supervisor(run.config, run.run_dir, sinks, module=_PROCESS, command=command)
        return supervisor.run(ElasticPolicy(supervisor, *_slots(run, port=port)))


def _journal(run_dir: RunDir, resume: Path | None) -> contextlib.AbstractContextManager[None]:
    """Keep the journal when the run resumes from its own checkpoints; set it aside for any other start."""
    if resume is not None and resume.resolve() == run_dir.checkpoints.resolve():
        return contextlib.nullcontext()
    return run_dir.without_journal()


@dataclass(slots=True, eq=False, kw_only=True)
class _ElasticSlot(Slot):
    """A slot that is restarted independently of others."""

    due: float | None = None  # time of the next start
    since: float = 0.0  # time of the last start
    given_up: SmolclusterError | None = None  # why it is not restarted any more


class ElasticPolicy(Policy):
    """Restart each process separately. The methods are in the order of a run."""

    def __init__(self, supervisor: Supervisor, server: _ElasticSlot, workers: list[_ElasticSlot]) -> None:
        super().__init__(supervisor)
        self.cluster = supervisor.config.cluster
        self.server, self.workers = server, workers
        self.standby: Child | None = None
        self.open = not is_loopback(self.cluster.bind)  # workers may join from other machines
        self.address = ""  # of the server
        self.step = 0  # the latest that the server has logged
        self.finished = False  # the server has reported its end
        self.failure: SmolclusterError | None = None

    def begin(self) -> None:
        for slot in (self.server, *self.workers):
            self._start(slot)

    def _start(self, slot: _ElasticSlot) -> None:
        """Start a process for this slot. A worker gets its spec once the server's address is known."""
        slot.due, slot.since = None, time.monotonic()
        if slot is self.server and self.standby is not None:
            slot.child, self.standby = self.standby, None
            send_line(slot.child, slot.spec.to_json())
        else:
            slot.child = self.supervisor.start(slot.spec, send_spec=bool(slot.spec.server))

    def tick(self) -> bool:
        if self.server.child is None:
            self._stop_remaining_workers()
            return True
        for slot in self.workers:
            if slot.due is not None and time.monotonic() >= slot.due:
                self._start(slot)
        return False

    # Events

    def on_port(self, child: Child, port: int) -> None:
        """Keep the server's first port for its restarts, and send it to the workers."""
        if self.address:
            return
        bind = self.cluster.bind
        self.address = dial_address(bind, port)
        # A restarted server resumes from its journal, whatever it started from.
        self.server.spec = dataclasses.replace(self.server.spec, server=f"{bind}:{port}", resume=None)
        if self.open or not self.workers:
            for line in join_commands(self.supervisor.config, port):
                self.supervisor.observer.notice("INFO", line)
        for slot in self.workers:
            slot.spec = dataclasses.replace(slot.spec, server=self.address)
            if slot.child is not None:
                send_line(slot.child, slot.spec.to_json())

    def on_event(self, child: Child, event: Event) -> Event | None:
        slot = next((slot for slot in (self.server, *self.workers) if slot.child is child), None)
        match event:
            case StepLogged() if slot is self.server:
                slot.progress |= event.step > self.step
                self.step = max(self.step, event.step)
                if self.standby is None and self.cluster.standby and not self.supervisor.stopping:
                    self.standby = self.supervisor.start(slot.spec, send_spec=False, standby=True)
            case StepLogged() if slot is not None:
                slot.progress = True
            case RunFinished() if slot is self.server:
                failed = (
                    {} if self.failure is None else {"status": "failed", "error": str(self.failure).splitlines()[0]}
                )
                return self.supervisor.complete(event.summary, **failed)
            case Progress() if slot is not self.server:
                return None  # the server reports the same work
        return event

    def stop(self) -> None:
        """Request that the server saves, makes its workers leave, and exits."""
        self.supervisor.stopping = True
        for slot in self.workers:
            slot.due = None
        if self.server.child is not None:
            ask_to_stop([self.server.child])

    # Deaths

    def on_exit(self, child: Child) -> None:
        if child is self.standby:
            self.standby = None
        for slot in (self.server, *self.workers):
            if slot.child is child:
                slot.child = None
                self._on_server_exit(child) if slot is self.server else self._on_worker_exit(slot, child)

    def _on_server_exit(self, child: Child) -> None:
        """Replace the server, or leave its slot empty: then the run is over."""
        self.finished = child.finished
        if child.finished or self.supervisor.stopping:
            return
        if child.user_error is not None:
            self.failure = child.user_error
        elif self._should_restart(self.server, child):
            self._start(self.server)
        else:
            self.failure = _gave_up(self.server, child)

    def _on_worker_exit(self, slot: _ElasticSlot, child: Child) -> None:
        server = self.server.child
        if child.finished or self.supervisor.stopping or server is None or server.finished:
            return  # expected
        self.supervisor.report(child)
        if child.user_error is not None:
            slot.given_up = child.user_error
            self.supervisor.warn(f"{child.name} cannot join the run: {child.user_error}")
        elif child.failed is None and child.process.returncode in (0, Interrupted.exit_code):
            slot.given_up = Interrupted(f"{child.name} has left")  # it received a signal
            self.supervisor.warn(str(slot.given_up))
        elif self._should_restart(slot, child):
            slot.due = time.monotonic() + PAUSE_S * 2 ** (slot.deaths - 1)
        else:
            slot.given_up = _gave_up(slot, child)
            self.supervisor.warn(f"{slot.given_up}; training continues without it")
        if all(worker.given_up for worker in self.workers) and not self.open:
            self._end_without_workers()

    def _should_restart(self, slot: _ElasticSlot, child: Child) -> bool:
        """Count a death. Return False after MAX_DEATHS in a row without progress, or soon after its start by its own error."""
        steady = time.monotonic() - slot.since > STEADY_S or child.failed is None
        if not slot.count_death(steady=steady):
            return False
        self.supervisor.warn(f"{child.name} died ({exit_reason(child)}); restarting it")
        self.supervisor.restarts += 1
        return True

    def _end_without_workers(self) -> None:
        reasons = [slot.given_up for slot in self.workers if not isinstance(slot.given_up, Interrupted)]
        self.failure = next((r for r in reasons if isinstance(r, UserError)), reasons[-1] if reasons else None)
        self.stop()
        if self.step == 0 and self.failure is not None and self.server.child is not None:
            self.server.child.process.kill()  # there is nothing to save

    # The end

    def _stop_remaining_workers(self) -> None:
        """Wait for workers that were training when the server finished; terminate those that were still connecting."""
        waited_for = []
        for slot in self.workers:
            if slot.child is not None and self.finished and slot.progress:
                waited_for.append(slot.child)
            elif slot.child is not None:
                slot.child.process.terminate()
        wait_for(waited_for, timeout_s=LEAVE_S)

    def conclude(self) -> dict[str, Any]:
        workers = self.cluster.num_workers or 1
        return self.supervisor.conclude(self.failure, workers=workers, world_size=workers + 1)


def _slots(run: Prepared, *, port: int) -> tuple[_ElasticSlot, list[_ElasticSlot]]:
    """Return the server's slot, and one for each worker on this machine, still without the server's address."""
    cluster, host, workers = run.config.cluster, socket.gethostname(), run.workers
    size = cluster.num_workers or 1
    spec = functools.partial(make_spec, run, world_size=size, plane="elastic")
    server = spec(rank=size, local_rank=0, local_world_size=workers + 1, host=cluster.server or host, resume=run.resume)
    server = dataclasses.replace(server, role="server", server=f"{cluster.bind}:{port}")
    names = [*cluster.workers, *[host] * workers]
    specs = [spec(rank=rank, local_world_size=workers, host=names[rank]) for rank in range(workers)]
    return _ElasticSlot(spec=server), [_ElasticSlot(spec=each) for each in specs]


def _gave_up(slot: _ElasticSlot, child: Child) -> WorkerFailed:
    return WorkerFailed(f"{child.name} failed {slot.deaths} times in a row: {exit_reason(child)}{log_tail(child)}")


def join_commands(config: Config, port: int) -> Iterator[str]:
    """Yield the lines that the server prints: its address, and the commands by which workers join."""
    cluster = config.cluster
    host = cluster.bind
    if host in ("0.0.0.0", "::"):
        host = cluster.host_ip.get(cluster.server or "") or socket.gethostname()
    address = join_address(host, port)
    count = cluster.num_workers or 1
    if "SMOLCLUSTER_CLUSTER" in os.environ:  # `up` has started this process and starts the workers too
        yield f"listening on {join_address(cluster.bind, port)}; {count} worker{'s' * (count != 1)} expected"
        return
    yield f"listening on {join_address(cluster.bind, port)}; {count} worker{'s' * (count != 1)} expected:"
    names = [*cluster.workers, *["HOSTNAME"] * count]
    for rank in range(min(count, 8)):
        yield f"    smolcluster worker {rank} {names[rank]} --server {address}"
    if count > 8:
        yield f"    and so on, up to rank {count - 1}"
