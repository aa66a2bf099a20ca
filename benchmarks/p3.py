"""P3: bytes on the wire for the same tokens, at a loss within 0.01 of torch DDP's.

Work: a GPT of 0.8 M parameters (4 layers of 128, context 64, bytes) on the embedded text, 2 workers, the same weights, order of
samples, learning rates and number of steps for everybody. The loss is that of the whole validation set after the last step.

Compared: torch DDP in fp32 (gloo) with the parameter servers and their codecs at several strengths. syncps encodes both ways;
its pulls of fp32 weights are switched off (all replicas take the same steps without them), while edp needs them. Bytes are
those that left any machine, the server included, from the first connection to the last: DDP's by the kernel's counters of its
sockets, ours by the run's summary, which must agree with the server's rows (`p12` holds the kernel's counters against the
formulas).

Named peers, where they are installed (`pip install 'smolcluster[bench]'`), do the same work: a synchronous parameter server
on Ray, and hivemind's Optimizer, where every peer gives one batch to each epoch (`peers/`): with its defaults, then with its
compressions and "no state": gradients are averaged, parameters are not. Their bytes are what the kernel counts on TCP
connections from one machine to another: hivemind's daemons; Ray's nodes, with the server on a machine of its own, as ours.
What Ray's processes say to each other on one machine does not count.

How: one run of each setting with the first seed; then the one with the fewest bytes whose loss is within 0.01 is run with the
other seeds, beside DDP, and counts if the median of its differences is within 0.01 too; else the next one is tried.

Target: 400 times fewer bytes than DDP, with the best strategy of all (those that seldom communicate are still to come).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.elastic import ElasticRun, elastic_config, show
from benchmarks.harness import Session
from benchmarks.peers.ddp import DDPTraining
from benchmarks.peers.work import Work
from benchmarks.programs import hivemind_peers, ray_server, usable
from benchmarks.tasks.counted import kernel_bytes
from benchmarks.workload import Shape, make_config
from benchmarks.world import Message, World, serve
from smolcluster.comm.group import Group
from smolcluster.config.schema import Config
from smolcluster.errors import SmolclusterError

EXAMPLE = "python -m benchmarks p3 --peers --steps 100"
SHAPE = Shape("0.8m", 128, 4, 4, 64, 8)
WORKERS, SEED = 2, 42
TARGET, WITHIN = 400.0, 0.01
NEVER = 10**6  # an interval beyond every run
BESIDE = ("syncps, fp32", "syncps, int8", "syncps, powersgd 32", "edp, int8, pulls every 4")  # of ours, with --peers
COLUMNS = ["setting", "megabytes", "fewer_bytes", "fewer_per_step", "val_loss", "difference", "seconds", "within"]


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def sets(self) -> dict[str, Any]:
        return {f"strategy.{key}": value for key, value in self.options.items()}


def _syncps(codec: str, **options: Any) -> Setting:
    said = " ".join(f"{value:g}" for value in options.values())
    options = {"codec": codec, "worker_update_interval": NEVER, **options}
    return Setting(f"syncps, {codec} {said}".rstrip(), "syncps", options)


def _edp(codec: str, *, interval: int, **options: Any) -> Setting:
    said = " ".join(f"{value:g}" for value in options.values())
    options = {"codec": codec, "worker_update_interval": interval, **options}
    return Setting(f"edp, {codec} {said}".rstrip() + f", pulls every {interval}", "edp", options)


SETTINGS = [
    _syncps("fp32"),
    _syncps("fp16"),
    _syncps("int8"),
    *(_syncps("topk", codec_fraction=fraction) for fraction in (0.3, 0.1, 0.01)),
    _syncps("randk", codec_fraction=0.3),
    *(_syncps("powersgd", codec_rank=rank) for rank in (32, 16, 4, 1)),
    _edp("int8", interval=4),
    _edp("topk", interval=10, codec_fraction=0.1),
]

# Package and order of a peer that is a program of its own.
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "hivemind, fp32": ("hivemind", {}),
    "hivemind, fp16, no state": ("hivemind", {"codec": "fp16", "average_state_every": NEVER}),
    "hivemind, int8, no state": ("hivemind", {"codec": "int8", "average_state_every": NEVER}),
    "hivemind, powersgd 32, no state": ("hivemind", {"powersgd": 32, "average_state_every": NEVER}),
    "Ray, parameter server, fp32": ("ray", {"mode": "sync"}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="of a run (default: 300; quick: 6)")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="settings with one of these in their names (default: all)"
    )
    parser.add_argument(
        "--peers", action="store_true", help="named peers, DDP and a few of ours; kept as p3-peers.json"
    )


def run(session: Session, arguments: argparse.Namespace) -> None:
    steps = arguments.steps or (6 if session.quick else 300)
    settings, named = _chosen(session, arguments)
    tokens = steps * WORKERS * SHAPE.batch_size * SHAPE.max_seq_len
    session.parameters = {**SHAPE.sets(), "workers": WORKERS, "steps": steps, "tokens": tokens, "target": TARGET}

    # Every setting once.
    peer = train_ddp(steps, seed=SEED)
    rows = [_against(peer, peer) | {"setting": "torch DDP, fp32", "within": "peer"}]
    for name in named:
        rows.append(_against(peer, train_named(name, steps, seed=SEED)) | {"setting": name, "within": "peer"})
        _tell(rows[-1])
    for setting in settings:
        rows.append(_against(peer, train_ours(setting, steps, seed=SEED)) | {"setting": setting.name})
        _tell(rows[-1])
    _check_same_work(rows)
    show(session, f"{steps} steps, {tokens:,} tokens, {WORKERS} workers", rows, COLUMNS)
    if arguments.peers:
        session.name = "p3-peers"
    else:
        _confirm_best(session, [row for row in rows if row["within"] == "yes"], steps, peer)


def _chosen(session: Session, arguments: argparse.Namespace) -> tuple[list[Setting], list[str]]:
    """Of ours, and of named peers."""

    def wanted(name: str) -> bool:
        return arguments.only is None or any(word in name for word in arguments.only)

    settings = [s for s in SETTINGS if wanted(s.name)]
    named = {name: what for name, what in NAMED.items() if wanted(name)}
    if not settings and not named:
        names = ", ".join([*NAMED, *(s.name for s in SETTINGS)])
        raise SmolclusterError(f"no setting has '{' or '.join(arguments.only)}' in its name: {names}")
    if arguments.peers:
        settings = [s for s in settings if s.name in BESIDE]
    if session.quick and arguments.only is None:
        settings = [s for s in settings if s.name in ("syncps, topk 0.01", "edp, int8, pulls every 4")]
        named = {
            name: what for name, what in named.items() if name in ("hivemind, fp32", "Ray, parameter server, fp32")
        }
    return settings, usable(named)


def _confirm_best(session: Session, good: list[dict[str, Any]], steps: int, peer: Message) -> None:
    """The best that holds for other seeds as well."""
    confirmed: list[dict[str, Any]] = []
    peers = {SEED: peer}
    for row in sorted(good, key=lambda row: float(row["bytes"])):
        setting = next(s for s in SETTINGS if s.name == row["setting"])
        confirmed.append(_confirm(session, setting, row, steps, peers))
        if confirmed[-1]["within"] == "yes":
            break
    if confirmed:
        title = f"the fewest bytes within {WITHIN}, with other seeds ({session.repeats} in all)"
        show(session, title, confirmed, ["setting", "fewer_bytes", "difference", "target", "verdict", "within"])
    else:
        print(f"no setting came within {WITHIN} of DDP's loss\n")


def _confirm(
    session: Session, setting: Setting, first: Mapping[str, Any], steps: int, peers: dict[int, Message]
) -> dict[str, Any]:
    samples = [dict(first)]
    for seed in range(SEED + 1, SEED + session.repeats):
        if seed not in peers:
            peers[seed] = train_ddp(steps, seed=seed)
        samples.append(_against(peers[seed], train_ours(setting, steps, seed=seed)))
    difference = statistics.median(float(sample["difference"]) for sample in samples)
    fewer = statistics.median(float(sample["fewer_bytes"]) for sample in samples)
    return {
        "setting": setting.name,
        "fewer_bytes": fewer,
        "difference": difference,
        "target": f">= {TARGET:g}",
        "verdict": "met" if fewer >= TARGET else "missed",
        "within": "yes" if difference <= WITHIN else "no",
        "samples": samples,
    }


def _against(peer: Message, ours: Message) -> dict[str, Any]:
    difference = ours["val_loss"] - peer["val_loss"]
    return {
        **ours,
        "fewer_bytes": peer["bytes"] / ours["bytes"],
        "fewer_per_step": peer["bytes_per_step"] / ours["bytes_per_step"],
        "difference": difference,
        "within": "yes" if difference <= WITHIN else "no",
    }


def _tell(row: Mapping[str, Any]) -> None:
    figures = f"{row['fewer_bytes']:8.1f} x fewer bytes, loss {row['difference']:+.4f}, {row['seconds']:.0f} s"
    print(f"  {row['setting']:<32}{figures}", flush=True)


def _check_same_work(rows: list[dict[str, Any]]) -> None:
    """In fp32 syncps and Ray's server compute what DDP computes; sums are taken in another order."""
    for row in rows:
        if row["setting"] in ("syncps, fp32", "Ray, parameter server, fp32") and abs(row["difference"]) > 0.01:
            raise SmolclusterError(f"{row['setting']} lost DDP's path: loss {row['difference']:+.4f}")


