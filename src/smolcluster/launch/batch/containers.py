"""Shared by the containers of a run: paths, commands, checks.

    /etc/smolcluster/config.yaml    the resolved configuration, from the job file
    /data                           the volume: runs, and a cache of downloads
    /tmp                            the only other writable folder

The paths and the user are those of the Dockerfile in the root of the repository.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from smolcluster.errors import UserError
from smolcluster.launch.batch.job import BatchJob
from smolcluster.launch.join.worker import local_override_args

CONFIG = "/etc/smolcluster/config.yaml"
DATA = "/data"
USER = 10001
GRACE_S = 120  # to save after SIGTERM
SERVER_PORT = 65432


def _run(job: BatchJob) -> list[str]:
    """Return the arguments for the run directory. A restarted container resumes from what was saved."""
    return ["--run-dir", f"{DATA}/runs/{job.name}", "--resume", "auto"]


def environment(job: BatchJob) -> dict[str, str]:
    """Return the variables of every container. HOME: libraries write there, and the root file system is read-only."""
    return {
        "HOME": "/tmp",
        "SMOLCLUSTER_CACHE": f"{DATA}/cache",
        "OMP_NUM_THREADS": str(job.cpus_per_worker or 1),
    }


def server_command(job: BatchJob) -> list[str]:
    return ["smolcluster", "server", CONFIG, *_run(job), "--bind", "0.0.0.0", "--port", str(SERVER_PORT)]


def worker_command(job: BatchJob, *, rank: str, host: str, server: str, task: str | None) -> list[str]:
    """Return the command of a worker. `task`: its path in the container."""
    task_args = ["--task", task] if task is not None else []
    override_args = local_override_args(job.config, same_machine=False)
    return ["smolcluster", "worker", rank, host, "--server", f"{server}:{SERVER_PORT}", *task_args, *override_args]


def train_command(job: BatchJob) -> list[str]:
    backend = ["--backend", job.backend] if job.backend is not None else []
    return ["smolcluster", "train", CONFIG, *_run(job), *backend]


def listens(port: int) -> str:
    """Return a shell command that tests for a listening port without a connection, which the server would log."""
    return f"grep -q ':{port:04X} [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6"


def check_image(image: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", image):
        raise UserError(f"--image '{image}' is not an image name, such as registry.example.org/smolcluster:cpu")


def default_image(job: BatchJob) -> str:
    return f"smolcluster:{'cuda' if job.gpus_per_node else 'cpu'}"


def check_paths(job: BatchJob) -> None:
    """Refuse relative paths: a container does not see the files of this machine."""
    data = job.config.data
    tokenizer = data.tokenizer if data.tokenizer is not None and re.search(r"/|\.json$", data.tokenizer) else None
    for key, path in (
        ("data.root", data.root),
        ("data.tokenizer_root", data.tokenizer_root),
        ("data.tokenizer", tokenizer),
    ):
        if path is not None and not PurePosixPath(path).is_absolute():
            raise UserError(
                f"{key} = '{path}' is a path on this machine, which a container does not see: put the files on its volume "
                f"and set {key}={DATA}/{PurePosixPath(path).name}"
            )
