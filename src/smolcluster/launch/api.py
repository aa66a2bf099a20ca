"""`smolcluster.train(...)`: `smolcluster train` from Python."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smolcluster.config import Overrides, flag_overrides, list_overrides
from smolcluster.launch.local.elastic import run_elastic
from smolcluster.launch.local.mesh import run_local
from smolcluster.launch.prepare import Prepared, prepare
from smolcluster.launch.restart.launcher import run_restarting
from smolcluster.launch.restart.plan import ElasticRange, check_restartable, elastic_from_flags

if TYPE_CHECKING:
    from smolcluster.observe.observer import Sink
    from smolcluster.tasks.base import Task


def train(
    *sources: str | Path | type[Task],
    strategy: str | None = None,
    workers: int | None = None,
    plane: str | None = None,
    overrides: Overrides = (),
    steps: int | None = None,
    seed: int | None = None,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    backend: str | None = None,
    elastic: str | None = None,
    max_restarts: int | None = None,
    sinks: Sequence[Sink] | None = None,
) -> dict[str, Any]:
    """Train on this machine and return the summary (the contents of summary.json, plus `run_dir`).

    Sources are configuration files, built-in names such as "gpt", and at most one task: "file.py:Task" or the class itself,
    which must live in a file that can be imported again by the workers. `elastic` is "MIN:MAX", as in the command. Raises
    `smolcluster.errors.UserError` for wrong input and `WorkerFailed` when a worker dies.

        summary = smolcluster.train("gpt", strategy="allreduce", workers=2, overrides={"training.steps": 50})
    """
    elastic_range = elastic_from_flags(elastic, workers=workers, endpoint=None, max_restarts=max_restarts)
    workers = workers if elastic_range is None else elastic_range.max_workers
    arguments = flag_overrides(strategy=strategy, workers=workers, plane=plane, steps=steps, seed=seed)
    prepared = prepare(
        [_source(s) for s in sources],
        overrides=[*list_overrides(overrides), *arguments.items()],
        run_dir=None if run_dir is None else Path(run_dir),
        resume=None if resume is None else str(resume),
        backend=backend,
    )
    if elastic_range is not None:
        check_restartable(prepared.config, prepared.plane)
    return run_here(prepared, sinks=sinks, elastic=elastic_range)


def run_here(
    run: Prepared, *, sinks: Sequence[Sink] | None = None, elastic: ElasticRange | None = None
) -> dict[str, Any]:
    """Run on this machine to the end. Return the summary, or raise. Without `sinks` the console shows the run."""
    if sinks is None:
        from smolcluster.observe.console import ConsoleSink
        from smolcluster.observe.summary import SummarySink

        sinks = [ConsoleSink(), SummarySink()]
    if elastic is not None:
        return run_restarting(run, elastic, sinks=sinks)
    return run_elastic(run, sinks=sinks) if run.plane == "elastic" else run_local(run, sinks=sinks)


def _source(source: str | Path | type[Task]) -> str:
    if isinstance(source, type):
        return f"{inspect.getfile(source)}:{source.__qualname__}"
    return str(source)
