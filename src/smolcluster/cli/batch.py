"""Options that `slurm`, `k8s` and `compose` share, and the output of their text."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smolcluster.cli import options
from smolcluster.durable_files import write_private_text
from smolcluster.errors import SmolclusterError, UserError

if TYPE_CHECKING:
    from smolcluster.launch.batch.job import BatchJob

size = options.panel("Size of the job")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions(options.RunOptions):
    """What to train in a job."""

    name: Annotated[str | None, typer.Option(help="Of the job, and of its run. Default: as MODEL-STRATEGY.")] = None

    def plan(self, **size: Any) -> BatchJob:
        """Return the job, checked. `size`: further arguments of `plan_job`, which are named as the options."""
        from smolcluster.launch.batch.job import plan_job

        return plan_job(**asdict(self), **size)


Gpus = Annotated[int, size(help="GPUs of each machine; a worker computes on one.")]
Cpus = Annotated[int | None, size(help="Processor cores for each worker.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJobOptions(JobOptions):
    """What to train in a job of several machines, and on how much."""

    nodes: Annotated[int, size(max=4096, help="Machines, or pods.")] = 1
    workers_per_node: Annotated[int | None, size(help="Workers on each. Default: one for each GPU, or one.")] = None
    gpus: Gpus = 0
    cpus: Cpus = None
    memory: Annotated[
        str | None,
        size(metavar="SIZE", help="Memory of each, such as 16GB. Default: Slurm's; 4 GiB a worker in a pod."),
    ] = None
    time: Annotated[
        str | None, size(metavar="LIMIT", help="Longest time: 30 (minutes), 1:30:00, 2-12:00:00 (days).")
    ] = None


Image = Annotated[
    str | None, typer.Option(help="Container image. Default: smolcluster:cpu, or smolcluster:cuda with --gpus.")
]
Submit = Annotated[bool, typer.Option("--submit", help="Call sbatch, kubectl apply or docker compose up with it.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write it here. Default: to the screen.")]


def deliver(text: str, out: Path | None, *, private: bool = False) -> None:
    """Write a job file, or print it without `out`. `private`: readable by its owner only."""
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if private:
            write_private_text(out, text)
        else:
            out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from error
    note(f"written: {out}")


def submit_with(command: list[str], *, where: str, text: str | None = None) -> None:
    """Call the batch system and print its output. `text`: its input; `where`: the remedy if it is not installed."""
    if shutil.which(command[0]) is None:
        raise UserError(
            f"--submit: {command[0]} is not installed here; {where}, or remove --submit and copy the file there"
        )
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        problem = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise SmolclusterError(f"{command[0]} failed: {problem}")
    typer.echo(done.stdout.strip())


def note(text: str) -> None:
    """Print to standard error: for the user, not for the pipe."""
    typer.echo(text, err=True)
