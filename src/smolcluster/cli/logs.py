"""`smolcluster logs`: what the processes of a cluster print."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

EXAMPLES = """Examples:

smolcluster logs -f

smolcluster logs pi5 --lines 100

smolcluster logs server --cluster cluster.yaml
"""


def logs(
    node: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="A host or a process, such as pi5 or worker-1. Default: all.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until all have ended; Ctrl-C ends it.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="So many of the last lines of each.")] = 20,
    cluster: Annotated[
        str | None, typer.Option(help="Name or file of the cluster. Default: the one that was started last.")
    ] = None,
) -> int:
    """Show what processes print, wherever they run."""
    from smolcluster.cli.screen import print_line, print_note
    from smolcluster.errors import unknown_name
    from smolcluster.launch.cluster import control
    from smolcluster.launch.cluster.read import known_cluster

    known = known_cluster(cluster)
    seats = None
    chosen = list(dict.fromkeys(known.hosts.values()))
    if node is not None:
        if node not in known.hosts and node not in known.machines:
            raise unknown_name("node", node, [*known.machines, *known.hosts])
        seats = [node] if node in known.hosts else None
        chosen = [known.hosts.get(node, node)]
    wish = control.follow(
        known, known.machines, chosen=chosen, seats=seats, past=lines, on=follow, show=print_line, told=print_note
    )
    try:
        asyncio.run(wish)
    except KeyboardInterrupt:
        return 130
    return 0
