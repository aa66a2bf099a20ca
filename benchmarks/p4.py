"""P4: two workers, one at a quarter of the speed: time to a loss.

Work: a GPT of 0.8 M parameters on the embedded text, 32 samples per worker and step, the same weights, order of samples and
learning rates. The time counts until the loss of the global batch, averaged over the last rows, is down to the target. DDP
and the synchronous strategies follow the same curve, so for them it is a number of steps; edp follows a curve of its own.

Compared: torch DDP with bucket views (gloo) against elastic allreduce and syncps with `cluster.batch_size: auto`, which divide
the same global batch by measured speed; edp, where a worker waits little; diloco with rounds of 16 steps in fp32 (and with
preset lan), its batch divided in the same way; and diloco with `inner_steps: auto`, where each worker takes the steps that fit
into the same time. A row of diloco is a round: its loss is the mean over the steps that workers took in it, so all means are
over about equally many steps.

Named peers, where they are installed (`pip install 'smolcluster[bench]'`): an asynchronous parameter server on Ray, which
applies every gradient when it arrives, on two nodes, and hivemind's Optimizer, which ends an epoch as soon as all peers
together have a global batch (`peers/`). All processes of the slow machine are slowed, daemons included. For hivemind a row's
loss is that of the fast peer's samples. A peer that has not reached the loss after some minutes is stopped: the sample is then
a lower bound, and is reported as such.

The slow machine: the fast worker is alone on core 0. The slow one is on core 1 and gets a quarter of it (`harness/slow.py`),
for computing and communicating. That begins after about 30 steps (one long round of diloco, or two short ones); the clock
starts then, with batches still equal. The server or coordinator is on core 0, so its cost is the fast worker's. Speeds are
measured by training on both cores at once without any exchange; the limit follows from them: DDP waits for the slow worker, and
no method is faster than the sum of both speeds at the same loss per sample. Local steps of diloco are smaller batches, which
may need fewer samples for a loss: then it is faster than the limit.

How: a run of each in turn, DDP a second time as another variant: that is the noise.

Target: 2.2 times sooner than DDP, diloco 2.4 times; the limit is 2.5 when the slow worker has exactly a quarter.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Comparison, Measured, Session, Target, Variant
from benchmarks.harness.elastic_run import ElasticRun, elastic_config, options_of
from benchmarks.harness.peer_programs import hivemind_peers, ray_server, usable
from benchmarks.harness.pipes import Message
from benchmarks.harness.slow import slowed
from benchmarks.harness.workload import SHAPES, make_config
from benchmarks.harness.world import World, serve
from benchmarks.peers.ddp import DDPTraining
from benchmarks.peers.work import Work
from smolcluster.comm.group import Group
from smolcluster.config.options import RoundOptions
from smolcluster.config.schema import Config
from smolcluster.engine.elastic import history
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.observe.events import StepLogged

EXAMPLE = "python -m benchmarks p4 --peers --repeats 3"
SHAPE = dataclasses.replace(SHAPES["0.8m"], batch_size=32)
FAST, SLOW = 0, 1  # cores, and the ranks on them
TARGET, TARGET_OF = 2.2, {"diloco, auto": 2.4, "diloco, equal time": 2.4}
STEPS = 400  # of the schedule; a run ends at the loss
EVERY, ROWS = 4, 8  # a row every so many steps; the loss is the mean of so many rows
START = 28  # after these steps a machine is slowed and the clock starts; rounds of diloco end a little later
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce, auto": ("allreduce", {"cluster.batch_size": "auto"}),
    "syncps, auto": ("syncps", {"cluster.batch_size": "auto"}),
    "edp": ("edp", {}),
    # A step at every push, as Ray's server takes it: half as many samples for each, and twice as many steps.
    "edp, every push": ("edp", {"strategy.server_batch": 1}),
    "diloco, auto": ("diloco", {"cluster.batch_size": "auto", "strategy.inner_steps": 16}),
    "diloco, lan, auto": (
        "diloco",
        {"cluster.batch_size": "auto", "strategy.inner_steps": 16, "strategy.preset": "lan"},
    ),
    "diloco, equal time": ("diloco", {"strategy.inner_steps": "auto"}),
}
BESIDE = ("syncps, auto", "edp", "edp, every push", "diloco, equal time")  # of ours, with --peers
NAMED: dict[str, tuple[str, dict[str, Any]]] = {  # package and order of a peer that is a program of its own
    "Ray, async server": ("ray", {"mode": "async", "machines": [FAST, SLOW]}),
    # Parameters are averaged now and then, instead of at every epoch: that saves it time.
    "hivemind": ("hivemind", {"size": 2, "lockstep": False, "average_state_every": 10}),
}
LIMIT_S = 240.0  # for a named peer
DDP, AGAIN = "torch DDP", "torch DDP again"

Curve = list[tuple[float, float]]  # time and loss of each row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loss", type=float, help="to reach (default: 3; quick: 4.5)")
    parser.add_argument("--only", choices=[*OURS, *NAMED], nargs="+", help="besides DDP (default: all)")
    parser.add_argument(
        "--peers", action="store_true", help="named peers, DDP and the best of ours; kept as p4-peers.json"
    )


def run(session: Session, arguments: argparse.Namespace) -> None:
    if not hasattr(os, "sched_setaffinity") or not {FAST, SLOW} <= os.sched_getaffinity(0):
        raise UserError(f"p4 needs Linux and two cores, {FAST} and {SLOW}, that this process may use")
    loss = arguments.loss or (4.5 if session.quick else 3.0)
    speeds, how = measured_speeds(seconds=1.0 if session.quick else 5.0)
    limit = sum(speeds) / (2 * speeds[SLOW])
    session.parameters = {
        **SHAPE.overrides(),
        "loss": loss,
        "slow_by": how,
        "samples_per_s": speeds,
        "share": speeds[SLOW] / speeds[FAST],
        "limit": limit,
        "server_on_core": FAST,
    }
    share = speeds[SLOW] / speeds[FAST]
    print(f"the slow worker has {share:.3f} of the fast one's speed: the limit is {limit:.2f} x\n", flush=True)

    limit_s = 45.0 if session.quick else LIMIT_S
    names = [n for n in OURS if n in (arguments.only or (BESIDE if arguments.peers else OURS))]
    named = usable({n: what for n, what in NAMED.items() if n in (arguments.only or NAMED)})
    measured = session.compare(
        Comparison(
            name=f"2 workers, one at a quarter of the speed: time to a loss of {loss:g}",
            variants=[
                Variant(name=DDP, run=partial(time_of_ddp, loss), role="peer"),
                *(
                    Variant(
                        name=n,
                        run=partial(time_of_ours, *OURS[n], loss),
                        target=Target(limit=1 / TARGET_OF.get(n, TARGET)),
                    )
                    for n in names
                ),
                *(
                    Variant(name=n, run=partial(time_of_named, *NAMED[n], loss, limit_s=limit_s), role="extra")
                    for n in named
                ),
                *([] if session.quick else [Variant(name=AGAIN, run=partial(time_of_ddp, loss), role="noise")]),
            ],
            warmup=0,
        )
    )
    _add_figures(measured, names, limit)
    _add_named(measured, named, limit_s)
    if arguments.peers:
        session.name = "p4-peers"


def _add_figures(measured: Measured, names: Sequence[str], limit: float) -> None:
    """Add how much sooner each was, its share of the limit, and how many samples each worker computed."""
    parameters, splits = measured.comparison.parameters, measured.beside
    parameters["times_sooner"] = {name: 1 / measured.ratio(name, DDP) for name in names}
    parameters["of_limit"] = {name: sooner / limit for name, sooner in parameters["times_sooner"].items()}
    parameters["samples_of_each_worker"] = {name: splits[name] for name in names}
    for name in names:
        sooner, split = parameters["times_sooner"][name], splits[name][-1]
        shares = " and ".join(f"{part:.1f}" for part in split)
        print(
            f"  {name:<16} {sooner:.2f} x sooner, {sooner / limit:.2f} of the limit; {shares} samples a step",
            flush=True,
        )
    print(flush=True)


def _add_named(measured: Measured, names: Sequence[str], limit_s: float) -> None:
    """Add how much sooner each named peer was, and the losses of those that were stopped before they reached it."""
    parameters = measured.comparison.parameters
    ends = {name: [loss for loss in measured.beside[name] if loss is not None] for name in names}
    stopped = {name: losses for name, losses in ends.items() if losses}
    parameters["named_times_sooner"] = {name: 1 / measured.ratio(name, DDP) for name in names}
    parameters["not_reached"] = {"limit_s": limit_s, "losses": stopped}
    for name in names:
        if name in stopped:
            last = ", ".join(f"{loss:.3f}" for loss in stopped[name])
            print(
                f"  {name:<18} not reached in {limit_s:g} s or {STEPS} steps: stopped at a loss of {last}", flush=True
            )
        else:
            print(f"  {name:<18} {parameters['named_times_sooner'][name]:.2f} x as soon as DDP", flush=True)
    if names:
        print(flush=True)


def reached(curve: Curve, loss: float, *, rows: int = ROWS) -> bool:
    return len(curve) >= rows and statistics.mean(row[1] for row in curve[-rows:]) <= loss


# Ours


def time_of_ours(strategy: str, overrides: dict[str, Any], loss: float) -> tuple[float, list[float]]:
    """Return the seconds to the loss, and the samples of each worker in a step at the end."""
    overrides = {"logging.log_interval": EVERY, **overrides}
    config = elastic_config(SHAPE, workers=2, steps=STEPS, strategy=strategy, overrides=overrides)
    options = options_of(config)[1]
    apart = options.steps_per_round if isinstance(options, RoundOptions) else EVERY  # steps from row to row

    def enough(rows: Sequence[StepLogged]) -> bool:
        curve = [(row.time, row.loss) for row in rows if row.step % apart == 0]
        return reached(curve, loss, rows=ROWS * EVERY // apart)

    with tempfile.TemporaryDirectory() as folder:
        with ElasticRun(config, Path(folder) / "run", cores={"server": FAST, 0: FAST, 1: SLOW}) as run:
            run.watch(lambda rows: rows[-1].step >= START, timeout_s=120.0)
            with slowed(run.pid(SLOW), core=SLOW):
                started = time.time()
                if not run.watch(enough, timeout_s=600.0):
                    raise SmolclusterError(f"{strategy} did not come down to a loss of {loss:g} in {STEPS} steps")
        lines = history.read(Path(folder) / "run" / "history.jsonl")
    return run.rows[-1].time - started, _split([line for line in lines if line["kind"] == "commit"][-20:])


def _split(commits: Sequence[dict[str, Any]]) -> list[float]:
    counts = [0, 0]
    for commit in commits:
        for part in commit["contributors"]:
            counts[part["rank"]] += part["samples"]
    return [count / len(commits) for count in counts]


# Peers


def time_of_named(package: str, order: dict[str, Any], loss: float, *, limit_s: float) -> tuple[float, float | None]:
    """Return the seconds to the loss and None; or the seconds until it was stopped, and its loss then."""
    start = ray_server if package == "ray" else hivemind_peers
    with start(peer_config(), cores=[FAST, SLOW], steps=STEPS, every=EVERY, **order) as program:
        rows = program.rows()
        for _ in range(START // EVERY):
            next(rows)
        with slowed(*program.machine(SLOW), core=SLOW):
            started, curve = time.time(), Curve()
            for row in rows:
                if "val_loss" in row:
                    break
                curve.append((row["time"], row["loss"]))
                if reached(curve, loss):
                    return curve[-1][0] - started, None
                if row["time"] - started > limit_s:
                    break
    return curve[-1][0] - started, statistics.mean(row[1] for row in curve[-ROWS:])


def time_of_ddp(loss: float) -> float:
    with _ddp_world() as world:
        for _ in range(START // EVERY):
            _train(world, [])
        curve = Curve()
        with slowed(world.pid(SLOW), core=SLOW):
            started = time.time()
            while not reached(curve, loss):
                if len(curve) * EVERY >= STEPS:
                    raise SmolclusterError(f"DDP did not come down to a loss of {loss:g} in {STEPS} steps")
                _train(world, curve)
    return curve[-1][0] - started


def measured_speeds(*, seconds: float) -> tuple[list[float], str]:
    """Return the samples per second on each core, both at once and without any exchange; and how the second is slowed."""
    with _ddp_world() as world:
        world.ask({"op": "speed", "seconds": seconds / 5})  # warm
        with slowed(world.pid(SLOW), core=SLOW) as how:
            answers = world.ask({"op": "speed", "seconds": seconds})
            return [float(answer["samples_per_s"]) for answer in answers], how


def peer_config() -> Config:
    overrides = {"training.device": "cpu", "strategy.name": "allreduce"}
    return make_config(SHAPE, steps=STEPS, overrides=overrides)


def _ddp_world() -> World:
    spec = {"config": peer_config().model_dump(mode="json"), "cores": [FAST, SLOW]}
    return World("benchmarks.p4", size=2, spec=spec)


def _train(world: World, curve: Curve) -> Curve:
    """Add a row: the time at which the slower rank had taken the step, and the mean loss."""
    answers = world.ask({"op": "train"})
    curve.append((max(a["time"] for a in answers), statistics.mean(a["loss"] for a in answers)))
    return curve


def setup(spec: Message, group: Group) -> Callable[[Message], Message]:
    """One rank of DDP, on its core."""
    for thread in Path("/proc/self/task").iterdir():  # gloo has some already
        os.sched_setaffinity(int(thread.name), {spec["cores"][group.rank]})
    work = Work(Config.model_validate(spec["config"]), rank=group.rank, size=group.size)
    ddp = DDPTraining(work.model, work.recipe, gradient_as_bucket_view=True)
    probe, batch = work.task.model(), work.data.batch(np.arange(work.batch_size))

    def speed(seconds: float) -> Message:
        count, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            work.task.loss(probe, batch).backward()  # type: ignore[no-untyped-call]
            count += work.batch_size
        return {"samples_per_s": count / elapsed}

    def handle(message: Message) -> Message:
        if message["op"] == "speed":
            return speed(message["seconds"])
        loss = ddp.run([work.batch() for _ in range(EVERY)])
        return {"loss": loss, "time": time.time()}

    return handle


if __name__ == "__main__":
    serve(setup)
