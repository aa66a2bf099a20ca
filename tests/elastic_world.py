"""A run on the elastic plane for tests: a server and workers, which a test's script may kill, freeze and start again."""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from smolcluster.config.schema import Config
from smolcluster.engine.spec import WorkerSpec
from smolcluster.observe.events import Event, Notice, RunFinished, StepLogged, from_json
from tests.world_setup import PATIENT, PATIENT_FOR, Record, Sink, become, begin_run, forkserver, leave

Who = int | Literal["server"]


@dataclass
class Life:
    """One process of a seat, from its start to its end."""

    process: mp.process.BaseProcess
    pipe: Any
    events: list[Event] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each event came, by time.monotonic
    status: int | None = None  # what `run_worker` returned; None for one that was killed
    listener: threading.Thread | None = None


@dataclass
class Seat(Record):
    """The server or one worker, over all its lives."""

    lives: list[Life] = field(default_factory=list)

    @property
    def events(self) -> list[Event]:  # type: ignore[override]
        return [event for life in self.lives for event in life.events]

    @property
    def times(self) -> list[float]:
        return [when for life in self.lives for when in life.times]

    @property
    def status(self) -> int | None:
        """Of the last life."""
        return self.lives[-1].status if self.lives else None

    def notices(self) -> list[str]:
        return [e.message for e in self.events if isinstance(e, Notice)]

    @property
    def step(self) -> int:
        """The latest step it has logged."""
        return max((row.step for row in self.rows()), default=0)


