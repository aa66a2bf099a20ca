"""What the worlds of both planes share: time limits, the server that processes fork from, what they send back."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from smolcluster.config.schema import Config
from smolcluster.engine.spec import WorkerSpec
from smolcluster.observe.events import Event, Failed, StepLogged, to_json
from tests.warm import enter_namespace

Tweak = tuple[str, str, Any]

# On a loaded machine a healthy process may get no processor time for seconds. Worlds that are not about silence wait for it.
PATIENT: dict[str, Any] = {"cluster.silence_timeout": 120.0, "cluster.stall_timeout": 120.0}
PATIENT_FOR: dict[str, dict[str, Any]] = {
    "syncps": {"strategy.timeout": 120.0},  # a gradient that comes after it does not count
    "diloco": {"strategy.quorum": 1.0},  # what comes late counts in another round
}
PROMPT: dict[str, Any] = {"cluster.silence_timeout": 1.75, "cluster.stall_timeout": 10.0}  # the defaults

TASKS = Path(__file__).parent / "tasks.py"
PRELOAD = [
    "torch._dynamo",  # FSDP and pipelines import it: a second in every process
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "smolcluster.engine.process.main",
    "smolcluster.tasks.gpt",
    "smolcluster.strategies.allreduce",
    "smolcluster.strategies.single",
    "smolcluster.engine.elastic.server",
    "smolcluster.engine.elastic.worker",
    "smolcluster.strategies.diloco",
    "smolcluster.strategies.edp",
    "smolcluster.strategies.fsdp",
    "smolcluster.strategies.fsdp_sharded",
    "smolcluster.strategies.mesh",
    "smolcluster.strategies.syncps",
]


class Record:
    """What one process has sent, or all processes of a seat."""

    events: Sequence[Event]

    def rows(self) -> list[StepLogged]:
        """In the order of steps: a row that waits for a state or an evaluation may come after the next."""
        return sorted((e for e in self.events if isinstance(e, StepLogged)), key=lambda row: row.step)

    def losses(self) -> list[float]:
        return [row.loss for row in self.rows()]

    @property
    def failed(self) -> Failed | None:
        return next((e for e in reversed(self.events) if isinstance(e, Failed)), None)


def begin_run(
    size: int, run_dir: Path, config: Mapping[str, Any] | None, *, task: str | None, strategy: str, resume: bool
) -> Config:
    """The resolved configuration, and the run directory made."""
    from smolcluster.config import dump, load_config, resolve
    from smolcluster.engine.run_dir import RunDir

    overrides: dict[str, Any] = {
        "strategy.name": strategy,
        "cluster.num_workers": size,
        "logging.log_interval": 1,
        "logging.sample_tokens": 2,
        "training.device": "cpu",
    }
    if task is not None:
        overrides["task"] = f"{TASKS}:{task}"
    resolved = resolve(load_config([], overrides={**overrides, **(config or {})}))
    RunDir(run_dir).create(dump(resolved), resume=resume)
    return resolved


def forkserver() -> mp.context.ForkServerContext:
    """Return the context that tests start processes in: a process has one fork server, and its first user loads the modules."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class Sink:
    def __init__(self, pipe: Any) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def handle(self, event: Event) -> None:
        with self._lock:
            self._pipe.send(("event", to_json(event)))

    def close(self) -> None:
        return None


def become(spec_json: str, environ: Mapping[str, str], namespace: str | None) -> WorkerSpec:
    """Make this forked process the one of the spec."""
    import torch

    if namespace is not None:
        enter_namespace(namespace)
    spec = WorkerSpec.from_json(spec_json)
    os.environ.update(environ, OMP_NUM_THREADS="1", TEST_RANK=str(spec.rank))
    sys.path[:0] = filter(None, [environ.get("TEST_PATH")])  # where a package of the test is
    torch.set_num_threads(1)
    return spec


def leave(pipe: Any, status: int) -> NoReturn:
    pipe.send(("status", status))
    pipe.close()
    os._exit(status)
