"""`smolcluster train`: train a model, here or as one rank of a larger job."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from smolcluster.cli import options
from smolcluster.errors import UserError

if TYPE_CHECKING:
    from smolcluster.launch.environment import AssignedRank
    from smolcluster.launch.prepare import Prepared
    from smolcluster.launch.restart.plan import ElasticRange

EXAMPLES = """Examples:
smolcluster train
smolcluster train gpt --workers 4 --override training.batch_size=16 model.num_layers=4
smolcluster train mnist --override data.root=path/to/mnist
smolcluster train my_task.py:MyTask --workers 2
smolcluster train gpt --strategy edp --workers 3
smolcluster train gpt --strategy fsdp --workers 4 --elastic 2:4
smolcluster train --resume latest
"""
_rank = options.panel("One rank of a job that others start")
_restarts = options.panel("Restarts when workers die (mesh plane)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartFlags:
    """Whether and how often a run restarts when workers die."""

    elastic: Annotated[
        str | None,
        _restarts(
            metavar="MIN:MAX",
            help="When workers die or join, restart from the last checkpoint with MIN to MAX workers.",
        ),
    ] = None
    rdzv_endpoint: Annotated[
        str | None,
        _restarts(
            metavar="HOST:PORT",
            help="For several machines: the same command on each, with the address of one of them, which leads.",
        ),
    ] = None
    max_restarts: Annotated[int | None, _restarts(help="Restarts before the run fails. Default: 10.")] = None

    def elastic_range(self, workers: int | None, place: AssignedRank | None) -> ElasticRange | None:
        """Return the requested world sizes; None without --elastic: the run ends when a worker dies."""
        from smolcluster.launch.restart.plan import elastic_from_flags

        endpoint, most = self.rdzv_endpoint, self.max_restarts
        return elastic_from_flags(self.elastic, workers=workers, endpoint=endpoint, max_restarts=most, started_by=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFlags:
    """This process's rank in a job that others start."""

    world_size: Annotated[int | None, _rank(help="Ranks in the job. Without --rank: as --workers.")] = None
    rank: Annotated[int | None, _rank(help="This process's rank.")] = None
    master_addr: Annotated[str | None, _rank(help="Address of rank 0. Default: MASTER_ADDR, or 127.0.0.1.")] = None
    master_port: Annotated[
        int | None, _rank(min=1, max=65535, help="Port of rank 0. Default: MASTER_PORT, or 29500.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(options.RunOptions):
    """What to train, on this machine's workers, and what to show of it."""

    workers: Annotated[int | None, typer.Option(help="Worker processes on this machine.")] = None
    run_dir: options.RunDir = None
    resume: options.Resume = None
    profile: Annotated[
        str | None,
        typer.Option(metavar="STEPS", help="Profile these steps, such as 10 or 10:13, on training.profile_ranks."),
    ] = None
    draw_schedule: Annotated[
        bool, typer.Option("--draw-schedule", help="Of a pipeline: write schedule.svg, who computed what when.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the plan; train nothing, write nothing.")
    ] = False
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show the run as a live page, on a port of this machine.")
    ] = False


@options.grouped
def train(
    run: TrainOptions,
    no_nccl: Annotated[bool, _rank("--no-nccl", help="The same as --backend gloo.")] = False,
    *,
    restarts: RestartFlags,
    ranks: RankFlags,
    flags: options.TrainingFlags,
) -> int:
    from smolcluster.engine.run_dir import RunDir
    from smolcluster.launch.environment import assigned_rank
    from smolcluster.launch.prepare import prepare
    from smolcluster.launch.restart.endpoint import is_local_endpoint
    from smolcluster.launch.restart.plan import check_restartable

    if no_nccl and run.backend == "nccl":
        raise UserError("--backend nccl and --no-nccl contradict each other")
    place = assigned_rank(**asdict(ranks), srun=restarts.elastic is None)
    size = place.world_size if place is not None else ranks.world_size
    if size is not None and run.workers not in (None, size):
        raise UserError(f"--workers {run.workers} and --world-size {size} contradict each other; give one of them")
    workers = run.workers if size is None else size
    elastic = restarts.elastic_range(workers, place)
    workers = elastic.max_workers if elastic is not None else workers
    own = run.overrides(workers=workers, steps=run.steps, profile=run.profile, draw_schedule=run.draw_schedule)
    started_again = place is not None and place.restarts > 0
    saved = started_again and run.run_dir is not None and RunDir(run.run_dir).has_checkpoints()
    prepared = prepare(
        run.sources or [],
        overrides=[*own, *flags.overrides().items()],
        run_dir=run.run_dir,
        resume="latest" if saved else run.resume,
        backend=run.backend or ("gloo" if no_nccl else None),
        again=started_again,
        lead=is_local_endpoint(elastic.endpoint) if elastic is not None else place is None or place.rank == 0,
    )
    if elastic is not None:
        check_restartable(prepared.config, prepared.plane)
    if run.dry_run:
        return _describe(prepared, elastic)
    return _run(prepared, place, elastic, dashboard=run.dashboard)


def _describe(prepared: Prepared, elastic: ElasticRange | None) -> int:
    from smolcluster.planner.dry_run import describe_run
    from smolcluster.planner.world_sizes import describe

    config, workers, plane = prepared.config, prepared.workers, prepared.plane
    typer.echo(describe_run(config, workers=workers, run_dir=prepared.run_dir, backend=prepared.backend, plane=plane))
    if elastic is not None:
        typer.echo(describe(config, range(elastic.min_workers, elastic.max_workers + 1)))
    return 0


def _run(prepared: Prepared, place: AssignedRank | None, elastic: ElasticRange | None, *, dashboard: bool) -> int:
    if dashboard and (place is None or place.rank == 0):
        from smolcluster.dashboard.server import start_in_background

        folder = prepared.run_dir.path.resolve().parent
        typer.echo(f"dashboard  {start_in_background(folder, prepared.run_dir.path)}")
    if place is not None:
        _be_rank(prepared, place)
    from smolcluster.launch.api import run_here

    run_here(prepared, elastic=elastic)
    return 0


def _be_rank(prepared: Prepared, place: AssignedRank) -> NoReturn:
    """Run one rank of a job in this process."""
    if prepared.plane == "elastic":
        raise UserError(
            f"strategy {prepared.config.strategy.name} runs on the elastic plane, without fixed ranks: "
            "start its server with `smolcluster server`, and `smolcluster worker RANK HOSTNAME` on every machine"
        )
    from smolcluster.cli.ending import leave_after, tell
    from smolcluster.launch.environment import run_rank
    from smolcluster.observe.console import ConsoleSink
    from smolcluster.observe.observer import NoticesOnly, Sink
    from smolcluster.observe.summary import SummarySink

    sinks: list[Sink] = [NoticesOnly(ConsoleSink())]
    if place.rank == 0:
        sinks = [ConsoleSink(alone=place.world_size > 1), SummarySink()]  # only rank 0's rows are shown
    leave_after(lambda: run_rank(prepared, place, sinks=sinks, tell=tell))
