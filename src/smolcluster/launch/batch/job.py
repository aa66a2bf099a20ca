"""What a batch system is asked for: what is trained, on how many workers, with how much of a machine for each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smolcluster.config import Config, builtin_configs, load_config
from smolcluster.errors import UserError
from smolcluster.launch.batch.text import parse_time
from smolcluster.launch.prepare import absolute_task, is_task, prepare, sets_of, task_name
from smolcluster.launch.restart.plan import ElasticRange, check_restartable, parse_elastic

MEET_PORT = 29400  # where the launchers of `train --elastic` meet
RANK_PORT = 29500  # where the ranks of the mesh plane meet


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A run, checked. `config` is the resolved one; `sources`, `overrides` and the rest are what the user said of it."""

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
    elastic: ElasticRange | None = None  # mesh plane: workers that die are started again

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def task(self) -> str | None:
        return self.config.task

    @property
    def told(self) -> str:
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
    """From what the user said to a job that can run: the configuration is read, and the strategy asked whether it fits.

    The arguments are named as the options of the commands.
    """
    from smolcluster.compute.memory import parse_size

    sources, overrides = sources or (), override or ()
    workers_per_node = workers_per_node if workers_per_node is not None else max(1, gpus)
    _check_counts(nodes=nodes, workers=workers_per_node, gpus=gpus, cpus=cpus)
    wish = None if elastic is None else _elastic(elastic, nodes=nodes, workers_per_node=workers_per_node)
    _check_cluster(load_config([s for s in sources if not is_task(s)], overrides=overrides))
    sets = sets_of(strategy=strategy, workers=nodes * workers_per_node, plane=plane, steps=steps, seed=seed)
    prepared = prepare(sources, overrides=overrides, sets=sets, backend=backend, lead=False)
    config = prepared.config
    if wish is not None:
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
        elastic=wish,
    )
    check_name(job.name)
    check_fit(job)
    return job


def check_name(name: str) -> None:
    """Good for a file, a job and a folder of the run."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", name):
        raise UserError(
            f"--name '{name}' cannot be the name of a job: use letters, digits, '-', '_' and '.', 63 at most"
        )


def check_dns_name(name: str, *, longest: int = 63) -> None:
    """Good for a host: what Kubernetes and Docker ask of names."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > longest:
        raise UserError(
            f"--name '{name}' becomes the name of a host there: use small letters, digits and '-', a letter first, "
            f"{longest} at most"
        )


def check_fit(job: BatchJob) -> None:
    """The strategy itself says whether so many workers can run it. This needs torch."""
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
        config.data.download = False  # a job file is no reason to fetch anything
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
    wish = parse_elastic(text, workers=workers_per_node, endpoint=f"first:{MEET_PORT}")
    if wish.max_workers != nodes * workers_per_node:
        raise UserError(
            f"--elastic {text}: the job has room for {nodes * workers_per_node} workers; use "
            f"--elastic {min(wish.min_workers, nodes * workers_per_node)}:{nodes * workers_per_node}, or other --nodes"
        )
    return wish


def _check_cluster(config: Config) -> None:
    cluster = config.cluster
    named = [*cluster.workers, *cluster.host_ip, *cluster.hosts]
    if named:
        raise UserError(
            f"the configuration names machines ({', '.join(dict.fromkeys(named))}), and here the batch system chooses them: "
            "leave out the cluster file, or its workers, host_ip and hosts"
        )
    if cluster.token is not None:
        raise UserError(
            "cluster.token: a job file is read by many; leave it out, each system has a place for the token"
        )


def _absolute(source: str) -> str:
    """Commands of the job run elsewhere: a path must hold there too. Built-in names stay what they are."""
    if is_task(source):
        return absolute_task(source)
    known = source.removesuffix(".yaml") in builtin_configs()
    if known and (not source.endswith(".yaml") or not Path(source).exists()):
        return source
    return str(Path(source).expanduser().resolve())
