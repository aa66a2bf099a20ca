"""P4: two workers, one at a quarter of the speed: time to a loss.

Work: a GPT of 0.8 M parameters on the embedded text, 32 samples per worker and step, the same weights, order of samples and
learning rates. The time counts until the loss of the global batch, averaged over the last rows, is down to the target. DDP
and the synchronous strategies follow the same curve, so for them it is a number of steps; edp follows a curve of its own.

Compared: torch DDP with bucket views (gloo) against elastic allreduce and syncps with `cluster.batch_size: auto`, which share
the same global batch out by measured speed, and edp, where nobody waits and a fast worker delivers more.

The slow machine: the fast worker is alone on core 0. The slow one is on core 1 and gets a quarter of it (`slow.py`), for
computing as for everything else. That begins when the first steps are done, and the clock starts then, with batches still
equal. The server or coordinator is on core 0: what it computes is taken from the fast worker. Shares are measured, by
training on both cores at once without any exchange, and the limit follows from them: DDP waits for the slow worker, and
nobody can do better than the sum of both speeds.

How: a run of each in turn, DDP a second time as another variant: that is the noise.

Target: 2.2 times sooner than DDP; the limit is 2.5 when the share is exactly a quarter.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.elastic import ElasticRun, elastic_config
from benchmarks.harness import Comparison, Measured, Session, Target, Variant
from benchmarks.peers.ddp import DDPTraining
from benchmarks.slow import slowed
from benchmarks.workload import SHAPES, make_config, recipe_of
from benchmarks.world import Message, World, serve
from smolcluster.comm.group import Group
from smolcluster.compute.rng import seed_everything
from smolcluster.config.schema import Config
from smolcluster.data.dataset import as_dataset
from smolcluster.data.sampler import Sampler, ShardedSampler
from smolcluster.engine import history
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.observe.events import StepLogged
from smolcluster.tasks.find import find_task

EXAMPLE = "python -m benchmarks p4 --repeats 3"
SHAPE = dataclasses.replace(SHAPES["0.8m"], batch_size=32)
FAST, SLOW = 0, 1  # cores, and the ranks on them
TARGET = 2.2
STEPS = 400  # of the schedule; a run ends at the loss
EVERY, ROWS = 4, 8  # a row every so many steps; the loss is the mean of so many rows
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce, auto": ("allreduce", {"cluster.batch_size": "auto"}),
    "syncps, auto": ("syncps", {"cluster.batch_size": "auto"}),
    "edp": ("edp", {}),
}
DDP, AGAIN = "torch DDP", "torch DDP again"

Curve = list[tuple[float, float]]  # time and loss of each row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loss", type=float, help="to reach (default: 3; quick: 4.5)")
    parser.add_argument("--only", choices=list(OURS), nargs="+", help="of ours (default: all)")


def run(session: Session, arguments: argparse.Namespace) -> None:
    if not hasattr(os, "sched_setaffinity") or not {FAST, SLOW} <= os.sched_getaffinity(0):
        raise UserError(f"p4 needs Linux and two cores, {FAST} and {SLOW}, that this process may use")
    loss = arguments.loss or (4.5 if session.quick else 3.0)
    speeds, how = measured_speeds(seconds=1.0 if session.quick else 5.0)
    limit = sum(speeds) / (2 * speeds[SLOW])
    session.parameters = {
        **SHAPE.sets(),
        "loss": loss,
        "slow_by": how,
        "samples_per_s": speeds,
        "share": speeds[SLOW] / speeds[FAST],
        "limit": limit,
        "server_on_core": FAST,
    }
    share = speeds[SLOW] / speeds[FAST]
    print(f"the slow worker has {share:.3f} of the fast one's speed: the limit is {limit:.2f} x\n", flush=True)

    splits: dict[str, list[list[float]]] = {}
    names = arguments.only or list(OURS)
    measured = session.compare(
        Comparison(
            name=f"2 workers, one at a quarter of the speed: time to a loss of {loss:g}",
            variants=[
                Variant(name=DDP, run=lambda: time_of_ddp(loss), role="peer"),
                *(Variant(name=n, run=_ours(n, loss, splits), target=Target(limit=1 / TARGET)) for n in names),
                *([] if session.quick else [Variant(name=AGAIN, run=lambda: time_of_ddp(loss), role="noise")]),
            ],
            warmup=0,
        )
    )
    _add_figures(measured, names, limit, splits)


def _ours(name: str, loss: float, splits: dict[str, list[list[float]]]) -> Callable[[], float]:
    def sample() -> float:
        seconds, split = time_of_ours(*OURS[name], loss)
        splits.setdefault(name, []).append(split)
        return seconds

    return sample


def _add_figures(measured: Measured, names: Sequence[str], limit: float, splits: dict[str, list[list[float]]]) -> None:
    """Beside the seconds: how much sooner, how much of what is possible, who computed how much."""
    parameters = measured.comparison.parameters
    parameters["times_sooner"] = {name: 1 / measured.ratio(name, DDP) for name in names}
    parameters["of_limit"] = {name: sooner / limit for name, sooner in parameters["times_sooner"].items()}
    parameters["samples_of_each_worker"] = splits
    for name in names:
        sooner, split = parameters["times_sooner"][name], splits[name][-1]
        shares = " and ".join(f"{part:.1f}" for part in split)
        print(
            f"  {name:<16} {sooner:.2f} x sooner, {sooner / limit:.2f} of the limit; {shares} samples a step",
            flush=True,
        )
    print(flush=True)


def reached(curve: Curve, loss: float) -> bool:
    return len(curve) >= ROWS and statistics.mean(row[1] for row in curve[-ROWS:]) <= loss


# Ours


def time_of_ours(strategy: str, sets: dict[str, Any], loss: float) -> tuple[float, list[float]]:
    """Seconds to the loss, and the samples of each worker in a step, at the end."""
    sets = {"logging.log_interval": EVERY, **sets}
    config = elastic_config(SHAPE, workers=2, steps=STEPS, strategy=strategy, sets=sets)

    def enough(rows: Sequence[StepLogged]) -> bool:
        return reached([(row.time, row.loss) for row in rows if row.step % EVERY == 0], loss)

    with tempfile.TemporaryDirectory() as folder:
        with ElasticRun(config, Path(folder) / "run", cores={"server": FAST, 0: FAST, 1: SLOW}) as run:
            run.watch(lambda rows: rows[-1].step >= EVERY, within_s=120.0)
            with slowed(run.pid(SLOW), core=SLOW):
                started = time.time()
                if not run.watch(enough, within_s=600.0):
                    raise SmolclusterError(f"{strategy} did not come down to a loss of {loss:g} in {STEPS} steps")
        lines = history.read(Path(folder) / "run" / "history.jsonl")
    return run.rows[-1].time - started, _split([line for line in lines if line["kind"] == "commit"][-20:])


def _split(commits: Sequence[dict[str, Any]]) -> list[float]:
    counts = [0, 0]
    for commit in commits:
        for part in commit["contributors"]:
            counts[part["rank"]] += part["samples"]
    return [count / len(commits) for count in counts]


# The peer


def time_of_ddp(loss: float) -> float:
    with _ddp_world() as world:
        curve = _train(world, [])
        with slowed(world.pid(SLOW), core=SLOW):
            started = time.time()
            while not reached(curve, loss):
                if len(curve) * EVERY >= STEPS:
                    raise SmolclusterError(f"DDP did not come down to a loss of {loss:g} in {STEPS} steps")
                _train(world, curve)
    return curve[-1][0] - started


def measured_speeds(*, seconds: float) -> tuple[list[float], str]:
    """Samples per second on each core, both at once and without any exchange; and by what the second is slow."""
    with _ddp_world() as world:
        world.ask({"op": "speed", "seconds": seconds / 5})  # warm
        with slowed(world.pid(SLOW), core=SLOW) as how:
            answers = world.ask({"op": "speed", "seconds": seconds})
            return [float(answer["samples_per_s"]) for answer in answers], how


def _ddp_world() -> World:
    sets = {"training.device": "cpu", "strategy.name": "allreduce"}
    config = make_config(SHAPE, steps=STEPS, sets=sets)
    return World("benchmarks.p4", size=2, spec={"config": config.model_dump(mode="json"), "cores": [FAST, SLOW]})


def _train(world: World, curve: Curve) -> Curve:
    """One row more: the time at which the slower rank had the step, and the mean loss."""
    answers = world.ask({"op": "train"})
    curve.append((max(a["time"] for a in answers), statistics.mean(a["loss"] for a in answers)))
    return curve


def setup(spec: Message, group: Group) -> Callable[[Message], Message]:
    """One rank of DDP, on its core."""
    for thread in Path("/proc/self/task").iterdir():  # gloo has some already
        os.sched_setaffinity(int(thread.name), {spec["cores"][group.rank]})
    torch.set_num_threads(1)
    config = Config.model_validate(spec["config"])
    task, training = find_task(config), config.training
    data = as_dataset(task.train_data())
    assert training.batch_size is not None
    size, seed = training.batch_size, training.seed or 0
    sampler = ShardedSampler(Sampler(len(data), seed=seed), counts=[size] * group.size, shard=group.rank)
    seed_everything(seed, "weights", device=torch.device("cpu"))
    ddp = DDPTraining(task.model(), recipe_of(config), gradient_as_bucket_view=True)
    probe, batch = task.model(), data.batch(np.arange(size))

    def speed(seconds: float) -> Message:
        count, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            task.loss(probe, batch).backward()  # type: ignore[no-untyped-call]
            count += size
        return {"samples_per_s": count / elapsed}

    def handle(message: Message) -> Message:
        if message["op"] == "speed":
            return speed(message["seconds"])
        loss = ddp.run([data.batch(sampler.next()) for _ in range(EVERY)])
        return {"loss": loss, "time": time.time()}

    return handle


if __name__ == "__main__":
    serve(setup)
