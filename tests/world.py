"""Worlds of real processes for tests: each runs the whole worker (`engine.process.run_worker`) over real sockets.

Processes fork from a server that has torch imported, so a world of four starts in well under a second. What comes back is
every event of every process, and its exit status.

    run_world            the mesh plane: a fixed number of ranks, which live and end together
    run_elastic_world    the elastic plane: a server and workers, which a test's script may kill, freeze and start again
                         (elastic_world.py)
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smolcluster.engine.spec import WorkerSpec
from smolcluster.observe.events import Event, RunFinished, from_json
from tests.elastic_world import ElasticWorld, Life, Seat, Who, run_elastic_world
from tests.world_setup import PROMPT, TASKS, Record, Sink, Tweak, become, begin_run, forkserver, leave

__all__ = [
    "PROMPT",
    "TASKS",
    "ElasticWorld",
    "Life",
    "Rank",
    "Seat",
    "Tweak",
    "Who",
    "World",
    "forkserver",
    "run_elastic_world",
    "run_world",
]


@dataclass
class Rank(Record):
    status: int | None = None
    events: list[Event] = field(default_factory=list)


@dataclass
class World:
    ranks: list[Rank]
    run_dir: Path

    @property
    def summary(self) -> dict[str, Any]:
        return next(e.summary for e in self.ranks[0].events if isinstance(e, RunFinished))

    @property
    def refusal(self) -> str:
        """What all ranks end with. The first to look may be gone while another one still waits to be connected with it."""
        failures = [rank.failed for rank in self.ranks]
        assert all(failed is not None for failed in failures), failures
        (said,) = {failed.message for failed in failures if failed is not None and failed.kind == "user"}
        return said

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
    timeout_s: float = 250.0,
    on_event: Callable[[int, Event, Sequence[mp.process.BaseProcess]], None] | None = None,
    places: Sequence[tuple[str, str]] = (),
    absent: Collection[int] = (),
    tweaks: Mapping[int, Sequence[Tweak]] | None = None,
    environ: Mapping[str, str] | None = None,
    again: bool = False,
) -> World:
    """Train in `size` processes. `config` has dotted names; `hook` is (kind, argument) for `_Channel`.

    places    each rank's (network namespace, address): hosts of their own, where nobody watches them but they themselves
    absent    ranks that never come
    tweaks    by rank: (module, attribute, value) that are set in its process before it begins
    environ   set in every process
    again     the run goes on by itself, as when a launcher starts all ranks again
    """
    resolved = begin_run(size, run_dir, config, task=task, strategy=strategy, resume=resume is not None)
    context = forkserver()
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
            master_addr=places[0][1] if places else "127.0.0.1",
            watched=not places,
            again=again,
        )
        ours, theirs = context.Pipe()
        namespace = places[rank][0] if places else None
        arguments = (spec.to_json(), theirs, hook, namespace, list((tweaks or {}).get(rank, ())), dict(environ or {}))
        process = context.Process(target=_be_rank, args=arguments, daemon=True)
        if rank not in absent:
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
                    for other in set(range(1, size)) - set(absent):
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
    started = [process for rank, process in enumerate(processes) if rank not in absent]
    for process in started:
        process.join(timeout_s)
    alive = [rank for rank, process in enumerate(processes) if process in started and process.is_alive()]
    for process in started:
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

    orphaned = False

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


def _refuse_to_pickle(*_: object) -> None:
    raise AssertionError("an object was to be pickled and sent")


def _be_rank(
    spec_json: str,
    pipe: Any,
    hook: tuple[str, Any] | None,
    namespace: str | None,
    tweaks: Sequence[Tweak],
    environ: dict[str, str],
) -> None:
    from torch.distributed import distributed_c10d

    from smolcluster.engine.process.main import run_worker

    # Some of torch's own machinery would pickle what it tells other ranks. Nothing here may make it do so.
    distributed_c10d._object_to_tensor = distributed_c10d._tensor_to_object = _refuse_to_pickle
    spec = become(spec_json, environ, namespace)
    for module, attribute, value in tweaks:
        where = importlib.import_module(module)
        getattr(where, attribute)  # raises if the tweak would have no effect
        setattr(where, attribute, value)
    leave(pipe, run_worker(spec, _Channel(pipe, spec.rank, spec.world_size, hook), [Sink(pipe)]))
