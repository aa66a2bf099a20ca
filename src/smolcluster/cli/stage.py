"""`smolcluster stage`: this machine holds layers of a model that is served elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:
smolcluster stage --server 192.168.1.10:65433
smolcluster stage --server mini1:65433 --device mps --memory 6GB
smolcluster stage --server mini1:65433 --model /shared/models
"""


def stage(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where `smolcluster serve --listen` is.")],
    name: Annotated[str | None, typer.Option(help="What it is called. Default: the host's name.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps. Default: the best one here.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16. Default: fp32 on a CPU, bf16 on a GPU.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What it may take for weights and caches. Default: what is free.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="File or folder from which the server may let this machine load its model, under the same path. "
            "Default: none; the server sends the weights.",
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Cores to compute with. Default: all.")] = None,
    bind: Annotated[
        str | None,
        typer.Option(help="Address to listen on for other stages. Default: the one on the way to the server."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for other stages. Default: any; give one to open in a firewall.")
    ] = 0,
    no_token: Annotated[bool, typer.Option("--no-token", hidden=True)] = False,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
    local_rank: Annotated[int, typer.Option("--local-rank", min=0, hidden=True)] = 0,
) -> int:
    from smolcluster.observe.logs import log_to_terminal
    from smolcluster.serve.main import StageProcessOptions, run_stage

    log_to_terminal(logging.WARNING if with_parent else logging.INFO)
    stop = threading.Event()
    if with_parent:
        threading.Thread(target=_until_its_end, args=(stop,), daemon=True).start()
    options = StageProcessOptions(
        name=name,
        device=device,
        dtype=dtype,
        memory=memory,
        files=model,
        threads=threads,
        bind=bind,
        port=port,
        no_token=no_token,
        local_rank=local_rank,
    )
    return run_stage(server, options, stop)


def _until_its_end(stop: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):  # not through sys.stdin, which cannot be closed at the end while a thread reads it
            pass
    stop.set()
