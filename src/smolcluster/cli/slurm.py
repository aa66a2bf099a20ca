"""`smolcluster slurm`: a job file for Slurm, and its submission."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from smolcluster.cli import batch, options

EXAMPLES = """Examples:
smolcluster slurm gpt --strategy fsdp --nodes 4 --gpus 8 --time 12:00:00 --partition gpu --out job.sbatch
smolcluster slurm gpt --strategy edp --nodes 2 --workers-per-node 4 --cpus 2 --submit
smolcluster slurm my_task.py:MyTask --nodes 2 --setup 'module load cuda' --submit
"""
_slurm = options.panel("Slurm")
_as_sbatch = _slurm(help="As sbatch's.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """The fields of `smolcluster.launch.batch.slurm.SlurmSettings` that are options as they are."""

    partition: Annotated[str | None, _as_sbatch] = None
    account: Annotated[str | None, _as_sbatch] = None
    qos: Annotated[str | None, _as_sbatch] = None
    constraint: Annotated[str | None, _as_sbatch] = None
    python: Annotated[
        str, _slurm(help="Python on the nodes that has smolcluster. Default: this one.", show_default=False)
    ] = sys.executable
    requeue: Annotated[bool, _slurm(help="Queue the job again at its time limit.")] = True


@options.grouped
def slurm(
    run: batch.ClusterJobOptions,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is written; all nodes must see it. Default: runs/<name>.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the run directory.")] = False,
    out: batch.Out = None,
    submit: batch.Submit = False,
    sbatch: Annotated[
        list[str] | None, _slurm(metavar="OPTION", help="Another option, as --sbatch=--exclusive.")
    ] = None,
    setup: Annotated[
        list[str] | None, _slurm(metavar="LINE", help="A line of shell to run first, as 'module load cuda'.")
    ] = None,
    grace: Annotated[int | None, _slurm(help="Seconds before the time limit when the run saves. Default: 120.")] = None,
    token_file: Annotated[
        Path | None,
        _slurm(help="Elastic plane: a token of yours, where all nodes see it. Default: one made for the job."),
    ] = None,
    shared: Annotated[
        list[Path] | None, _slurm(metavar="FOLDER", help="A folder below /tmp that all nodes share.")
    ] = None,
    *,
    wanted: SlurmOptions,
) -> int:
    from smolcluster.launch.batch import slurm as batch_slurm

    job = run.plan()
    settings = batch_slurm.SlurmSettings(
        run_dir=(run_dir or Path("runs", job.name)).absolute(),
        folder=Path.cwd(),
        options=tuple(sbatch or ()),
        setup=tuple(setup or ()),
        grace_s=grace,
        token_file=None if token_file is None else token_file.absolute(),
        shared=tuple(folder.absolute() for folder in shared or ()),
        **asdict(wanted),
    )
    batch_slurm.check(job, settings, resume=resume)
    text = batch_slurm.render(job, settings)
    if submit and out is None:
        out = Path(f"{job.name}.sbatch")
    batch.deliver(text, out)
    if submit:
        batch.submit_with(["sbatch", str(out)], where="submit it from a machine of the cluster")
        batch.note(f"its output: {job.name}-<job>.out; the run: {settings.run_dir}")
    return 0