class ElasticWorld:
    """A run on the elastic plane: controls while it lives, then what became of it.

    `who` is "server" or a worker's rank. Every method may be called by the script only, on its thread.
    """

    def __init__(
        self,
        workers: int,
        run_dir: Path,
        config: Config,
        *,
        resume: Path | None,
        hosts: Sequence[str] | None,
        overrides: Mapping[int, Mapping[str, Any]],
        environ: Mapping[str, str],
        die_at: Mapping[Who, int],
        slow: Mapping[Who, float],
        via: Callable[[int, str], str] | None,
        places: Mapping[Who, tuple[str, str]],
    ) -> None:
        self.run_dir = run_dir
        self.server = Seat()
        self.workers = [Seat() for _ in range(workers)]
        self.address = ""  # where the server listens; kept over its restarts
        self._config, self._resume, self._hosts, self._overrides = config, resume, hosts, overrides
        self._environ, self._die_at, self._slow, self._via = environ, die_at, slow, via
        self._namespaces = {who: namespace for who, (namespace, _) in places.items()}
        self._bind = places["server"][1] if places else "127.0.0.1"
        self._context = forkserver()
        self._news = threading.Condition()

    # Acting on it

    def start(self, who: Who) -> None:
        """Start this process; workers from the second life on, and those that were not in `start`, are started here."""
        if who != "server" and not self.address:
            self.wait(lambda: bool(self.address), what="the server to listen")
        seat = self.seat(who)
        first_life = not seat.lives
        ours, theirs = self._context.Pipe()
        faults = {"die_at": self._die_at.get(who) if first_life else None, "slow_s": self._slow.get(who, 0.0)}
        process = self._context.Process(
            target=_be_member,
            args=(self._spec(who), theirs, faults, dict(self._environ), self._namespaces.get(who)),
            daemon=True,
        )
        process.start()
        theirs.close()
        life = Life(process, ours)
        seat.lives.append(life)
        life.listener = threading.Thread(target=self._listen, args=(life,), daemon=True)
        life.listener.start()

    def kill(self, who: Who) -> None:
        """kill -9; returns when the process is gone."""
        process = self.seat(who).lives[-1].process
        process.kill()
        process.join()

    def restart(self, who: Who) -> None:
        """Kill it if it lives, and start it again: what a launcher does. The server keeps its port."""
        if self.alive(who):
            self.kill(who)
        self.start(who)

    def freeze(self, who: Who) -> None:
        """SIGSTOP."""
        self._signal(who, signal.SIGSTOP)

    def thaw(self, who: Who) -> None:
        """SIGCONT."""
        self._signal(who, signal.SIGCONT)

    def ask_to_stop(self, who: Who = "server") -> None:
        """What the first Ctrl-C does."""
        with contextlib.suppress(OSError):
            self.seat(who).lives[-1].pipe.send("stop")

    # Watching it

    def seat(self, who: Who) -> Seat:
        return self.server if who == "server" else self.workers[who]

    def alive(self, who: Who) -> bool:
        lives = self.seat(who).lives
        return bool(lives) and lives[-1].process.is_alive()

    def wait(self, question: Callable[[], bool], *, what: str, timeout_s: float = 300.0) -> None:
        """Until the answer is yes: asked at every event, and a few times a second for what is no event."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while not question():
                left = deadline - time.monotonic()
                assert left > 0, f"{what}: not within {timeout_s:g} s; {self.story()}"
                self._news.wait(min(left, 0.1))

    def wait_for_step(self, step: int, who: Who = "server", *, timeout_s: float = 300.0) -> None:
        """Until it has logged this step or a later one."""
        self.wait(lambda: self.seat(who).step >= step, what=f"step {step} of {who}", timeout_s=timeout_s)

    def wait_for_exit(self, who: Who, *, timeout_s: float = 300.0) -> int | None:
        """Until its process is gone; returns the status of that life."""
        self.wait(lambda: not self.alive(who), what=f"the end of {who}", timeout_s=timeout_s)
        life = self.seat(who).lives[-1]
        assert life.listener is not None
        life.listener.join(5.0)
        return life.status

    # What became of it

    @property
    def summary(self) -> dict[str, Any]:
        """Of the server's last life."""
        return next(e.summary for e in reversed(self.server.events) if isinstance(e, RunFinished))

    @property
    def statuses(self) -> dict[Who, int | None]:
        return {"server": self.server.status, **{rank: seat.status for rank, seat in enumerate(self.workers)}}

    def history(self) -> list[dict[str, Any]]:
        """history.jsonl: every committed step and every change of the membership."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.run_dir / "history.jsonl").read_text().splitlines() if line]
        return []

    def story(self) -> str:
        """What went wrong, for the message of a test that fails."""
        lines = [f"statuses {self.statuses}"]
        for who in ("server", *range(len(self.workers))):
            seat = self.seat(who)
            lines.append(f"{who}: {len(seat.lives)} lives, step {seat.step}, notices {seat.notices()[-3:]}")
            if seat.failed is not None:
                lines.append(f"{who} failed: {seat.failed.message}\n{seat.failed.traceback}")
        return "\n".join(lines)

    # Inside

    def _spec(self, who: Who) -> str:
        size = len(self.workers)
        rank = size if who == "server" else who
        hosts = self._hosts or self._config.cluster.workers or ["testhost"] * size
        if who == "server":
            server = self.address or f"{self._bind}:0"
        else:
            server = self._via(who, self.address) if self._via is not None else self.address
        return WorkerSpec(
            config=self._config.model_dump(mode="json"),
            rank=rank,
            world_size=size,
            local_rank=0 if who == "server" else rank,
            local_world_size=size + 1,
            host="testhost" if who == "server" else hosts[rank],
            run_dir=str(self.run_dir),
            resume=str(self._resume)
            if self._resume is not None and who == "server" and not self.server.lives
            else None,
            plane="elastic",
            role="server" if who == "server" else "worker",
            server=server,
            overrides=dict(self._overrides.get(rank, {})) if who != "server" else {},
        ).to_json()

    def _listen(self, life: Life) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, value = life.pipe.recv()
                with self._news:
                    if kind == "port":
                        self.address = f"{self._bind}:{value}"
                    elif kind == "event":
                        life.events.append(from_json(value))
                        life.times.append(time.monotonic())
                    else:
                        life.status = value
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def _signal(self, who: Who, number: int) -> None:
        pid = self.seat(who).lives[-1].process.pid
        assert pid is not None
        os.kill(pid, number)

    def _everyone(self) -> list[Life]:
        return [life for seat in (self.server, *self.workers) for life in seat.lives]

    def _wait_for_the_end(self, timeout_s: float) -> None:
        deadline, ranks = time.monotonic() + timeout_s, range(len(self.workers))
        over = lambda: not self.alive("server") or not any(map(self.alive, ranks))  # noqa: E731
        self.wait(over, what="the end of the run", timeout_s=timeout_s)
        # A server without workers has a few seconds to end: it would wait for others for ever.
        for who in ("server", *ranks):
            if self.seat(who).lives:
                self.wait_for_exit(who, timeout_s=min(60.0, max(0.1, deadline - time.monotonic())))

    def _end(self) -> None:
        """Nothing is left running."""
        for life in self._everyone():
            life.process.kill()  # also ends one that is frozen
            life.process.join()
        for life in self._everyone():
            if life.listener is not None:
                life.listener.join(5.0)
            life.pipe.close()


def run_elastic_world(
    workers: int,
    run_dir: Path,
    config: dict[str, Any] | None = None,
    *,
    task: str | None = None,
    strategy: str = "syncps",
    script: Callable[[ElasticWorld], None] | None = None,
    start: Sequence[int] | None = None,
    resume: Path | None = None,
    hosts: Sequence[str] | None = None,
    overrides: Mapping[int, Mapping[str, Any]] | None = None,
    environ: Mapping[str, str] | None = None,
    die_at: Mapping[Who, int] | None = None,
    slow: Mapping[Who, float] | None = None,
    via: Callable[[int, str], str] | None = None,
    places: Mapping[Who, tuple[str, str]] | None = None,
    patient: bool = True,
    timeout_s: float = 250.0,
) -> ElasticWorld:
    """Train with a server and `workers` workers on loopback, until the server and every worker that lives have left.

    `config` has dotted names; every step is logged. A `patient` world evicts nobody for silence unless `config` has PROMPT;
    another has the product's own limits. Nobody restarts a process but the script, which runs on the caller's thread once the
    processes of the beginning are started:

        def script(world):
            world.wait_for_step(5)           # of the server
            world.kill(1)                    # a worker, by rank; or "server"
            world.wait_for_step(8)
            world.restart(1)

        world = run_elastic_world(3, tmp_path, {"training.steps": 20}, task="Tiny", strategy="edp", script=script)
        assert world.statuses == {"server": 0, 0: 0, 1: 0, 2: 0}
        assert world.summary["members_lost"] == 1

    start       ranks that are started at the beginning; default all. The script may `start` the others later
    resume      a checkpoint, or a folder of them, for the server to start from; the run directory may then hold a run
    hosts       name of each worker's host; default cluster.workers, or testhost
    overrides   by rank: this host's own values, by dotted name
    environ     set in every process, e.g. SMOLCLUSTER_TOKEN; TEST_RANK is always there, for tasks that misbehave on one rank
    die_at      {who: step}: the process kills itself, in its first life, as soon as it has logged this step
    slow        {who: seconds}: the process sleeps so long after each row that it logs
    via         (rank, server's address) -> the address that this worker dials, e.g. a relay's
    places      {who: (network namespace, address)}: hosts of their own; beyond loopback a token is needed

    A run that does not end within `timeout_s` after the script is an AssertionError that tells who is left.
    """
    if patient:
        config = PATIENT | PATIENT_FOR.get(strategy, {}) | (config or {})
    resolved = begin_run(workers, run_dir, config, task=task, strategy=strategy, resume=resume is not None)
    world = ElasticWorld(
        workers,
        run_dir,
        resolved,
        resume=resume,
        hosts=hosts,
        overrides=overrides or {},
        environ=environ or {},
        die_at=die_at or {},
        slow=slow or {},
        via=via,
        places=places or {},
    )
    try:
        world.start("server")
        for rank in range(workers) if start is None else start:
            world.start(rank)
        if script is not None:
            script(world)
        world._wait_for_the_end(timeout_s)
    finally:
        world._end()
    return world


class _ElasticChannel:
    """What a launcher would say. The pipe's end means that the test is gone."""

    orphaned = False

    def __init__(self, pipe: Any) -> None:
        self._pipe, self._stop = pipe, False
        self.announce = lambda port: pipe.send(("port", port))

    def stop_requested(self) -> bool:
        if not self._stop and self._pipe.poll():
            try:
                self._stop = self._pipe.recv() == "stop"
            except (EOFError, OSError):
                os._exit(1)
        return self._stop

    def rendezvous_port(self) -> int:
        raise AssertionError("the elastic plane has no rendezvous")


class _FaultySink(Sink):
    def __init__(self, pipe: Any, *, die_at: int | None, slow_s: float) -> None:
        super().__init__(pipe)
        self._die_at, self._slow_s = die_at, slow_s

    def handle(self, event: Event) -> None:
        super().handle(event)
        if isinstance(event, StepLogged):
            if self._die_at is not None and event.step >= self._die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(self._slow_s)


def _be_member(
    spec_json: str, pipe: Any, faults: dict[str, Any], environ: dict[str, str], namespace: str | None
) -> None:
    from smolcluster.engine.process.main import run_worker

    spec = become(spec_json, environ, namespace)
    leave(pipe, run_worker(spec, _ElasticChannel(pipe), [_FaultySink(pipe, **faults)]))
