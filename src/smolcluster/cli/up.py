"""`smolcluster up`: a run on many machines, from one file."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smolcluster.cli import options
from smolcluster.cli.screen import advised, outcome, print_line, print_note, print_text
from smolcluster.errors import UserError

if TYPE_CHECKING:
    from smolcluster.launch.cluster.control import Deployment
    from smolcluster.launch.cluster.layout import ClusterRecord
    from smolcluster.launch.cluster.request import UpArguments

EXAMPLES = """Examples:
smolcluster up cluster.yaml
smolcluster up cluster.yaml my_task.py:MyTask --override training.steps=1000 --detach
smolcluster up --local gpt --strategy edp --workers 3
smolcluster up --resume
Then: smolcluster status, smolcluster logs -f, smolcluster down
"""

_RUNNING: list[str] = []  # clusters that this process has started


def up(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CLUSTER.yaml [CONFIG...]",
            help="The cluster file; then what to train, instead of its run.train. With --local: only what to train.",
        ),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="On this machine alone, one tmux pane for each process.")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="With --local: how many. Default: 2.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="See `smolcluster strategies`. Default: from the cluster file.")
    ] = None,
    steps: options.Steps = None,
    override: options.Override = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Start and return; do not show what is printed.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume the run that was stopped last, with its arguments."),
    ] = False,
    accept_new: options.AcceptNew = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print which process would run where; contact no machine.")
    ] = False,
) -> int:
    from smolcluster.launch.cluster.layout import describe, plan_layout
    from smolcluster.launch.cluster.request import UpArguments, new_run, plan_deployment

    train = list(sources or [])
    arguments = UpArguments(
        file=train.pop(0) if not local and train and train[0].endswith((".yaml", ".yml")) else None,
        folder=str(Path.cwd()),
        train=train,
        overrides=override or [],
        strategy=strategy,
        steps=steps,
        workers=workers,
    )
    arguments = _checked(arguments, local=local, resume=resume)
    request = arguments.read()
    before = _before(request.name)
    run = before.run if before is not None and resume else None
    if resume and run is None:
        raise UserError(f"--resume: no run of {request.name} was started from this machine")
    if dry_run:
        for line in describe(plan_layout(request.config, name=request.name, run=run or new_run(request.config))):
            print_text(line)
        return 0
    deployment = plan_deployment(request, run=run, resume=resume, panes=arguments.file is None)
    try:
        return asyncio.run(_up(deployment, arguments, before, accept_new=accept_new, detach=detach))
    except KeyboardInterrupt:
        on = f"{request.name} keeps running; watch it with `smolcluster logs -f`, end it with `smolcluster down`"
        typer.echo(f"\n{on}" if _RUNNING else "\ninterrupted; processes started by this command were stopped", err=True)
        return 130


def _checked(arguments: UpArguments, *, local: bool, resume: bool) -> UpArguments:
    """Check the combination of arguments. To resume, override those that started the run with these."""
    if not local and not resume and arguments.file is None:
        raise UserError("give a cluster file (`smolcluster cluster init` writes one), or use --local")
    if arguments.workers is not None and arguments.file is not None:
        raise UserError(f"--workers is for --local; in {arguments.file} set hosts.NAME.workers")
    return _resumed(arguments, local=local) if resume else arguments


def _resumed(arguments: UpArguments, *, local: bool) -> UpArguments:
    from smolcluster.launch.cluster.request import UpArguments

    if arguments.file is None and not local:
        before = UpArguments.recorded(None)
    else:
        with contextlib.suppress(UserError):  # that there is no run is reported later, with the cluster's name
            before = UpArguments.recorded(arguments.read().name)
            return arguments if before is None else arguments.merged_over(before)
        return arguments
    if before is None:
        raise UserError("--resume: give the cluster file, or --local; this one was brought up by an older version")
    return arguments.merged_over(before)


def _before(name: str) -> ClusterRecord | None:
    """Return the recorded cluster of this name, if there is one."""
    from smolcluster.launch.cluster.request import known_cluster

    try:
        return known_cluster(name)
    except UserError:
        return None


async def _up(
    deployment: Deployment, arguments: UpArguments, before: ClusterRecord | None, *, accept_new: bool, detach: bool
) -> int:
    from smolcluster.launch.cluster import control
    from smolcluster.launch.cluster.layout import SERVING, as_record, from_record, with_run
    from smolcluster.launch.cluster.record import read_raw, restore_record, save_record

    layout = deployment.layout
    print_note(
        "",
        f"{layout.name}: {len(layout.processes)} processes on {len(layout.machines)} machine(s), {layout.plane} plane",
    )
    async with control.connected(layout.machines, accept_new=accept_new) as (hosts, problems):
        if problems:
            raise control.ClusterError(problems.values(), also="nothing was changed on any machine")
        running = await control.states(layout, hosts)
        alive = sorted(name for name, state in running.items() if state["alive"])
        if alive and before is not None and before.run != layout.run:
            layout = with_run(layout, before.run)  # new processes join the run of those that are alive
            deployment = dataclasses.replace(deployment, layout=layout)
        former = read_raw(layout.name)
        try:
            record = {**as_record(layout), "said": arguments.record()}
            begun = await control.up(deployment, hosts, report=print_note, on_begin=lambda: save_record(record))
        except BaseException:  # `control.up` has rolled back
            with contextlib.suppress(OSError):
                restore_record(layout.name, former)
            raise
        _RUNNING.append(layout.name)
    started = sum(map(len, begun.values()))
    if alive:
        print_note("", f"already running: {', '.join(alive)}" + ("" if started else "; nothing was started"))
    for name, processes in begun.items():
        if processes:
            print_note(name, f"started {', '.join(processes)}")
    if detach:
        print_note("", "watch it with `smolcluster logs -f`, end it with `smolcluster down`")
        page = "the address of its page: `smolcluster logs front`"
        if layout.plane != SERVING:
            page = f"a page with its curves: smolcluster dashboard --cluster {layout.name}"
        print_note("", page)
        return 0
    recorded = from_record(as_record(layout))
    await control.follow(
        recorded,
        chosen=[name for name in layout.machines if layout.on(name)],
        processes=list(recorded.hosts),
        past=1000,
        on=True,
        show=print_line,
        report=print_note,
    )
    return await _result(recorded)


async def _result(recorded: ClusterRecord) -> int:
    """Print how the run ended. Return the lead's exit status."""
    from smolcluster.launch.cluster import control

    async with control.connected(recorded.machines) as (hosts, _):
        states = await control.states(recorded, hosts)
        found = await control.progress(recorded, hosts)
    lead = states.get(recorded.lead, {})
    summary = found.get("summary")
    if summary is not None:
        print_note("", outcome(summary))
        print_note("", f"run directory: {recorded.run_place}")
    status = lead.get("status")
    if status not in (0, None):
        print_text(
            f"smolcluster: {recorded.lead} ended with status {status}: {advised(str(lead.get('last', '')))}", err=True
        )
    return int(status or 0)
