"""`smolcluster plan`: what a run needs, before it starts."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated, Any

import typer

from smolcluster.cli import options
from smolcluster.errors import UserError

EXAMPLES = """Examples:
smolcluster plan --memory
smolcluster plan --memory gpt2-small --nodes 4 --limit 16GB
smolcluster plan --memory gpt --nodes 2 --strategy fsdp --strategy pipeline --batch-size 8
smolcluster plan --memory my_task.py:MyTask --nodes 4 --json
"""


@options.grouped
def plan(
    sources: options.Sources = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Bytes of each rank, for every strategy that could run.")
    ] = False,
    strategy: Annotated[
        list[str] | None, typer.Option(help="Only these; may be given several times. Default: all.")
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="N|NAME,NAME...", help="Ranks, or the names of their machines. Default: as configured."),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for each rank, such as 16GB. Default: what this machine has."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    override: options.Override = None,
    *,
    flags: options.ModelFlags,
) -> int:
    from smolcluster.launch.prepare import prepare

    if not memory:
        raise UserError("nothing to plan: `smolcluster plan --memory` shows the bytes of each rank for every strategy")
    prepared = prepare(sources or [], overrides=[*(override or []), *flags.overrides().items(), *_nodes(nodes).items()])
    from smolcluster.planner.report import plan_memory

    found = plan_memory(
        prepared.config,
        ranks=prepared.workers,
        plane=prepared.plane,
        only=strategy or [],
        limit=limit,
        on_progress=_progress(),
    )
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return 0
    from smolcluster.planner.memory_table import show_memory

    show_memory(found)
    return 0


def _nodes(text: str | None) -> dict[str, Any]:
    """Read `4`, or `mini1,pi5`."""
    if text is None:
        return {}
    if re.fullmatch(r"\s*-?[0-9]+\s*", text):
        if int(text) < 1:
            raise UserError(f"--nodes {text}: at least one rank is needed")
        return {"cluster.num_workers": int(text)}
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"--nodes '{text}': give a number, or names with commas between them, each once")
    return {"cluster.workers": names, "cluster.num_workers": len(names)}


def _progress() -> Any:
    """Return a function that shows the progress on one line; None where no terminal shows it."""
    if not sys.stderr.isatty():
        return None

    def show(label: str, done: int, of: int) -> None:
        end = "\r" if done < of else "\r\x1b[K"
        print(f"\r\x1b[Kestimated {done} of {of}: {label}", end=end, file=sys.stderr, flush=True)

    return show
