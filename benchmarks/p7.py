"""P7: the overhead of smolcluster on one worker.

Compared: the real `engine.loop.Loop` (sampler, dataset, seeds per step, meter, a row of metrics.jsonl every 10 steps) with
strategy `single`, and with `allreduce` in a world of 1, against the bare loop in `peers/bare.py`. Same process, weights,
batches, fused AdamW, clipping and learning rates; the losses are checked to agree at the end. No evaluation and no checkpoints.

How: blocks of steps in turn, seconds per step of a block. `Loop.run` is called once per block; it logs one row more than
a run without blocks would (the first step of each), which counts against us. The bare loop runs a second time as another
variant: that is the noise.

Target: at most 3 % over the bare loop on a CPU (0.8 M parameters, the least work per step of any benchmark), at most 1 %
on a GPU (124 M parameters in bf16, 16 x 1024 tokens, compiled and not).
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Comparison, Session, Target, Variant
from benchmarks.harness.workload import SHAPES, Shape, make_config, make_strategy, recipe_of
from benchmarks.peers.bare import BareLoop
from smolcluster.comm.mesh.rendezvous import RankPlace, connect
from smolcluster.compute.device import choose_device, synchronize
from smolcluster.compute.rng import seed_everything
from smolcluster.config.schema import Config
from smolcluster.data.dataset import as_dataset
from smolcluster.data.sampler import Sampler, ShardedSampler
from smolcluster.engine.loop import Loop
from smolcluster.engine.reader import StreamReader
from smolcluster.engine.record import RunRecord
from smolcluster.errors import SmolclusterError
from smolcluster.models import GPT
from smolcluster.observe.jsonl import MetricsFile, read_metrics
from smolcluster.observe.observer import Observer
from smolcluster.tasks.find import find_task

EXAMPLE = "python -m benchmarks p7 --device cuda"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--shape", choices=SHAPES, help="model (default: 0.8m on a CPU, 124m on a GPU)")
    parser.add_argument("--block", type=int, help="steps per block (default: 10; quick: 5)")
    parser.add_argument("--rounds", type=int, help="blocks per variant and repeat (default: 10, on a GPU 4; quick: 1)")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="wall counts; cpu (of this process) is calmer on a busy machine"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU (default: 1)")


def run(session: Session, arguments: argparse.Namespace) -> None:
    device = choose_device(arguments.device)
    gpu = device.type == "cuda"
    shape = SHAPES[arguments.shape or ("124m" if gpu else "0.8m")]
    block = arguments.block or (5 if session.quick else 10)
    rounds = arguments.rounds or (1 if session.quick else 4 if gpu else 10)
    session.name = "p7-gpu" if gpu else "p7"
    session.parameters = {
        "device": device.type,
        "threads": arguments.threads,
        "steps_per_block": block,
        "clock": arguments.clock,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        for compile in [False, True] if gpu else [False]:
            with tempfile.TemporaryDirectory() as folder:
                _compare(session, shape, device, compile=compile, block=block, rounds=rounds, folder=Path(folder))
    finally:
        torch.set_num_threads(threads)


def _compare(
    session: Session, shape: Shape, device: torch.device, *, compile: bool, block: int, rounds: int, folder: Path
) -> None:
    clock = CLOCKS[session.parameters["clock"]]
    warmup = 1 if session.quick else 2
    steps = block * (warmup + session.repeats * rounds)
    overrides = {
        "training.device": str(device),
        "training.compile": compile,
        "data.cache_dir": str(folder),
        "logging.log_interval": 10,
    }

    def config_for(strategy: str) -> Config:
        return make_config(shape, steps=steps, overrides={**overrides, "strategy.name": strategy})

    bare, again = make_bare(config_for("single"), device), make_bare(config_for("single"), device)
    ours = {name: OurLoop(config_for(name), device, folder / name) for name in ("single", "allreduce")}

    def timed(block_of: Callable[[int], None]) -> Callable[[], float]:
        def sample() -> float:
            synchronize(device)
            started = clock()
            block_of(block)
            synchronize(device)
            return (clock() - started) / block

        return sample

    target = Target(limit=1.01 if device.type == "cuda" else 1.03)
    session.compare(
        Comparison(
            name=f"one worker, GPT of {shape.name}, {device.type}{', compiled' if compile else ''}: time per step",
            variants=[
                Variant(name="bare loop", run=timed(bare.run), role="peer"),
                Variant(name="single", run=timed(ours["single"].run), target=target),
                Variant(name="allreduce", run=timed(ours["allreduce"].run), target=target),
                Variant(name="bare loop again", run=timed(again.run), role="noise"),
            ],
            rounds=rounds,
            warmup=warmup,
            parameters={**shape.overrides(), "compile": compile},
        )
    )
    for name, loop in ours.items():
        loop.close()
        check_same_work(bare.losses, loop.losses(), name=name, exact=device.type == "cpu")


class OurLoop:
    """The engine's loop over one worker, a block at a time."""

    def __init__(self, config: Config, device: torch.device, folder: Path) -> None:
        task = find_task(config)
        data = as_dataset(task.train_data())
        training = config.training
        assert training.batch_size is not None
        strategy = make_strategy(config, task, group=connect(RankPlace(), device=device), device=device)
        self._context = strategy.context
        self._metrics = folder / "metrics.jsonl"
        self._observer = Observer([MetricsFile(self._metrics)])
        sampler = ShardedSampler(Sampler(len(data), seed=training.seed or 0), counts=[training.batch_size], shard=0)
        self._reader = StreamReader(sampler, total_steps=0)
        self._loop = Loop(
            strategy=strategy,
            task=task,
            context=strategy.context,
            reader=self._reader,
            sampler=sampler,
            train_data=data,
            val_data=None,
            observer=self._observer,
            record=RunRecord(
                strategy.context,
                task,
                host="here",
                world_size=1,
                saver=None,
                traffic=lambda: strategy.context.traffic,
            ),
        )

    def run(self, steps: int) -> None:
        self._context.total_steps = self._reader.total_steps = (
            self._loop.step + steps
        )  # the learning rates keep the whole run in view
        self._loop.run()

    def losses(self) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in read_metrics(self._metrics)}

    def close(self) -> None:
        self._observer.close()


def make_bare(config: Config, device: torch.device) -> BareLoop:
    """The peer, with our weights and our order of samples."""
    task, training = find_task(config), config.training
    data = as_dataset(task.train_data())
    inputs, targets = data.batch(np.arange(len(data)))
    assert training.batch_size is not None
    assert training.steps is not None
    order = Sampler(len(data), seed=training.seed or 0).indices(0, training.steps * training.batch_size)
    seed_everything(training.seed or 0, "weights", device=device)
    model = task.model()
    assert isinstance(model, GPT)
    return BareLoop(
        model,
        recipe_of(config),
        inputs=inputs,
        targets=targets,
        order=torch.from_numpy(order),
        batch_size=training.batch_size,
        device=device,
        precision=training.precision,
        compile=training.compile,
        log_interval=config.logging.log_interval,
    )


def check_same_work(bare: dict[int, float], ours: dict[int, Any], *, name: str, exact: bool) -> None:
    """A ratio means something only between equal computations: every logged loss must agree."""
    tolerance = 1e-6 if exact else 2e-2  # bf16 kernels may pick another order of sums
    common = sorted(set(bare) & set(ours))
    if not common:
        raise SmolclusterError("no step was logged by both loops; use more steps per block")
    for step in common:
        if not math.isclose(bare[step], ours[step], rel_tol=tolerance):
            raise SmolclusterError(f"{name} lost the bare loop's path at step {step}: {ours[step]} != {bare[step]}")
