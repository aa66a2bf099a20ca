"""A server and its workers on this machine, and someone who keeps them going: the elastic plane.

    a worker that dies         is started again, with its rank; training goes on meanwhile
    the server that dies       comes back on the same port and goes on from its journal; the workers find it again.
                               A second process, with everything imported, waits to take its place
    three deaths in a row      without any work between them: that worker is given up. If it is the server, or the last
                               worker, the run ends
    a user's mistake           starting again would not mend it: that worker is given up at once, or the run ends
    the first Ctrl-C           asks the server to save and to send the workers home; the second ends all
    the launcher's own death   ends everybody's standard input, and they leave

The launcher never imports torch. The server's events are the run's; those of the workers on this machine are passed on too,
for a display that shows them one by one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smolcluster.comm.addresses import is_loopback
from smolcluster.comm.elastic.security import check_bind, load_keyring
from smolcluster.config.schema import Config
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.spec import WorkerSpec
from smolcluster.engine.summary import write_summary
from smolcluster.errors import SmolclusterError, UserError, WorkerFailed
from smolcluster.launch.outcome import Interrupted, Outcome
from smolcluster.launch.prepare import recorded
from smolcluster.launch.processes import (
    GRACE_S,
    STOP,
    Child,
    Inbox,
    end_all,
    last_lines,
    refuse_inside_a_worker,
    signals,
    spawn,
    tell,
    wait_for,
    why_it_ended,
)
from smolcluster.observe.events import Event, Failed, Notice, Phase, Progress, RunFinished, StepLogged
from smolcluster.observe.logs import LauncherLog
from smolcluster.observe.observer import Observer, Sink

MOST_DEATHS = 3  # in a row, without any work between them
STEADY_S = 60.0  # whoever has worked so long was in order
PAUSE_S = 0.5  # before a worker is started again; doubles with every death in a row
LEAVE_S = 5.0  # the server has finished: so long the workers may take to leave

_PROCESS = "smolcluster.engine.standby"


def run_elastic(
    config: Config,
    *,
    workers: int,
    run_dir: RunDir,
    resume: Path | None = None,
    port: int | None = None,
    sinks: list[Sink],
    command: str = "train",
    anew: bool = False,
) -> dict[str, Any]:
    """Serve a run, with `workers` workers on this machine; others may join. Returns the summary, or raises.

    `port` None: any, where only this machine can reach it, else cluster.port. `anew`: see `RunDir.opened`.
    """
    refuse_inside_a_worker()
    check_bind(config.cluster.bind, load_keyring(config.cluster.token, os.environ))
    with run_dir.opened(*recorded(config, run_dir), resume=resume is not None, anew=anew), _journal(run_dir, resume):
        run = _Run(config, workers=workers, run_dir=run_dir, resume=resume, port=port, sinks=sinks, command=command)
        return run.run()


def _journal(run_dir: RunDir, resume: Path | None) -> contextlib.AbstractContextManager[None]:
    """A run that is continued as a whole goes on from its journal; from any other beginning a journal would lead astray."""
    if resume is not None and resume.resolve() == run_dir.checkpoints.resolve():
        return contextlib.nullcontext()
    return run_dir.without_journal()


@dataclass(slots=True, eq=False)
class _Post:
    """A place in the run, and whoever fills it now."""

    spec: WorkerSpec
    child: Child | None = None
    due: float | None = None  # when it is to be filled again
    since: float = 0.0  # its child was started
    worked: bool = False  # its child has logged a step
    deaths: int = 0  # in a row
    lost: SmolclusterError | None = None  # why it is not filled any more

    @property
    def name(self) -> str:
        return "the server" if self.spec.role == "server" else f"worker {self.spec.rank}"


class _Run:
    """One run from its first process to its last. `run` is its life; the rest is in the order in which it happens."""

    def __init__(
        self,
        config: Config,
        *,
        workers: int,
        run_dir: RunDir,
        resume: Path | None,
        port: int | None,
        sinks: list[Sink],
        command: str,
    ) -> None:
        self.config, self.run_dir = config, run_dir
        self.outcome = Outcome(command=command)
        self.observer = Observer([self.outcome, LauncherLog(run_dir.path, host=socket.gethostname()), *sinks])
        self.inbox = Inbox()
        self.children: list[Child] = []  # all that are alive
        self.standby: Child | None = None
        self.open = not is_loopback(config.cluster.bind)  # workers may come from other machines
        if port is None:
            port = config.cluster.port if self.open else 0
        self.server, self.workers = _posts(config, workers=workers, run_dir=run_dir, resume=resume, port=port)
        self.address = ""  # where the server listens
        self.step = 0  # the latest that the server has told of
        self.restarts = 0
        self.stopping = False  # nobody is started any more
        self.finished = False  # the server has come to an end of its own
        self.failure: SmolclusterError | None = None

    def run(self) -> dict[str, Any]:
        try:
            with signals(lambda: self.children, self.inbox):
                for post in (self.server, *self.workers):
                    self._fill(post)
                self._watch()
                self._send_home()
            return self._conclude()
        finally:
            end_all(self.children, grace_s=0.0)
            self.outcome.send_leftovers(self.run_dir, self.config, self.observer.emit)
            self.observer.close()

    # Filling posts

    def _fill(self, post: _Post) -> None:
        """Start a process for this post. A worker is told its spec when it is known where the server listens."""
        if post is self.server and self.standby is not None:
            child, self.standby = self.standby, None
        else:
            child = self._spawn(post.spec)
        post.child, post.due, post.worked, post.since = child, None, False, time.monotonic()
        if post.spec.server:
            tell(child, post.spec.to_json())

    def _spawn(self, spec: WorkerSpec, *, standby: bool = False) -> Child:
        child = spawn(spec, self.inbox, module=_PROCESS, standby=standby)
        self.children.append(child)
        return child

    # Watching

    def _watch(self) -> None:
        """Until the server has left for good."""
        while self.server.child is not None:
            for post in self.workers:
                if post.due is not None and time.monotonic() >= post.due:
                    self._fill(post)
            dues = [post.due for post in self.workers if post.due is not None]
            try:
                child, event = self.inbox.get(timeout=max(0.0, min(dues) - time.monotonic()) if dues else None)
            except queue.Empty:
                continue
            if child is None:
                assert event is not None
                self.observer.emit(event)
                self._stop()
            elif event is None:
                self._ended(child)
            elif child is self.server.child:
                self._server_says(child, event)
            else:
                self._worker_says(child, event)

    def _server_says(self, child: Child, event: Event) -> None:
        match event:
            case Phase(name="port"):
                self._listens(int(event.detail))
                return
            case Failed():
                child.failed = event  # told when it has ended
                return
            case Phase(name="finished"):
                child.finished = True
            case StepLogged():
                self.server.worked = self.server.worked or event.step > self.step
                self.step = max(self.step, event.step)
                if self.standby is None and self.config.cluster.standby and not self.stopping:
                    self.standby = self._spawn(self.server.spec, standby=True)
            case RunFinished():
                event = RunFinished(summary=self._complete(event.summary))
            case _:
                pass
        self.observer.emit(event)

    def _listens(self, port: int) -> None:
        """The server is there. It comes back to this port if it dies, and the workers look for it here."""
        if self.address:
            return
        bind = self.config.cluster.bind
        self.address = dial_address(bind, port)
        # From here on it goes on from its journal, whatever it began with.
        self.server.spec = dataclasses.replace(self.server.spec, server=f"{bind}:{port}", resume=None)
        if self.open or not self.workers:
            for line in invitation(self.config, port):
                self.observer.emit(Notice(level="INFO", message=line))
        for post in self.workers:
            post.spec = dataclasses.replace(post.spec, server=self.address)
            if post.child is not None:
                tell(post.child, post.spec.to_json())

    def _worker_says(self, child: Child, event: Event) -> None:
        match event:
            case StepLogged():
                for post in self.workers:
                    post.worked = post.worked or post.child is child
            case Phase(name="finished"):
                child.finished = True
            case Failed():
                child.failed = event
                return
            case Progress():
                return  # the server has told of the same work
            case _:
                pass
        self.observer.emit(event)

    def _stop(self) -> None:
        """The server saves, sends the workers home and leaves."""
        self.stopping = True
        for post in self.workers:
            post.due = None
        if self.server.child is not None:
            tell(self.server.child, STOP)

    # Deaths

    def _ended(self, child: Child) -> None:
        child.process.wait()
        self.children.remove(child)
        end_all([child], grace_s=0.0)  # closes the pipes
        if child is self.standby:
            self.standby = None
        for post in (self.server, *self.workers):
            if post.child is child:
                post.child = None
                self._server_ended(child) if post is self.server else self._worker_ended(post, child)

    def _server_ended(self, child: Child) -> None:
        """If it is not replaced, that was the end of the run."""
        self.finished = child.finished
        if child.finished or self.stopping:
            return
        if child.failed is not None and child.failed.kind == "user":
            self.failure = UserError(child.failed.message)
        elif self._may_be_replaced(self.server, child):
            self._warn(f"the server died ({why_it_ended(child)}); starting it again")
            self.restarts += 1
            self._fill(self.server)
        else:
            self.failure = _given_up(self.server, child)

    def _worker_ended(self, post: _Post, child: Child) -> None:
        if child.finished or self.stopping or self.server.child is None or self.server.child.finished:
            return  # as it should
        self.observer.emit(child.failed or Failed(rank=child.rank, kind="error", message=why_it_ended(child)))
        if child.failed is not None and child.failed.kind == "user":
            post.lost = UserError(child.failed.message)
            self._warn(f"{post.name} cannot take part: {child.failed.message}")
        elif child.failed is None and child.process.returncode in (0, Interrupted.exit_code):
            post.lost = Interrupted(f"{post.name} has left")  # somebody asked it to
            self._warn(str(post.lost))
        elif self._may_be_replaced(post, child):
            self._warn(f"{post.name} died ({why_it_ended(child)}); starting it again")
            self.restarts += 1
            post.due = time.monotonic() + PAUSE_S * 2 ** (post.deaths - 1)
        else:
            post.lost = _given_up(post, child)
            self._warn(f"{post.lost}; training goes on without it")
        if all(worker.lost for worker in self.workers) and not self.open:
            self._end_without_workers()

    def _may_be_replaced(self, post: _Post, child: Child) -> bool:
        """Not after several deaths in a row, without work between them or each of an error of its own."""
        steady = time.monotonic() - post.since > STEADY_S or child.failed is None
        post.deaths = 1 if post.worked and steady else post.deaths + 1
        return post.deaths < MOST_DEATHS

    def _end_without_workers(self) -> None:
        reasons = [post.lost for post in self.workers if not isinstance(post.lost, Interrupted)]
        self.failure = next((r for r in reasons if isinstance(r, UserError)), reasons[-1] if reasons else None)
        self._stop()
        if self.step == 0 and self.failure is not None and self.server.child is not None:
            self.server.child.process.kill()  # there is nothing to save

    def _warn(self, message: str) -> None:
        self.observer.emit(Notice(level="WARNING", message=message))

    # The end

    def _complete(self, summary: dict[str, Any]) -> dict[str, Any]:
        """The summary as the server wrote it, and what only the launcher knows; on the disk as well."""
        known: dict[str, Any] = {"restarts": self.restarts}
        if self.restarts:
            known["wall_s"] = time.time() - self.outcome.started  # a server that came back knows its own time only
        if self.failure is not None:
            known |= {"status": "failed", "error": str(self.failure).splitlines()[0]}
        if not known.items() <= summary.items():
            with contextlib.suppress(OSError):  # a full disk must not hide how the run went
                write_summary(self.run_dir.summary, summary | known)
        return summary | known

    def _send_home(self) -> None:
        """The server has told the workers to leave. Those that were only looking for it are not waited for."""
        posted = [post for post in self.workers if post.child is not None]
        for post in posted:
            if not (self.finished and post.worked) and post.child is not None:
                post.child.process.terminate()
        wait_for((post.child for post in posted if post.child is not None), within_s=LEAVE_S if self.finished else 0.0)
        end_all(self.children, grace_s=GRACE_S)

    def _conclude(self) -> dict[str, Any]:
        outcome, workers = self.outcome, self.config.cluster.num_workers or 1
        size = {"workers": workers, "world_size": workers + 1, "restarts": self.restarts}
        if self.failure is not None:
            if outcome.summary is None and not isinstance(self.failure, UserError):
                error = str(self.failure).splitlines()[0]
                outcome.write_summary(self.run_dir, self.config, **size, error=error)
            raise self.failure
        if outcome.summary is not None and outcome.summary["status"] == "finished":
            return outcome.summary
        if outcome.summary is None:
            outcome.write_summary(self.run_dir, self.config, **size, status="interrupted", members_lost=0)
        raise outcome.interrupted(self.run_dir)


def _posts(
    config: Config, *, workers: int, run_dir: RunDir, resume: Path | None, port: int
) -> tuple[_Post, list[_Post]]:
    """The server's post, and one for each worker on this machine. Workers learn later where the server listens."""
    cluster, host = config.cluster, socket.gethostname()
    common: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "world_size": cluster.num_workers or 1,
        "run_dir": str(run_dir.path),
        "plane": "elastic",
    }
    server = WorkerSpec(
        **common,
        role="server",
        rank=cluster.num_workers or 1,
        local_rank=0,
        local_world_size=workers + 1,
        host=cluster.server or host,
        resume=None if resume is None else str(resume),
        server=f"{cluster.bind}:{port}",
    )
    names = [*cluster.workers, *[host] * workers]
    posts = [
        _Post(WorkerSpec(**common, rank=rank, local_rank=rank, local_world_size=workers, host=names[rank]))
        for rank in range(workers)
    ]
    return _Post(server), posts


