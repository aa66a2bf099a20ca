"""`smolcluster logs`: what the processes of a cluster print."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smolcluster.cli.screen import print_line, print_note, print_text
from smolcluster.errors import UserError, unknown_name

if TYPE_CHECKING:
    from smolcluster.launch.cluster.host import HostError
    from smolcluster.launch.cluster.layout import ClusterRecord

EXAMPLES = """Examples:
smolcluster logs -f
smolcluster logs pi5 --lines 100
smolcluster logs server --cluster cluster.yaml
smolcluster logs up
smolcluster logs push runs/demo --url http://127.0.0.1:3100
"""


def logs(
    node: Annotated[
        str | None,
        typer.Argument(
            metavar="[NODE|up|down|push]",
            help="A host or a process, such as pi5 or worker-1. Default: all. up, down: Grafana and Loki on this machine, by "
            "Docker. push: what a run directory has not sent to Loki yet.",
        ),
    ] = None,
    run_dir: Annotated[Path | None, typer.Argument(metavar="[RUN_DIR]", help="With push: the run.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until all have ended; Ctrl-C ends it.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines of each.")] = 20,
    cluster: Annotated[
        str | None, typer.Option(help="Name or file of the cluster. Default: the one that was started last.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="With push: the Loki server. Default: the run's logging.loki_url.")
    ] = None,
) -> int:
    if node in ("up", "down"):
        from smolcluster.launch import logstack

        logstack.start(tell=typer.echo) if node == "up" else logstack.stop()
        return 0
    if node == "push":
        return _push(run_dir, url)
    from smolcluster.launch.cluster.request import known_cluster

    known = known_cluster(cluster)
    processes = list(known.hosts)  # an earlier run may have left others
    chosen = list(dict.fromkeys(known.hosts.values()))
    if node is not None:
        if node not in known.hosts and node not in known.machines:
            raise unknown_name("node", node, [*known.machines, *known.hosts])
        processes = [node] if node in known.hosts else processes
        chosen = [known.hosts.get(node, node)]
    try:
        missing = asyncio.run(_show(known, chosen, processes=processes, past=lines, on=follow))
    except KeyboardInterrupt:
        return 130
    for problem in missing:
        print_text(f"smolcluster: {problem}", err=True)
    return 1 if missing else 0


async def _show(
    known: ClusterRecord, chosen: list[str], *, processes: list[str], past: int, on: bool
) -> list[HostError]:
    """Print the output of processes. Return the errors of machines that cannot be reached."""
    from smolcluster.launch.cluster import control

    follow = functools.partial(
        control.follow, known, processes=processes, past=past, on=on, show=print_line, report=print_note
    )
    _, problems = await control.gathered({host: follow(chosen=[host]) for host in chosen})
    return list(problems.values())


def _push(run_dir: Path | None, url: str | None) -> int:
    """Push log lines that have not reached Loki."""
    from smolcluster.config import load_config
    from smolcluster.observe.loki import push_unsent

    if run_dir is None or not run_dir.is_dir():
        raise UserError("smolcluster logs push needs a run directory, such as runs/demo")
    if url is None and (run_dir / "config.yaml").is_file():
        url = load_config([str(run_dir / "config.yaml")]).logging.loki_url
    if url is None:
        raise UserError(f"{run_dir} names no Loki server; give --url http://HOST:3100")
    rest = push_unsent(run_dir, url, timeout_s=300)
    typer.echo(f"{rest.lines} lines sent" + (f", {rest.refused} refused" if rest.refused else ""))
    if rest.unsent:
        raise UserError(f"not all was sent: {rest.reason}; try again later")
    return 0
