"""`smolcluster bench`: measure this machine. `bench scaling`: the efficiency of each number of workers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smolcluster.cli import options
from smolcluster.cli.screen import print_text
from smolcluster.errors import UserError
from smolcluster.observe.text import supports

if TYPE_CHECKING:
    from smolcluster.launch.scaling_report import Scaling
    from smolcluster.observe.events import Event

app = typer.Typer(
    no_args_is_help=False,
    invoke_without_command=True,
    epilog="Example: smolcluster bench scaling gpt --workers 4",
)
EXAMPLES = """Examples:
smolcluster bench scaling
smolcluster bench scaling gpt --strategy fsdp --workers 1,2,4 --repeats 5
smolcluster bench scaling my.yaml --weak --override training.batch_size=8
"""


@app.callback()
def _bench(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo("smolcluster bench scaling    the same training on 1, 2, 4, ... workers: speed and efficiency")
        typer.echo("\nEach has --help. Example: smolcluster bench scaling gpt --workers 4")


@app.command("scaling", epilog=options.blank_line_between(EXAMPLES))
@options.grouped
def scaling(
    setup: options.SetupOptions,
    workers: Annotated[
        str | None,
        typer.Option(help="1,2,4: these numbers. 8: 1, 2, 4, 8. Default: up to this machine's cores, 8 at most."),
    ] = None,
    weak: Annotated[
        bool, typer.Option("--weak", help="Keep the samples of each worker; otherwise those of a step stay the same.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a run.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them, which do not count.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each size; their median counts.")] = 3,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="CPU threads of each worker. Default: OMP_NUM_THREADS, or the cores shared by the most workers."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for scaling.json, scaling.svg and the runs. Default: runs/scaling-bench-<time>."),
    ] = None,
) -> int:
    """Train the same on 1, 2, 4, ... workers of this machine and print the efficiency of each number.

    efficiency = time on 1 / time on N / N for the same work, or with --weak throughput on N / (N x that of one).
    Workers are started here, on this machine; on others they cannot be started from here.
    """
    from smolcluster.launch.scaling import THREADS, ScalingRequest, parse_sizes, run_scaling

    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UserError(
            "bench scaling starts its own workers, on this machine only: run it without torchrun or srun. For several "
            "machines, train with each number of ranks by hand and compare tokens_per_s in summary.json"
        )
    cores = os.cpu_count() or 1
    sizes = parse_sizes(workers or str(min(cores, 8)))
    if threads is None and THREADS not in os.environ:
        threads = max(1, cores // max(sizes))  # the same at every size, or one worker would get all cores
    request = ScalingRequest(
        sources=setup.sources or [],
        overrides=setup.overrides(),
        backend=setup.backend,
        sizes=sizes,
        weak=weak,
        steps=steps,
        warmup=warmup,
        repeats=repeats,
        threads=threads,
        folder=_folder(out),
    )
    if threads is not None:
        os.environ[THREADS] = str(threads)  # for the workers
    with _progress(len(sizes) * repeats, warmup + steps) as on_event:
        result = run_scaling(request, on_event=on_event)
    return _report(result, request.folder)


def _folder(out: Path | None) -> Path:
    from smolcluster.engine.run_dir import new_run_dir

    if out is None:
        return new_run_dir("scaling", "bench").path
    if (out / "scaling.json").exists():
        raise UserError(f"{out} already has a scaling.json; choose another --out")
    return out


def _report(result: Scaling, folder: Path) -> int:
    from rich.console import Console

    from smolcluster.launch.scaling_report import chart, remarks

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for line, style in chart(result, unicode=supports(sys.stdout, "█│")):
        console.print(line, style=style)
    for line in remarks(result):
        print_text(line)
    typer.echo(f"written: {folder / 'scaling.json'}" + (", scaling.svg" if result.measured else ""))
    if result.status == "interrupted":
        typer.echo("smolcluster: interrupted; the results above are complete runs", err=True)
        return 130
    return 0 if result.measured else 1


@contextlib.contextmanager
def _progress(runs: int, steps: int) -> Iterator[Callable[[str, Event | None], None]]:
    """Yield a function that prints a line for each run, and on a terminal its progress."""
    from rich.console import Console

    from smolcluster.observe.events import StepLogged

    begun = 0

    def on_event(name: str, event: Event | None) -> None:
        nonlocal begun
        begun += event is None
        line = f"run {begun} of {runs}: {name}"
        if event is None:
            typer.echo(line) if live is None else live.update(line)
        elif isinstance(event, StepLogged) and event.rank == 0 and live is not None:
            live.update(f"{line}, step {event.step} of {steps}")

    status = Console(highlight=False).status("starting") if sys.stdout.isatty() else None
    with status or contextlib.nullcontext() as live:
        yield on_event
