"""Measure the same training on 1, 2, 4, ... workers of this machine, for `smolcluster bench scaling`.

    for each repeat:  for each number of workers:      (in alternating order, so that drift affects all sizes equally)
        an ordinary run: warm-up steps, then timed ones
        its rows give samples and seconds of each rank, without start-up and evaluation

A size that cannot run gets a reason, and the others continue. `scaling.json` and `scaling.svg` are rewritten after every run:
an interrupt keeps what was measured.

Workers are started on this machine only. For several machines, start the run by hand for each number of ranks and compare
`samples_per_s` of their rows.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smolcluster.config import Overrides, list_overrides
from smolcluster.durable_files import durable_write_text
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.launch.api import run_here
from smolcluster.launch.local.outcome import Interrupted
from smolcluster.launch.prepare import Prepared, prepare
from smolcluster.launch.scaling_report import Sample, Scaling, Size, draw
from smolcluster.observe.events import Event, StepLogged, plain
from smolcluster.observe.observer import Sink

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRequest:
    """What to run, and how often."""

    sources: Sequence[str] = ()
    overrides: Overrides = ()
    backend: str | None = None
    sizes: Sequence[int]
    weak: bool
    steps: int
    warmup: int
    repeats: int
    threads: int | None  # OMP_NUM_THREADS of the workers, if the caller has set it
    folder: Path

    def prepared(self, size: int, place: str, **more: Any) -> Prepared:
        """Prepare a run of this size with few rows, no checkpoints and minimal evaluation."""
        own = {
            "cluster.num_workers": size,
            "training.steps": self.warmup + self.steps,
            "training.eval_steps": 0,
            "training.eval_samples": size,
            "training.checkpoint_steps": 0,
            "logging.log_interval": self.warmup,
            "logging.wandb": False,
            "logging.tensorboard": False,
            **more,
        }
        overrides = [*list_overrides(self.overrides), *own.items()]
        where = self.folder / "runs" / place
        return prepare(self.sources, overrides=overrides, run_dir=where, backend=self.backend)


def parse_sizes(text: str) -> list[int]:
    """Parse `1,2,3`; or a maximum: `8` is 1, 2, 4, 8 and `6` is 1, 2, 4, 6."""
    try:
        given = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--workers {text!r}: give a number, or several such as 1,2,4") from None
    if min(given) < 1:
        raise UserError(f"--workers {text}: {min(given)} is below 1")
    if len(given) > 1:
        return sorted(set(given))
    return [2**i for i in range(given[0].bit_length()) if 2**i < given[0]] + given


def run_scaling(request: ScalingRequest, *, on_event: Callable[[str, Event | None], None]) -> Scaling:
    """Measure all sizes. `on_event` is called when a run begins (no event), and with its events."""
    scaling = plan(request)
    try:
        for repeat in range(request.repeats):
            for size in scaling.sizes[:: -1 if repeat % 2 else 1]:
                if not size.reason:
                    _measure(request, scaling, size, repeat, on_event)
        scaling.status = "finished"
    except (Interrupted, KeyboardInterrupt):
        scaling.status = "interrupted"
    write(request.folder, scaling)
    return scaling


def plan(request: ScalingRequest) -> Scaling:
    """Plan every size: its shards and batch; sizes that cannot run get a reason. Raises UserError if none can."""
    base = request.prepared(request.sizes[0], "unused")
    config = base.config
    batch, name = config.training.batch_size or 1, config.strategy.name
    unit, units = processors(config.training.device)
    sizes = []
    for workers in request.sizes:
        size = Size(workers=workers, shared=workers > units)
        try:
            run = request.prepared(workers, "unused")
            name = run.config.strategy.name  # one worker may be `single` where more are not
            size.shards = data_shards(run)
            size.batch_size = batch_for(batch, workers, size.shards, weak=request.weak)
        except UserError as error:
            size.reason = str(error)
        sizes.append(size)
    if all(size.reason for size in sizes):
        raise UserError(sizes[0].reason)
    return Scaling(
        title=f"{name}, {'weak' if request.weak else 'strong'} scaling on {platform.node()}",
        weak=request.weak,
        unit=unit,
        units=units,
        sizes=sizes,
        about={
            "strategy": name,
            "plane": base.plane,
            "host": platform.node(),
            "threads": request.threads,
            "steps": request.steps,
            "warmup": request.warmup,
            "repeats": request.repeats,
        },
    )


def batch_for(batch: int, workers: int, shards: int, *, weak: bool) -> int:
    """Return the batch size of one data shard. `batch`: of a single worker; pipeline and tensor peers share a shard."""
    samples = batch * workers if weak else batch
    if samples % shards:
        larger = -(-batch // shards) * shards
        raise UserError(
            f"a step of {samples} samples cannot be divided among {shards} data shards; "
            f"use --override training.batch_size={larger}, or --weak"
        )
    return samples // shards


def data_shards(run: Prepared) -> int:
    """Return the number of data shards. Raises UserError if the strategy cannot use this number of workers."""
    from smolcluster.parallel.placement import Node
    from smolcluster.planner.world_sizes import place

    nodes = [Node(name=f"worker-{rank}", stays=run.plane != "elastic") for rank in range(run.workers)]
    return place(run.config, nodes, plane=run.plane).num_shards


def processors(device: str | None) -> tuple[str, int]:
    """Return what workers compute on, GPUs or cores, and how many there are."""
    import torch

    from smolcluster.compute.device import choose_device

    if choose_device(device).type == "cuda":
        return "GPUs", torch.cuda.device_count()
    if hasattr(os, "sched_getaffinity"):
        return "cores", len(os.sched_getaffinity(0))
    return "cores", os.cpu_count() or 1


# One run


class RowCollector(Sink):
    """A sink that keeps the rows of workers."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self.rows: list[StepLogged] = []
        self._on_event = on_event

    def handle(self, event: Event) -> None:
        if isinstance(event, StepLogged) and event.role != "server":
            self.rows.append(event)
        self._on_event(event)