def _given_up(post: _Post, child: Child) -> WorkerFailed:
    message = f"{post.name} failed {post.deaths} times in a row: {why_it_ended(child)}"
    return WorkerFailed(f"{message}{last_lines(child)}\nthe whole log: {child.log}")


_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # addresses that mean all of a machine's -> one of them


def dial_address(bind: str, port: int) -> str:
    """Where this machine finds a server that listens on `bind`."""
    return _join(_ANY.get(bind, bind), port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def invitation(config: Config, port: int) -> Iterator[str]:
    """How workers join, in the words of the command."""
    cluster = config.cluster
    host = cluster.bind
    if host in _ANY:
        host = cluster.host_ip.get(cluster.server or "") or socket.gethostname()
    address = _join(host, port)
    count = cluster.num_workers or 1
    if "SMOLCLUSTER_CLUSTER" in os.environ:  # `up` has started this process, and starts the workers
        yield f"listening on {_join(cluster.bind, port)}; {count} worker{'s' * (count != 1)} expected"
        return
    yield f"listening on {_join(cluster.bind, port)}; {count} worker{'s' * (count != 1)} expected:"
    names = [*cluster.workers, *["HOSTNAME"] * count]
    for rank in range(min(count, 8)):
        yield f"    smolcluster worker {rank} {names[rank]} --server {address}"
    if count > 8:
        yield f"    and so on, up to rank {count - 1}"
