"""`smolcluster train`: train a model, here or as one rank of a larger job."""

from __future__ import annotations

from typing import Annotated

import typer

from smolcluster.cli import options
from smolcluster.errors import UserError

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
_elastic = options.panel("Going on when workers die (mesh plane)")


@options.grouped
def train(
    run: options.Run,
    workers: Annotated[int | None, typer.Option(help="Worker processes on this machine.")] = None,
    run_dir: options.RunDir = None,
    resume: options.Resume = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="STEPS", help="Profile these steps, such as 10 or 10:13, on training.profile_ranks."),
    ] = None,
    draw_schedule: Annotated[
        bool, typer.Option("--draw-schedule", help="Of a pipeline: write schedule.svg, who computed what when.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the plan; train nothing, write nothing.")
    ] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show the run as a live page, on a port of this machine.")
    ] = False,
    elastic: Annotated[
        str | None,
        _elastic(
            metavar="MIN:MAX",
            help="Start workers that die again, from the last checkpoint, with as many as there are: MIN to MAX in all.",
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        _elastic(
            metavar="HOST:PORT",
            help="For several machines: the same command on each, with the address of one of them, which leads.",
        ),
    ] = None,
    max_restarts: Annotated[
        int | None, _elastic(help="Deaths of workers that a run may go on after. Default: 10.")
    ] = None,
    world_size: Annotated[int | None, _rank(help="Ranks in the job. Without --rank: as --workers.")] = None,
    rank: Annotated[int | None, _rank(help="This process's rank.")] = None,
    master_addr: Annotated[str | None, _rank(help="Address of rank 0. Default: MASTER_ADDR, or 127.0.0.1.")] = None,
    master_port: Annotated[
        int | None, _rank(min=1, max=65535, help="Port of rank 0. Default: MASTER_PORT, or 29500.")
    ] = None,
    no_nccl: Annotated[bool, _rank("--no-nccl", help="The same as --backend gloo.")] = False,
    *,
    flags: options.TrainingFlags,
) -> int:
    from smolcluster.engine.run_dir import RunDir
    from smolcluster.launch.environment import assigned_place
    from smolcluster.launch.prepare import prepare
    from smolcluster.launch.restart.meeting import is_here
    from smolcluster.launch.restart.plan import check_restartable, elastic_wish

    if no_nccl and run.backend == "nccl":
        raise UserError("--backend nccl and --no-nccl contradict each other")
    backend = run.backend or ("gloo" if no_nccl else None)
    place = assigned_place(
        world_size=world_size, rank=rank, master_addr=master_addr, master_port=master_port, srun=elastic is None
    )
    ranks = place.world_size if place is not None else world_size
    if ranks is not None and workers not in (None, ranks):
        raise UserError(f"--workers {workers} and --world-size {ranks} contradict each other; give one of them")
    workers = workers if ranks is None else ranks
    again = elastic_wish(elastic, workers=workers, endpoint=rdzv_endpoint, max_restarts=max_restarts, by_hand=place)
    workers = again.most if again is not None else workers
    sets = flags.sets() | {
        "strategy.name": run.strategy,
        "cluster.num_workers": workers,
        "cluster.plane": run.plane,
        "training.steps": run.steps,
        "training.seed": run.seed,
        "training.profile": profile,
        "strategy.draw_schedule": draw_schedule or None,
    }
    started_again = place is not None and place.restarts > 0
    if started_again and run_dir is not None and RunDir(run_dir).has_checkpoints():
        resume = "latest"
    prepared = prepare(
        run.sources or [],
        overrides=run.override or [],
        sets=sets,
        run_dir=run_dir,
        resume=resume,
        backend=backend,
        again=started_again,
        lead=is_here(again.endpoint) if again is not None else place is None or place.rank == 0,
    )
    if again is not None:
        check_restartable(prepared.config, prepared.plane)
    if dry_run:
        from smolcluster.planner.dry_run import describe_run
        from smolcluster.planner.world_sizes import describe

        typer.echo(
            describe_run(
                prepared.config,
                workers=prepared.workers,
                run_dir=prepared.run_dir,
                backend=backend,
                plane=prepared.plane,
            )
        )
        if again is not None:
            typer.echo(describe(prepared.config, range(again.fewest, again.most + 1)))
        return 0

    if dashboard and (place is None or place.rank == 0):
        from smolcluster.dashboard.server import start_in_background

        folder = prepared.run_dir.path.resolve().parent
        typer.echo(f"dashboard  {start_in_background(folder, prepared.run_dir.path)}")

    from smolcluster.observe.console import ConsoleSink
    from smolcluster.observe.observer import OnlyNotices
    from smolcluster.observe.summary import EndReport

    if place is not None:
        if prepared.plane == "elastic":
            raise UserError(
                f"strategy {prepared.config.strategy.name} has no ranks that start together: "
                "start its server with `smolcluster server`, and `smolcluster worker RANK HOSTNAME` on every machine"
            )
        from smolcluster.cli.ending import leave_after, tell
        from smolcluster.launch.environment import run_assigned

        leave_after(
            lambda: run_assigned(
                prepared,
                place,
                # Its own rows are all it sees: the header says whose they are.
                sinks=[ConsoleSink(alone=place.world_size > 1), EndReport()]
                if place.rank == 0
                else [OnlyNotices(ConsoleSink())],
                tell=tell,
            )
        )
    from smolcluster.launch.api import run_here

    run_here(prepared, sinks=[ConsoleSink(), EndReport()], elastic=again)
    return 0
