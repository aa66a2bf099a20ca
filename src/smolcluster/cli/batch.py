"""Arguments that `slurm`, `k8s` and `compose` share, each with the same words; and where their text goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JOB = "Size of the job"

Plane = Annotated[
    str | None,
    typer.Option(help="mesh, or elastic: a server, and workers that may come and go. Default: as the strategy needs."),
]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps; wins over epochs.")]
Seed = Annotated[int | None, typer.Option(help="Seed of weights, data order and dropout.")]
Name = Annotated[str | None, typer.Option(help="Of the job, and of its run. Default: as MODEL-STRATEGY.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write it here. Default: to the screen.")]

MOST_NODES = 4096
Nodes = Annotated[int, typer.Option(max=MOST_NODES, help="Machines.", rich_help_panel=JOB)]
WorkersPerNode = Annotated[
    int | None, typer.Option(help="Workers on each. Default: one for each GPU, or one.", rich_help_panel=JOB)
]
Gpus = Annotated[int, typer.Option(help="GPUs of each machine; a worker computes on one.", rich_help_panel=JOB)]
Cpus = Annotated[int | None, typer.Option(help="Processor cores for each worker.", rich_help_panel=JOB)]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory of each machine, such as 16GB.", rich_help_panel=JOB)
]
Time = Annotated[
    str | None,
    typer.Option(metavar="LIMIT", help="Longest time: 30 (minutes), 1:30:00, 2-12:00:00 (days).", rich_help_panel=JOB),
]


def deliver(text: str, out: Path | None, *, private: bool = False) -> None:
    """To a file, or to the screen."""
    if out is None:
        typer.echo(text, nl=False)
        return
    from smolcluster.launch.batch.submit import write

    write(text, out, private=private)
    note(f"written: {out}")


def note(text: str) -> None:
    """For the person, not for the pipe."""
    typer.echo(text, err=True)
