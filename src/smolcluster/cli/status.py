"""`smolcluster status`: what runs where."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smolcluster.cli import options
from smolcluster.cli.screen import advised, outcome, print_text
from smolcluster.observe.events import plain
from smolcluster.observe.text import clock, number

if TYPE_CHECKING:
    from smolcluster.launch.cluster.layout import ClusterRecord

EXAMPLES = """Examples:
smolcluster status
smolcluster status cluster.yaml --json
"""


def status(
    cluster: options.Cluster = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    from smolcluster.launch.cluster.request import known_cluster

    known = known_cluster(cluster)
    found = asyncio.run(_status(known))
    if as_json:
        typer.echo(json.dumps(plain(found), indent=1, allow_nan=False))
    else:
        for line in table(found):
            print_text(line)
    bad = found["unreachable"] or any(state["state"] in ("failed", "gone") for state in found["processes"].values())
    return 1 if bad else 0


async def _status(known: ClusterRecord) -> dict[str, Any]:
    from smolcluster.launch.cluster import control

    async with control.connected(known.machines) as (hosts, problems):
        states = await control.states(known, hosts)
        progress = await control.progress(known, hosts) if known.hosts[known.lead] not in problems else {}
    missing = {name: {"state": "not started", "host": host} for name, host in known.hosts.items() if name not in states}
    unreachable = {name: str(error) for name, error in problems.items()}
    processes = {
        name: ({"state": "unreachable", "host": known.hosts[name]} if known.hosts[name] in problems else state)
        for name, state in (states | missing).items()
        if name in known.hosts
    }
    found = {"name": known.name, "run": known.run, "run_directory": known.run_place, "processes": processes}
    return {**found, "unreachable": unreachable, **progress}


def table(found: dict[str, Any]) -> list[str]:
    """Return the lines of the table that the user reads."""
    rows = [["process", "host", "state", "since", "restarts", "last line"]]
    for name, state in found["processes"].items():
        running, started = state["state"] == "running", state.get("started")
        since = clock(max(0.0, time.time() - started)) if running and started is not None else ""
        code = f" ({state['status']})" if state.get("status") not in (None, 0) else ""
        restarts = str(state["restarts"]) if state.get("restarts") else ""
        rows.append(
            [name, state["host"], state["state"] + code, since, restarts, _short(advised(state.get("last", "")))]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = [f"{found['name']}, run {found['run']}", f"run directory: {found['run_directory']}"]
    if "front" in found["processes"]:  # a model is served: there is no run
        lines = [found["name"]]
    lines += [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
    alive = any(state.get("alive") for state in found["processes"].values())
    row, summary = found.get("row"), found.get("summary")
    if summary is not None and not alive:  # else it is of the time before `--resume`
        lines.append(outcome(summary))
    elif row is not None:
        lines.append(", ".join(_progress(row)))
    lines += [f"not reached: {problem}" for problem in found["unreachable"].values()]
    return lines


def _progress(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values of the last row: the server's for all workers, or one rank's."""
    yield f"step {row['step']}"
    if row.get("loss") is not None:
        yield f"loss {number(row['loss'])}"
    if row.get("tokens_per_s"):  # not every task has tokens
        yield f"{row['tokens_per_s']:.0f} tokens/s" + ("" if row.get("role") == "server" else f" of rank {row['rank']}")


def _short(line: str, most: int = 80) -> str:
    return line if len(line) <= most else line[: most - 3] + "..."
