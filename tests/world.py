"""A world of real processes for tests: each rank runs the whole worker (`engine.process.run_worker`) over real sockets.

Processes fork from a server that has torch imported, so a world of four starts in well under a second. What comes back is
every event of every rank, and each rank's exit status.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smolcluster.observe.events import Event, Failed, RunFinished, StepLogged, from_json, to_json

TASKS = Path(__file__).parent / "tasks.py"
PRELOAD = [
    "torch._dynamo",  # optimizers import it when they are made: a second in every process
    "torch",
    "smolcluster.engine.process",
    "smolcluster.tasks.gpt",
    "smolcluster.strategies.allreduce",
    "smolcluster.strategies.single",
]


@dataclass
class Rank:
    status: int | None = None
    events: list[Event] = field(default_factory=list)

    def rows(self) -> list[StepLogged]:
        return [e for e in self.events if isinstance(e, StepLogged)]

    def losses(self) -> list[float]:
        return [row.loss for row in self.rows()]

    @property
    def failed(self) -> Failed | None:
        return next((e for e in self.events if isinstance(e, Failed)), None)


@dataclass
class World:
    ranks: list[Rank]
    run_dir: Path

    @property
    def summary(self) -> dict[str, Any]:
        return next(e.summary for e in self.ranks[0].events if isinstance(e, RunFinished))

    def global_losses(self) -> list[float]:
        """The loss of the global batch at each step: ranks weighted by their samples."""
        curves = [[(row.loss, row.samples) for row in rank.rows()] for rank in self.ranks]
        return [sum(loss * n for loss, n in step) / sum(n for _, n in step) for step in zip(*curves, strict=True)]


def run_world(
    size: int,
    run_dir: Path,
    config: dict[str, Any] | None = None,
    *,
    task: str | None = None,
    strategy: str = "allreduce",
    resume: Path | None = None,
    backend: str | None = None,
    hook: tuple[str, Any] | None = None,
    timeout_s: float = 60.0,
    on_event: Callable[[int, Event, Sequence[mp.process.BaseProcess]], None] | None = None,
) -> World:
    """Train in `size` processes. `config` has dotted names; `hook` is (kind, argument) for `_Channel`."""
    from smolcluster.config import dump, load_config, resolve
    from smolcluster.engine.run_dir import RunDir
    from smolcluster.engine.spec import WorkerSpec

    sets: dict[str, Any] = {
        "strategy.name": strategy,
        "cluster.num_workers": size,
        "logging.log_interval": 1,
        "training.device": "cpu",
    }
    if task is not None:
        sets["task"] = f"{TASKS}:{task}"
    resolved = resolve(load_config([], sets=sets | (config or {})))
    RunDir(run_dir).create(dump(resolved), resume=resume is not None)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    pipes, processes = [], []
    for rank in range(size):
        spec = WorkerSpec(
            config=resolved.model_dump(mode="json"),
            rank=rank,
            world_size=size,
            local_rank=rank,
            local_world_size=size,
            host="testhost",
            run_dir=str(run_dir),
            resume=None if resume is None else str(resume),
            backend=backend,
        )
        ours, theirs = context.Pipe()
        process = context.Process(target=_be_rank, args=(spec.to_json(), theirs, hook), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)

    ranks = [Rank() for _ in range(size)]

    def listen(rank: int) -> None:
        try:
            while True:
                kind, value = pipes[rank].recv()
                if kind == "port":
                    for other in range(1, size):
                        pipes[other].send(value)
                elif kind == "event":
                    event = from_json(value)
                    ranks[rank].events.append(event)
                    if on_event is not None:
                        on_event(rank, event, processes)
                else:
                    ranks[rank].status = value
        except (EOFError, OSError):
            return

    listeners = [threading.Thread(target=listen, args=(rank,), daemon=True) for rank in range(size)]
    for listener in listeners:
        listener.start()
    for process in processes:
        process.join(timeout_s)
    alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    for listener in listeners:
        listener.join(5.0)
    for pipe in pipes:
        pipe.close()
    assert not alive, f"ranks {alive} did not end within {timeout_s} s"
    return World(ranks, run_dir)


class _Channel:
    """What a launcher would say. `("stop_after", n)`: ask to stop once n steps are logged, on the last rank only."""

    def __init__(self, pipe: Any, rank: int, size: int, hook: tuple[str, Any] | None) -> None:
        self._pipe, self._steps = pipe, 0
        self._stop_after = hook[1] if hook and hook[0] == "stop_after" and rank == size - 1 else None
        self._kill_at = hook[1][1] if hook and hook[0] == "kill" and rank == hook[1][0] else None
        self.announce = (lambda port: pipe.send(("port", port))) if rank == 0 else None

    def stop_requested(self) -> bool:
        """Called once per step, in the middle of it."""
        self._steps += 1
        if self._kill_at is not None and self._steps == self._kill_at:
            os.kill(os.getpid(), 9)
        return self._stop_after is not None and self._steps >= self._stop_after

    def rendezvous_port(self) -> int:
        return int(self._pipe.recv())


class _Sink:
    def __init__(self, pipe: Any) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def handle(self, event: Event) -> None:
        with self._lock:
            self._pipe.send(("event", to_json(event)))

    def close(self) -> None:
        return None


def _be_rank(spec_json: str, pipe: Any, hook: tuple[str, Any] | None) -> None:
    import torch

    from smolcluster.engine.process import run_worker
    from smolcluster.engine.spec import WorkerSpec

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    spec = WorkerSpec.from_json(spec_json)
    status = run_worker(spec, _Channel(pipe, spec.rank, spec.world_size, hook), [_Sink(pipe)])
    pipe.send(("status", status))
    pipe.close()
    os._exit(status)
