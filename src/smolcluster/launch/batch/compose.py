"""Render a compose file: one container for each worker, on one machine.

    mesh plane       rank-0, rank-1, ...: all start together
    elastic plane    server, worker-0, worker-1, ...: each may be stopped and restarted

They share a separate network. The run is in a folder of this machine, so the containers run as a user with write access to it.
The configuration is an environment variable that containers write to a file at start: Docker cannot copy an inline `config`
into a read-only container.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from smolcluster.config import dump
from smolcluster.errors import UserError
from smolcluster.launch.batch import containers
from smolcluster.launch.batch.containers import CONFIG, DATA, SERVER_PORT
from smolcluster.launch.batch.job import RANK_PORT, BatchJob, check_dns_name
from smolcluster.launch.batch.text import mebibytes, to_yaml
from smolcluster.launch.prepare import split_task

RESTARTS = 3
READY_S = 900  # a server may have to download its data before it listens
CODE = "/app"  # folder of the user's task in a container
TOKEN = "/run/secrets/token"
START = f'printf %s "$CONFIG" >{CONFIG}\nexec "$@"\n'

Service = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposeSettings:
    """Docker's part of the job. Paths are on this machine, absolute or relative to the compose file."""

    image: str
    user: str  # as 1000:1000
    data: PurePath
    token_file: PurePath


def check(job: BatchJob, settings: ComposeSettings) -> None:
    check_dns_name(job.name)
    containers.check_image(settings.image)
    containers.check_paths(job)
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", settings.user):
        raise UserError(
            f"--user '{settings.user}': give numeric user and group ids other than root's, such as 1000:1000"
        )
    if job.plane == "mesh" and 0 < job.gpus_per_node < job.workers and job.backend != "gloo":
        raise UserError(
            f"{job.workers} workers on {job.gpus_per_node} GPUs: NCCL needs one GPU for each rank; use --workers "
            f"{job.gpus_per_node}, or --backend gloo"
        )


def render(job: BatchJob, settings: ComposeSettings) -> str:
    """Return the complete file, with the containers' common settings as a YAML anchor."""
    check(job, settings)
    parts = [
        f"# {job.summary}; written by `smolcluster compose`.\n",
        to_yaml({"name": job.name}),
        to_yaml({"x-smolcluster": _escaped(_common(job, settings))}).replace(":", ": &smolcluster", 1),
        "services:\n",
    ]
    for name, service in _services(job):
        body = textwrap.indent(to_yaml(_escaped(service)), "    ")
        parts.append(f"  {name}:\n    <<: *smolcluster\n{body}")
    parts.append(to_yaml({"networks": {"cluster": {}}}))
    if job.plane == "elastic":
        parts.append(to_yaml(_escaped({"secrets": {"token": {"file": _path(settings.token_file)}}})))
    return "".join(parts)


def _escaped(value: Any) -> Any:
    """Double each dollar sign: compose interpolates variables everywhere."""
    if isinstance(value, dict):
        return {key: _escaped(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_escaped(one) for one in value]
    return value.replace("$", "$$") if isinstance(value, str) else value


def _path(path: PurePath) -> str:
    """Return a path that compose does not take for a volume's name."""
    return str(path) if path.is_absolute() else f"./{path.as_posix()}"


def _task(job: BatchJob) -> str | None:
    """Return the task's path in the container."""
    if job.task is None:
        return None
    path, name = split_task(job.task)
    return f"{CODE}/{PurePosixPath(path).name}{name}"


def _common(job: BatchJob, settings: ComposeSettings) -> Service:
    config = job.config.model_copy(deep=True)
    config.task = _task(job)
    environment = containers.environment(job) | {"CONFIG": dump(config)}
    volumes = [_bind(_path(settings.data), DATA)]
    if job.task is not None:
        volumes.append(_bind(str(Path(split_task(job.task)[0]).parent), CODE) | {"read_only": True})
    service: Service = {
        "image": settings.image,
        "init": True,
        "user": settings.user,
        "read_only": True,
        "tmpfs": ["/tmp", str(PurePosixPath(CONFIG).parent)],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "networks": ["cluster"],
        "restart": f"on-failure:{RESTARTS}",
        "stop_grace_period": f"{containers.GRACE_S}s",
        "volumes": volumes,
        "environment": environment,
    }
    if job.plane == "elastic":
        environment["SMOLCLUSTER_TOKEN_FILE"] = TOKEN
        service["secrets"] = ["token"]
    if job.cpus_per_worker is not None:
        service["cpus"] = job.cpus_per_worker
    if job.memory_bytes is not None:
        service["mem_limit"] = f"{mebibytes(job.memory_bytes)}m"
    if job.gpus_per_node:
        service["shm_size"] = "1gb"
    return service


def _bind(source: str, target: str) -> Service:
    """Return a bind mount whose missing source is an error: Docker would create it as root."""
    return {"type": "bind", "source": source, "target": target, "bind": {"create_host_path": False}}


def _services(job: BatchJob) -> Iterator[tuple[str, Service]]:
    start = {"entrypoint": ["/bin/sh", "-euc", START, "start"]}
    if job.plane == "elastic":
        check = {
            "test": ["CMD-SHELL", containers.listens(SERVER_PORT)],
            "interval": "2s",
            "start_period": f"{READY_S}s",
        }
        yield "server", {**start, "command": containers.server_command(job), "healthcheck": check}
        for rank in range(job.workers):
            host = f"worker-{rank}"
            command = containers.worker_command(job, rank=str(rank), host=host, server="server", task=_task(job))
            after = {"depends_on": {"server": {"condition": "service_healthy"}}}
            yield host, {"entrypoint": command[:1], "command": command[1:], **after, **_gpu(job, rank)}
        return
    for rank in range(job.workers):
        command = [*containers.train_command(job), "--world-size", str(job.workers), "--rank", str(rank)]
        command += ["--master-addr", "rank-0", "--master-port", str(RANK_PORT)]
        yield f"rank-{rank}", {**start, "command": command, **_gpu(job, rank)}


def _gpu(job: BatchJob, rank: int) -> Service:
    if not job.gpus_per_node:
        return {}
    device = {"driver": "nvidia", "device_ids": [str(rank % job.gpus_per_node)], "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}
