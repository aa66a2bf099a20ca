"""A server and its workers on this machine: the elastic plane. Each process that dies is started again (supervisor.py).

A worker keeps its rank. The server comes back on the same port and goes on from its journal, as a second process that has
waited with everything imported, and the workers find it again. The launcher never imports torch. The server's events are the
run's; those of the workers on this machine are passed on too, for a display that shows them one by one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smolcluster.comm.addresses import is_loopback
from smolcluster.comm.elastic.transport.security import check_bind, load_keyring
from smolcluster.comm.elastic.transport.sockets import join_address
from smolcluster.config.schema import Config
from smolcluster.engine.run_dir import RunDir
from smolcluster.errors import SmolclusterError, UserError, WorkerFailed
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.launch.local.processes import (
    Child,
    ask_to_stop,
    last_lines,
    make_spec,
    refuse_inside_a_worker,
    tell,
    wait_for,
    why_it_ended,
)
from smolcluster.launch.local.supervisor import Policy, Slot, Supervisor
from smolcluster.launch.prepare import Prepared
from smolcluster.observe.events import Event, Progress, RunFinished, StepLogged
from smolcluster.observe.logs import LauncherLogSink
from smolcluster.observe.observer import Sink

STEADY_S = 60.0  # a process that has worked so long was in order
PAUSE_S = 0.5  # before a worker is started again; doubles with every death in a row
LEAVE_S = 5.0  # the server has finished: so long the workers may take to leave

_PROCESS = "smolcluster.engine.process.warm_elastic"


def run_elastic(run: Prepared, *, port: int | None = None, sinks: list[Sink], command: str = "train") -> dict[str, Any]:
    """Serve a run, with `run.workers` workers on this machine; others may join. Returns the summary, or raises.

    `port` None: any, where only this machine can reach it, else cluster.port.
    """
    refuse_inside_a_worker()
    cluster = run.config.cluster
    check_bind(cluster.bind, load_keyring(cluster.token, os.environ))
    if port is None:
        port = 0 if is_loopback(cluster.bind) else cluster.port
    with run.opened(), _journal(run.run_dir, run.resume):
        sinks = [LauncherLogSink(run.run_dir.path, host=socket.gethostname()), *sinks]
        supervisor = Supervisor(run.config, run.run_dir, sinks, module=_PROCESS, command=command)
        return supervisor.run(ElasticPolicy(supervisor, *_posts(run, port=port)))


def _journal(run_dir: RunDir, resume: Path | None) -> contextlib.AbstractContextManager[None]:
    """A run that is continued as a whole goes on from its journal; from any other beginning a journal would lead astray."""
    if resume is not None and resume.resolve() == run_dir.checkpoints.resolve():
        return contextlib.nullcontext()
    return run_dir.without_journal()


@dataclass(slots=True, eq=False, kw_only=True)
class _Post(Slot):
    """A slot that is filled again by itself."""

    due: float | None = None  # when it is to be filled again
    since: float = 0.0  # its process was started
    lost: SmolclusterError | None = None  # why it is not filled any more


class ElasticPolicy(Policy):
    """Each process is on its own. The methods are in the order in which things happen."""

    def __init__(self, supervisor: Supervisor, server: _Post, workers: list[_Post]) -> None:
        super().__init__(supervisor)
        self.cluster = supervisor.config.cluster
        self.server, self.workers = server, workers
        self.standby: Child | None = None
        self.open = not is_loopback(self.cluster.bind)  # workers may come from other machines
        self.address = ""  # where the server listens
        self.step = 0  # the latest that the server has logged
        self.finished = False  # the server has come to an end of its own
        self.failure: SmolclusterError | None = None

    def begin(self) -> None:
        for post in (self.server, *self.workers):
            self._fill(post)

    def _fill(self, post: _Post) -> None:
        """Start a process for this post. A worker gets its spec when it is known where the server listens."""
        post.due, post.since = None, time.monotonic()
        if post is self.server and self.standby is not None:
            post.child, self.standby = self.standby, None
            tell(post.child, post.spec.to_json())
        else:
            post.child = self.supervisor.start(post.spec, told=bool(post.spec.server))

    def tick(self) -> bool:
        if self.server.child is None:
            self._send_home()
            return True
        for post in self.workers:
            if post.due is not None and time.monotonic() >= post.due:
                self._fill(post)
        return False

    # Events

    def listens(self, child: Child, port: int) -> None:
        """The server is there. It comes back to this port if it dies, and the workers look for it here."""
        if self.address:
            return
        bind = self.cluster.bind
        self.address = dial_address(bind, port)
        # From here on it goes on from its journal, whatever it began with.
        self.server.spec = dataclasses.replace(self.server.spec, server=f"{bind}:{port}", resume=None)
        if self.open or not self.workers:
            for line in invitation(self.supervisor.config, port):
                self.supervisor.observer.notice("INFO", line)
        for post in self.workers:
            post.spec = dataclasses.replace(post.spec, server=self.address)
            if post.child is not None:
                tell(post.child, post.spec.to_json())

    def shown(self, child: Child, event: Event) -> Event | None:
        post = next((post for post in (self.server, *self.workers) if post.child is child), None)
        match event:
            case StepLogged() if post is self.server:
                post.progress |= event.step > self.step
                self.step = max(self.step, event.step)
                if self.standby is None and self.cluster.standby and not self.supervisor.stopping:
                    self.standby = self.supervisor.start(post.spec, told=False, standby=True)
            case StepLogged() if post is not None:
                post.progress = True
            case RunFinished() if post is self.server:
                failed = (
                    {} if self.failure is None else {"status": "failed", "error": str(self.failure).splitlines()[0]}
                )
                return self.supervisor.complete(event.summary, **failed)
            case Progress() if post is not self.server:
                return None  # the server has reported the same work
        return event

    def stop(self) -> None:
        """The server saves, sends the workers home and leaves."""
        self.supervisor.stopping = True
        for post in self.workers:
            post.due = None
        if self.server.child is not None:
            ask_to_stop([self.server.child])

    # Deaths

    def ended(self, child: Child) -> None:
        if child is self.standby:
            self.standby = None
        for post in (self.server, *self.workers):
            if post.child is child:
                post.child = None
                self._server_ended(child) if post is self.server else self._worker_ended(post, child)

    def _server_ended(self, child: Child) -> None:
        """If it is not replaced, that was the end of the run."""
        self.finished = child.finished
        if child.finished or self.supervisor.stopping:
            return
        if child.mistake is not None:
            self.failure = child.mistake
        elif self._may_be_replaced(self.server, child):
            self._fill(self.server)
        else:
            self.failure = _given_up(self.server, child)

    def _worker_ended(self, post: _Post, child: Child) -> None:
        server = self.server.child
        if child.finished or self.supervisor.stopping or server is None or server.finished:
            return  # as it should
        self.supervisor.report(child)
        if child.mistake is not None:
            post.lost = child.mistake
            self.supervisor.warn(f"{child.name} cannot take part: {child.mistake}")
        elif child.failed is None and child.process.returncode in (0, Interrupted.exit_code):
            post.lost = Interrupted(f"{child.name} has left")  # somebody asked it to
            self.supervisor.warn(str(post.lost))
        elif self._may_be_replaced(post, child):
            post.due = time.monotonic() + PAUSE_S * 2 ** (post.deaths - 1)
        else:
            post.lost = _given_up(post, child)
            self.supervisor.warn(f"{post.lost}; training goes on without it")
        if all(worker.lost for worker in self.workers) and not self.open:
            self._end_without_workers()

    def _may_be_replaced(self, post: _Post, child: Child) -> bool:
        """Not after several deaths in a row, without work between them or each of an error of its own."""
        steady = time.monotonic() - post.since > STEADY_S or child.failed is None
        if not post.count_death(steady=steady):
            return False
        self.supervisor.warn(f"{child.name} died ({why_it_ended(child)}); starting it again")
        self.supervisor.restarts += 1
        return True

    def _end_without_workers(self) -> None:
        reasons = [post.lost for post in self.workers if not isinstance(post.lost, Interrupted)]
        self.failure = next((r for r in reasons if isinstance(r, UserError)), reasons[-1] if reasons else None)
        self.stop()
        if self.step == 0 and self.failure is not None and self.server.child is not None:
            self.server.child.process.kill()  # there is nothing to save

    # The end

    def _send_home(self) -> None:
        """The server has told the workers to leave. Those that were only looking for it are not waited for."""
        waited_for = []
        for post in self.workers:
            if post.child is not None and self.finished and post.progress:
                waited_for.append(post.child)
            elif post.child is not None:
                post.child.process.terminate()
        wait_for(waited_for, within_s=LEAVE_S)

    def conclude(self) -> dict[str, Any]:
        workers = self.cluster.num_workers or 1
        return self.supervisor.conclude(self.failure, workers=workers, world_size=workers + 1)


def _posts(run: Prepared, *, port: int) -> tuple[_Post, list[_Post]]:
    """The server's post, and one for each worker on this machine. Workers learn later where the server listens."""
    cluster, host, workers = run.config.cluster, socket.gethostname(), run.workers
    size = cluster.num_workers or 1
    spec = functools.partial(make_spec, run, world_size=size, plane="elastic")
    server = spec(rank=size, local_rank=0, local_world_size=workers + 1, host=cluster.server or host, resume=run.resume)
    server = dataclasses.replace(server, role="server", server=f"{cluster.bind}:{port}")
    names = [*cluster.workers, *[host] * workers]
    specs = [spec(rank=rank, local_world_size=workers, host=names[rank]) for rank in range(workers)]
    return _Post(spec=server), [_Post(spec=each) for each in specs]


