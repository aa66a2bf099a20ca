"""`smolcluster worker`: one worker of a run that a server somewhere serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smolcluster.cli.options import OwnerOptions, grouped

EXAMPLES = """Examples:
smolcluster worker 1 pi5 --server 192.168.1.10:65432
smolcluster worker 2 macbook cluster_config_edp.yaml gpt
smolcluster worker 0 win --server mini1:65432 --device cuda --batch-size 64
smolcluster worker 1 pi5 my_task.py:MyTask --server mini1:65432 --data-root ~/photos
"""


@grouped
def worker(
    rank: Annotated[
        int,
        typer.Argument(metavar="RANK", min=0, help="This worker's rank, counted from 0 or from 1; each once."),
    ],
    hostname: Annotated[
        str, typer.Argument(metavar="HOSTNAME", help="This machine's name, as in `workers` of the cluster file.")
    ],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG",
            help="The server's configuration, to compare with it, or a task of your own as FILE.py:CLASS. Without any, what "
            "is trained comes from the server; files, addresses and code never do.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the server listens. Default: the one that CONFIG names."),
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="What the server must run; without: whatever it runs.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16. Default: the server's.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per step of this worker.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Write the log of this worker here. Default: no log.")] = None,
    *,
    own: OwnerOptions,
) -> int:
    from smolcluster.cli.ending import leave_after
    from smolcluster.launch.environment import local_rank_of
    from smolcluster.launch.join.worker import run_joined

    local_rank, local_world_size = local_rank_of()
    spec = own.spec(
        rank,
        hostname,
        server=server,
        sources=sources or [],
        strategy=strategy,
        batch_size=batch_size,
        precision=precision,
        local_rank=local_rank,
        local_world_size=local_world_size,
    )
    leave_after(lambda: run_joined(spec, log_dir=log_dir))