# Ours


def train_ours(setting: Setting, steps: int, *, seed: int) -> Message:
    sets = {"training.seed": seed, "logging.log_interval": steps, **setting.sets()}
    config = elastic_config(SHAPE, workers=WORKERS, steps=steps, strategy=setting.strategy, sets=sets)
    with tempfile.TemporaryDirectory() as folder, ElasticRun(config, Path(folder) / "run") as run:
        started = time.perf_counter()
        run.watch(within_s=60.0 + 5.0 * steps)
        seconds = time.perf_counter() - started
    summary = run.summary
    total = int(summary["bytes_sent"])  # by all of them
    # All goes to or from the server; its first row has what travels once, at joining.
    first, last = (row.bytes_sent + row.bytes_received for row in (run.rows[0], run.rows[-1]))
    if not 0.9 < last / total < 1.1 and steps > 20:
        raise SmolclusterError(f"{setting.name}: the summary has {total} bytes, and the server's last row {last}")
    return _result(total, (total - first) / (steps - 1), val_loss=float(summary["val_loss"]), seconds=seconds)


def _result(total: int, per_step: float, **figures: float) -> Message:
    return {"bytes": total, "megabytes": total / 1e6, "bytes_per_step": per_step, **figures}


# Peers


def peer_config(steps: int, *, seed: int) -> Config:
    sets = {"training.seed": seed, "training.device": "cpu", "strategy.name": "allreduce"}
    return make_config(SHAPE, steps=steps, sets=sets)