def _given_up(post: _Post, child: Child) -> WorkerFailed:
    return WorkerFailed(f"{child.name} failed {post.deaths} times in a row: {why_it_ended(child)}{last_lines(child)}")


_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # addresses that mean all of a machine's -> one of them


def dial_address(bind: str, port: int) -> str:
    """Where this machine finds a server that listens on `bind`."""
    return join_address(_ANY.get(bind, bind), port)


def invitation(config: Config, port: int) -> Iterator[str]:
    """Yield the commands by which workers join."""
    cluster = config.cluster
    host = cluster.bind
    if host in _ANY:
        host = cluster.host_ip.get(cluster.server or "") or socket.gethostname()
    address = join_address(host, port)
    count = cluster.num_workers or 1
    if "SMOLCLUSTER_CLUSTER" in os.environ:  # `up` has started this process, and starts the workers
        yield f"listening on {join_address(cluster.bind, port)}; {count} worker{'s' * (count != 1)} expected"
        return
    yield f"listening on {join_address(cluster.bind, port)}; {count} worker{'s' * (count != 1)} expected:"
    names = [*cluster.workers, *["HOSTNAME"] * count]
    for rank in range(min(count, 8)):
        yield f"    smolcluster worker {rank} {names[rank]} --server {address}"
    if count > 8:
        yield f"    and so on, up to rank {count - 1}"
