"""`smolcluster server`: the server of a run whose workers join from anywhere."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from smolcluster.cli import options

EXAMPLES = """Examples:
smolcluster server gpt --strategy edp --workers 3
smolcluster server cluster_config_syncps.yaml gpt --bind 192.168.1.10
On another machine: smolcluster worker 1 pi5 --server 192.168.1.10:65432
"""


def server(
    sources: options.Sources = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="One of the elastic plane; see `smolcluster strategies`. Default: from CONFIG."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers to wait for before the first step.")] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on. Default: cluster.bind, else from host_ip, else 127.0.0.1. "
            "Beyond this machine a token is needed."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0: any. Default: cluster.port, 65432.")
    ] = None,
    run_dir: options.RunDir = None,
    steps: options.Steps = None,
    seed: options.Seed = None,
    override: options.Override = None,
    resume: options.Resume = None,
) -> int:
    from smolcluster.config import flag_overrides
    from smolcluster.launch.local.elastic import run_elastic
    from smolcluster.launch.prepare import prepare

    flags = flag_overrides(
        strategy=strategy, workers=workers, plane="elastic", bind=bind, port=port, steps=steps, seed=seed
    )
    prepared = prepare(sources or [], overrides=[*(override or []), *flags.items()], run_dir=run_dir, resume=resume)
    cluster = prepared.config.cluster
    if cluster.server in cluster.host_ip and "bind" not in cluster.model_fields_set:
        addresses = set(cluster.host_ip.values())  # where the hosts find this server
        cluster.bind = addresses.pop() if len(addresses) == 1 else "0.0.0.0"
    from smolcluster.observe.console import ConsoleSink
    from smolcluster.observe.summary import SummarySink

    alone = dataclasses.replace(prepared, workers=0)  # all of them come from elsewhere
    run_elastic(alone, port=cluster.port, sinks=[ConsoleSink(), SummarySink()], command="server")
    return 0