def train_ddp(steps: int, *, seed: int) -> Message:
    spec = {"config": peer_config(steps, seed=seed).model_dump(mode="json")}
    with World("benchmarks.p3", size=WORKERS, spec=spec) as world:
        started = time.perf_counter()
        answers = world.ask({"steps": steps})
        seconds = time.perf_counter() - started
    first, total = (sum(int(answer[key]) for answer in answers) for key in ("before", "sent"))
    if total == 0:
        raise SmolclusterError("this kernel does not count the bytes of sockets (TCP_INFO of Linux is needed)")
    return _result(total, (total - first) / steps, val_loss=float(answers[0]["val_loss"]), seconds=seconds)


def train_named(name: str, steps: int, *, seed: int) -> Message:
    """A program of its own. Bytes of a step, and seconds, are counted from the end of the first step."""
    package, order = NAMED[name]
    config, common = peer_config(steps, seed=seed), {"steps": steps, "every": 1, **order}
    if package == "ray":
        running = ray_server(config, machines=range(1, WORKERS + 1), **common)
    else:
        running = hivemind_peers(config, size=WORKERS, lockstep=True, **common)
    rows, first = [], 0
    with running as program:
        for row in program.rows():
            rows.append(row)
            if len(rows) == 1:
                first = program.bytes_sent()
        total = program.bytes_sent()
    *taken, last = rows
    per_step, seconds = (total - first) / (steps - 1), taken[-1]["time"] - taken[0]["time"]
    result = _result(total, per_step, val_loss=float(last["val_loss"]), seconds=seconds * steps / (steps - 1))
    return result | {"curve": [row["loss"] for row in taken], "samples_read": sum(r.get("samples", 0) for r in taken)}


def setup(spec: Message, group: Group) -> Callable[[Message], Message]:
    """One rank of DDP."""
    work = Work(Config.model_validate(spec["config"]), rank=group.rank, size=group.size)
    ddp = DDPTraining(work.model, work.recipe, gradient_as_bucket_view=True)

    def handle(message: Message) -> Message:
        before, _ = kernel_bytes()
        for _ in range(message["steps"]):
            ddp.run([work.batch()])
        sent, _ = kernel_bytes()
        group.barrier()  # nobody closes a connection before everybody has counted
        return {"before": before, "sent": sent, "val_loss": work.validation_loss() if group.rank == 0 else None}

    return handle


if __name__ == "__main__":
    serve(setup)
