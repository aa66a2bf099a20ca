"""Check what a batch job trains, on how many workers and with which resources."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smolcluster.config import Config, builtin_configs, flag_overrides, load_config
from smolcluster.errors import UserError
from smolcluster.launch.batch.text import parse_time
from smolcluster.launch.prepare import absolute_task, is_task, prepare, task_name
from smolcluster.launch.restart.plan import ElasticRange, check_restartable, parse_elastic

RENDEZVOUS_PORT = 29400  # --rdzv-endpoint of `train --elastic`
RANK_PORT = 29500  # --master-port


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A checked run. `config` is resolved; `sources`, `overrides` and the rest are the user's arguments."""

    name: str
    config: Config
    plane: str
    sources: tuple[str, ...] = ()  # built-in names, and absolute paths
    overrides: tuple[str, ...] = ()
    strategy: str | None = None
    steps: int | None = None
    seed: int | None = None
    backend: str | None = None
    nodes: int = 1
    workers_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_worker: int | None = None
    memory_bytes: int | None = None  # of each node
    time_limit_s: int | None = None
    elastic: ElasticRange | None = None  # mesh plane: restart workers that die

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def task(self) -> str | None:
        return self.config.task

    @property
    def summary(self) -> str:
        """`edp, 2 nodes x 4 workers`."""
        nodes, workers = self.nodes, self.workers_per_node
        return f"{self.config.strategy.name}, {nodes} node{'s' * (nodes != 1)} x {workers} worker{'s' * (workers != 1)}"


def plan_job(
    sources: Sequence[str] | None = None,
    *,
    override: Sequence[str] | None = None,
    strategy: str | None = None,
    plane: str | None = None,
    steps: int | None = None,
    seed: int | None = None,
    backend: str | None = None,
    name: str | None = None,
    nodes: int = 1,
    workers_per_node: int | None = None,
    gpus: int = 0,
    cpus: int | None = None,
    memory: str | None = None,
    time: str | None = None,
    elastic: str | None = None,
) -> BatchJob:
    """Read the configuration, check that the strategy can use these workers, and return the job.

    The arguments have the names of the commands' options.
    """
    from smolcluster.compute.memory import parse_size

    sources, overrides = sources or (), override or ()
    workers_per_node = workers_per_node if workers_per_node is not None else max(1, gpus)
    _check_counts(nodes=nodes, workers=workers_per_node, gpus=gpus, cpus=cpus)
    elastic_range = None if elastic is None else _elastic(elastic, nodes=nodes, workers_per_node=workers_per_node)
    _check_cluster(load_config([s for s in sources if not is_task(s)], overrides=overrides))
    flags = flag_overrides(strategy=strategy, workers=nodes * workers_per_node, plane=plane, steps=steps, seed=seed)
    prepared = prepare(sources, overrides=[*overrides, *flags.items()], backend=backend, lead=False)
    config = prepared.config
    if elastic_range is not None:
        check_restartable(config, prepared.plane)
    job = BatchJob(
        name=name or re.sub(r"[^a-z0-9]+", "-", f"{task_name(config)}-{config.strategy.name}".lower()).strip("-"),
        config=config,
        plane=prepared.plane,
        sources=tuple(map(_absolute, sources)),
        overrides=(*overrides, *([] if plane is None else [f"cluster.plane={plane}"])),
        strategy=strategy,
        steps=steps,
        seed=seed,
        backend=backend,
        nodes=nodes,
        workers_per_node=workers_per_node,
        gpus_per_node=gpus,
        cpus_per_worker=cpus,
        memory_bytes=None if memory is None else parse_size(memory, what="--memory"),
        time_limit_s=None if time is None else parse_time(time),
        elastic=elastic_range,
    )
    check_name(job.name)
    check_fit(job)
    return job


def check_name(name: str) -> None:
    """Check a name for a file, a job and a run directory."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", name):
        raise UserError(f"--name '{name}' is not a job name: use at most 63 letters, digits, '-', '_' and '.'")


def check_dns_name(name: str, *, longest: int = 63) -> None:
    """Check a name that Kubernetes or Docker use as a host name."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > longest:
        raise UserError(
            f"--name '{name}' becomes a host name: use at most {longest} lower-case letters, digits and '-', a letter first"
        )


def check_fit(job: BatchJob) -> None:
    """Let the strategy check that this number of workers can run it. Imports torch."""
    from smolcluster.engine.checks import batch_size_of
    from smolcluster.parallel.placement import Node
    from smolcluster.planner.world_sizes import place, plans

    machines = [f"node-{rank // job.workers_per_node}" for rank in range(job.workers)]
    nodes = [
        Node(name=machine, batch_size=batch_size_of(job.config, rank), machine=machine, stays=job.plane != "elastic")
        for rank, machine in enumerate(machines)
    ]
    place(job.config, nodes, plane=job.plane)
    if job.plane != "elastic":
        config = job.config.model_copy(deep=True)
        config.data.download = False
        plans(config, range(job.elastic.min_workers if job.elastic else job.workers, job.workers + 1))


def _check_counts(*, nodes: int, workers: int, gpus: int, cpus: int | None) -> None:
    for option, count, least in (
        ("--nodes", nodes, 1),
        ("--workers-per-node", workers, 1),
        ("--gpus", gpus, 0),
        ("--cpus", 1 if cpus is None else cpus, 1),
    ):
        if count < least:
            raise UserError(f"{option} {count}: at least {least}")
    if 0 < workers < gpus:
        raise UserError(
            f"--gpus {gpus} with {workers} worker{'s' * (workers != 1)} on each node: a worker computes on one GPU, and "
            f"{gpus - workers} would be idle; use {gpus} workers, or --gpus {workers}"
        )


def _elastic(text: str, *, nodes: int, workers_per_node: int) -> ElasticRange:
    elastic_range = parse_elastic(text, workers=workers_per_node, endpoint=f"first:{RENDEZVOUS_PORT}")
    if elastic_range.max_workers != nodes * workers_per_node:
        raise UserError(
            f"--elastic {text}: the job has {nodes * workers_per_node} workers; use "
            f"--elastic {min(elastic_range.min_workers, nodes * workers_per_node)}:{nodes * workers_per_node}, or other --nodes"
        )
    return elastic_range


def _check_cluster(config: Config) -> None:
    cluster = config.cluster
    named = [*cluster.workers, *cluster.host_ip, *cluster.hosts]
    if named:
        raise UserError(
            f"the configuration names machines ({', '.join(dict.fromkeys(named))}), but the batch system chooses them: "
            "remove the cluster file, or its workers, host_ip and hosts"
        )
    if cluster.token is not None:
        raise UserError(
            "cluster.token: a job file is no place for a secret; remove it and use the system's own option for the token"
        )


def _absolute(source: str) -> str:
    """Make a source's path absolute for the job's machines; keep built-in names."""
    if is_task(source):
        return absolute_task(source)
    known = source.removesuffix(".yaml") in builtin_configs()
    if known and (not source.endswith(".yaml") or not Path(source).exists()):
        return source
    return str(Path(source).expanduser().resolve())
