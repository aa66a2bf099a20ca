"""`smolcluster down`: end a run on many machines."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from smolcluster.cli import options
from smolcluster.cli.screen import print_note

if TYPE_CHECKING:
    from smolcluster.launch.cluster.layout import ClusterRecord

EXAMPLES = """Examples:
smolcluster down
smolcluster down cluster.yaml --now
"""


def down(
    cluster: options.Cluster = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait until the run is saved.")] = False,
) -> int:
    from smolcluster.launch.cluster.request import known_cluster

    known = known_cluster(cluster)
    return asyncio.run(_down(known, now=now))


async def _down(known: ClusterRecord, *, now: bool) -> int:
    from smolcluster.launch.cluster import control

    async with control.connected(known.machines) as (hosts, problems):
        running: dict[str, str] = {}
        with contextlib.suppress(control.ClusterError):  # stop the others even if one fails
            states = await control.states(known, hosts)
            running = {name: state["host"] for name, state in states.items() if state["alive"]}
        stopped = await control.down(known, hosts, now=now, report=print_note)
    for name, processes in stopped.items():
        # Workers that ended with their server are not in `processes`.
        ended = sorted({*processes, *(process for process, host in running.items() if host == name)})
        print_note(name, f"ended {', '.join(ended)}" if ended else "nothing was running")
    if problems:
        raise control.ClusterError(
            problems.values(), also="processes on these machines keep running; try again when they are reachable"
        )
    return 0
