"""`smolcluster top`: a run in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smolcluster.cli import options
from smolcluster.errors import UserError

if TYPE_CHECKING:
    from smolcluster.dashboard.run_reader import RunReader

EXAMPLES = """Examples:
smolcluster top
smolcluster top runs/my-run
smolcluster top --cluster cluster.yaml
smolcluster top --once | less
"""


def top(
    run_dir: options.Watched = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="The run of a cluster that `up` started; its name or its file.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print what is known now, and end.")] = False,
) -> int:
    from smolcluster.cli.dashboard import watched

    with watched(run_dir, cluster) as (folder, run):
        return _show(folder, run, once=once or not sys.stdout.isatty())


def _show(folder: Path, run: str | None, *, once: bool) -> int:
    from rich.console import Console

    from smolcluster.dashboard.run_reader import RunReader
    from smolcluster.dashboard.runs import RunFolder
    from smolcluster.dashboard.terminal import print_once, watch

    def find() -> RunReader | None:
        name = run or RunFolder(folder).newest()
        path = folder / name if name else None
        return RunReader(path) if path is not None and path.is_dir() else None

    console = Console(highlight=False, markup=False, emoji=False)
    if once:
        reader = find()
        if reader is None:
            what = f"{folder / run} does not exist" if run else f"there is no run in {folder}"
            raise UserError(f"{what}; name a run directory, or start one with: smolcluster train")
        print_once(reader, console)
        return 0
    try:
        watch(find, console)
    except KeyboardInterrupt:
        pass  # how it is meant to end
    return 0
