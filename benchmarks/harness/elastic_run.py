"""A run of the elastic plane: a server and workers, each in the process that the launcher would start.

    with ElasticRun(config, folder) as run:
        run.watch(lambda rows: rows[-1].loss < 2.5)      # the server's rows so far; until then, or the end of the run
        run.summary

Every process computes with one thread. A process that ends is not restarted: `p9.py`, which measures that, runs the launcher
itself. At the end of the `with` block no process is left, also after an error.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.network import Network, ended_by_sigterm
from benchmarks.harness.processes import child_environment, environment
from benchmarks.harness.workload import Shape, make_config
from smolcluster.comm.elastic.transport.security import new_token
from smolcluster.config import dump
from smolcluster.config.options import Options
from smolcluster.config.schema import Config
from smolcluster.engine.run_dir import RunDir
from smolcluster.engine.spec import WorkerSpec
from smolcluster.errors import SmolclusterError
from smolcluster.launch.local.processes import Child, Inbox, end_all, exit_reason, log_tail, send_line, spawn
from smolcluster.observe.events import Event, Failed, Phase, RunFinished, StepLogged
from smolcluster.strategies.base import Strategy
from smolcluster.strategies.registry import find_strategy, read_options

Who = int | Literal["server"]


def elastic_config(shape: Shape, *, workers: int, steps: int, strategy: str, overrides: Mapping[str, Any]) -> Config:
    """Return the configuration of a run on the CPU that logs little and saves nothing."""
    common = {
        "strategy.name": strategy,
        "cluster.plane": "elastic",
        "cluster.num_workers": workers,
        "training.device": "cpu",
        "training.eval_steps": 0,
        "logging.log_interval": 10,
    }
    return make_config(shape, steps=steps, overrides={**common, **overrides})


def options_of(config: Config) -> tuple[type[Strategy[Options]], Options]:
    """Return the strategy's class and its options."""
    options, _ = read_options(config.strategy, plane="elastic")
    return find_strategy(config.strategy.name, "elastic", options), options


class ElasticRun:
    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        cores: Mapping[Who, int] | None = None,
        environ: Mapping[str, str] | None = None,
        network: Network | None = None,
    ) -> None:
        """`cores`: the only core that a process may use; without an entry it may use all.

        With a network worker r is on host r, and the server on host 0.
        """
        self.config, self.folder = config, folder
        self.rows: list[StepLogged] = []  # the server's
        self.summary: dict[str, Any] = {}
        self._cores, self._environ = cores or {}, {**child_environment(), **(environ or {})}
        self._network, self._address = network, "127.0.0.1"
        if network is not None:
            self._address = network.address(0)
            self._environ["SMOLCLUSTER_TOKEN"] = new_token()
        self._inbox = Inbox()
        self._children: list[Child] = []
        self._running = 0

    def __enter__(self) -> ElasticRun:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(ended_by_sigterm())
        self._stack.callback(lambda: end_all(self._children, grace_s=0.0))
        try:
            RunDir(self.folder).create(dump(self.config), resume=False)
            send_line(self._spawn("server"), self._spec("server", f"{self._address}:0").to_json())
            workers = [self._spawn(rank) for rank in range(self.config.cluster.num_workers or 1)]
            port = self._port()
            for child in workers:
                send_line(child, self._spec(child.rank, f"{self._address}:{port}").to_json())
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def watch(self, enough: Callable[[Sequence[StepLogged]], bool] = lambda rows: False, *, timeout_s: float) -> bool:
        """Wait until the server's rows are enough (return True) or the run has ended (return False)."""
        deadline = time.monotonic() + timeout_s
        while self._running:
            event = self._next(deadline)
            if isinstance(event, StepLogged) and event.role == "server" and enough(self.rows):
                return True
        return False

    def pid(self, who: Who) -> int:
        role, rank = ("server", None) if who == "server" else ("worker", who)
        return next(c.process.pid for c in self._children if c.spec.role == role and rank in (None, c.rank))

    # Inside

    def _spec(self, who: Who, server: str) -> WorkerSpec:
        size = self.config.cluster.num_workers or 1
        return WorkerSpec(
            config=self.config.model_dump(mode="json"),
            rank=size if who == "server" else who,
            world_size=size,
            local_rank=0,
            local_world_size=size + 1,
            host="server" if who == "server" else f"worker{who}",
            run_dir=str(self.folder),
            plane="elastic",
            role="server" if who == "server" else "worker",
            server=server,
        )

    def _spawn(self, who: Who) -> Child:
        place = (
            contextlib.nullcontext() if self._network is None else self._network.inside(0 if who == "server" else who)
        )
        with environment(self._environ), place:
            child = spawn(self._spec(who, ""), self._inbox)
        self._children.append(child)
        self._running += 1
        if who in self._cores:  # before it has any threads
            os.sched_setaffinity(child.process.pid, {self._cores[who]})
        return child

    def _port(self) -> int:
        deadline = time.monotonic() + 120.0
        while True:
            event = self._next(deadline)
            if isinstance(event, Phase) and event.name == "port":
                return int(event.detail)

    def _next(self, deadline: float) -> Event | None:
        """Wait for the next event, and record it. None: a process has ended."""
        try:
            child, event = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            done = self.rows[-1].step if self.rows else 0
            raise SmolclusterError(f"a run of {self.config.strategy.name} hangs at step {done}") from None
        assert child is not None
        if event is None:
            self._ended(child)
        elif isinstance(event, Failed):
            child.failed = event
        elif isinstance(event, RunFinished):
            self.summary = event.summary
        elif isinstance(event, StepLogged) and event.role == "server":
            self.rows.append(event)
        return event

    def _ended(self, child: Child) -> None:
        self._running -= 1
        if child.process.wait() != 0:
            name = self.config.strategy.name
            raise SmolclusterError(f"{child.name} of {name} failed: {exit_reason(child)}{log_tail(child)}")