def _measure(
    request: ScalingRequest,
    scaling: Scaling,
    size: Size,
    repeat: int,
    on_event: Callable[[str, Event | None], None],
) -> None:
    name = f"repeat {repeat + 1} of {request.repeats}, {size.workers} worker{'s' * (size.workers > 1)}"
    on_event(name, None)
    sink = RowCollector(lambda event: on_event(name, event))
    try:
        place = f"workers-{size.workers}-repeat-{repeat + 1}"
        run = request.prepared(size.workers, place, **{"training.batch_size": size.batch_size})
        run_here(run, sinks=[sink])
        sample = sample_of(
            sink.rows, repeat=repeat + 1, warmup=request.warmup, global_batch=size.shards * size.batch_size
        )
        size.samples.append(sample)
    except Interrupted:
        raise
    except SmolclusterError as error:
        size.reason = str(error)
        size.samples.clear()
    write(request.folder, scaling)


def sample_of(rows: Sequence[StepLogged], *, repeat: int, warmup: int, global_batch: int) -> Sample:
    """Return the throughput after the warm-up, summed over the ranks that count samples."""
    ranks = sorted({row.rank for row in rows if row.samples > 0})
    samples_per_s = tokens_per_s = 0.0
    stretches: list[dict[str, float]] = []
    for rank in ranks:
        own_rows = sorted((row for row in rows if row.rank == rank), key=lambda row: row.step)
        pairs = [(a, b) for a, b in itertools.pairwise(own_rows) if a.step >= warmup and b.samples > a.samples]
        taken = [
            {
                "rank": rank,
                "step": later.step,
                "samples": later.samples - earlier.samples,
                "tokens": later.tokens - earlier.tokens,
                "seconds": (later.samples - earlier.samples) / max(later.samples_per_s, 1e-12),
            }
            for earlier, later in pairs
        ]
        if not taken:
            raise SmolclusterError(f"rank {rank} has logged no step after the warm-up of {warmup}; raise --steps")
        seconds = sum(stretch["seconds"] for stretch in taken)
        samples_per_s += sum(stretch["samples"] for stretch in taken) / seconds
        tokens_per_s += sum(stretch["tokens"] for stretch in taken) / seconds
        stretches += taken
    if not ranks:
        raise SmolclusterError("no worker has logged a row")
    return Sample(
        repeat=repeat,
        samples_per_s=samples_per_s,
        tokens_per_s=tokens_per_s,
        steps_per_s=samples_per_s / global_batch,
        stretches=stretches,
    )


def write(folder: Path, scaling: Scaling) -> None:
    """Write both files atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"scaling.json": json.dumps(plain(scaling.to_dict()), indent=1) + "\n"}
    if scaling.measured:
        texts["scaling.svg"] = draw(scaling)
    for name, text in texts.items():
        durable_write_text(folder / name, text)
