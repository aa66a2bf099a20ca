"""`smolcluster dashboard`: the live page of a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from smolcluster.cli import options
from smolcluster.errors import UserError

EXAMPLES = """Examples:
smolcluster dashboard
smolcluster dashboard runs/my-run --port 8300
smolcluster dashboard --cluster cluster.yaml
smolcluster dashboard --bind 0.0.0.0 --allow-host mini.local
"""


def dashboard(
    run_dir: options.Watched = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The run of a cluster that `up` started, with the logs of all machines; its name or its file.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the page. Default: 8265, or the next free one; 0: any."),
    ] = None,
    bind: Annotated[
        str, typer.Option(help="Address to listen on. Beyond this machine a token is needed, and made.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            envvar="SMOLCLUSTER_DASHBOARD_TOKEN",
            show_envvar=True,
            help="What viewers must have; 16 characters or more. Not the token of the cluster.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A further name that this machine is opened by.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser, on a terminal.")
    ] = True,
) -> int:
    from smolcluster.comm.addresses import is_loopback
    from smolcluster.dashboard.server import DashboardConfig, lower_priority, serve
    from smolcluster.web.server import open_browser

    def ready(url: str) -> None:
        typer.echo(f"dashboard  {url}")
        if not is_loopback(bind):
            typer.echo("this page is not encrypted: use it in a network you trust, or through ssh -L", err=True)
        if run is not None and not (folder / run).exists():
            typer.echo(f"{folder / run} does not exist yet; the page waits for it", err=True)
        typer.echo("Ctrl-C stops the dashboard; the run continues")
        if browser and sys.stdout.isatty():
            open_browser(url)

    with watched(run_dir, cluster) as (folder, run):
        config = DashboardConfig(
            folder=folder, run=run, bind=bind, port=port, token=token, allow_hosts=tuple(allow_host or ())
        )
        lower_priority()
        with contextlib.suppress(KeyboardInterrupt):  # how it is meant to end
            serve(config, ready=ready)
    return 0


@contextlib.contextmanager
def watched(run_dir: Path | None, cluster: str | None) -> Iterator[tuple[Path, str | None]]:
    """Yield the folder and the name of the run to show. The run of a cluster is mirrored meanwhile."""
    from smolcluster.dashboard.server import choose
    from smolcluster.engine.run_dir import RUNS

    if cluster is None:
        yield choose(run_dir, RUNS)
        return
    from smolcluster.launch.cluster.mirror import mirrored
    from smolcluster.launch.cluster.request import known_cluster

    if run_dir is not None:
        raise UserError(f"{run_dir} and --cluster {cluster} are two runs; give one of them")
    known = known_cluster(cluster)
    typer.echo(f"{known.name}: reading {known.run} from {', '.join(dict.fromkeys(known.hosts.values()))}")
    with mirrored(known) as mirror:
        yield choose(mirror, RUNS)
