"""P3: bytes on the wire for the same tokens, at a loss within 0.01 of torch DDP's.

Work: a GPT of 0.8 M parameters (4 layers of 128, context 64, bytes) on the embedded text, 2 workers, the same weights, order of
samples, learning rates and number of steps for all. The loss is that of the whole validation set after the last step.

Compared, on the mesh plane, counted by the kernel: torch DDP in fp32 (gloo), its fp16 and PowerSGD hooks, DiLoCo as a bare
loop, and `diloco` with each preset, AdamW or Muon inside (`harness/methods.py`).

On the elastic plane: the parameter servers and their codecs at several strengths. syncps encodes both ways; its pulls of fp32
weights are switched off (all replicas take the same steps without them), while edp needs them. Their bytes are those that left
any machine, the server included, from the first connection to the last, by the run's summary, which must agree with the
server's rows (`p12` checks the kernel's counters against the formulas).

Named peers, where they are installed (`pip install 'smolcluster[bench]'`), do the same work: a synchronous parameter server
on Ray, and hivemind's Optimizer, where every peer contributes one batch to each epoch (`peers/`): with its defaults, then with
its compressions and "no state": gradients are averaged, parameters are not. Their bytes are what the kernel counts on TCP
connections between machines: hivemind's daemons; Ray's nodes, with the server on a machine of its own, as ours. Traffic between
Ray's processes of one machine does not count.

How: one run of each setting with the first seed. Then the setting with the fewest bytes that meets a goal is run with the other
seeds, beside the run that it is compared with. It counts if the median of the differences meets the goal; else the next one is
tried. Every process computes with one thread. With `--jobs` J, J runs of 2 workers each, or 2 and a server, run at once; named
peers run alone. `--only diloco DDP allreduce bare` leaves out the parameter servers.

Targets: 400 times fewer bytes than DDP at a loss within 0.01 of the synchronous run of the same optimizer (with Muon inside:
`allreduce` with Muon); 2,000 times fewer at a loss not above that of DDP with AdamW, with either optimizer.

`megabytes` and `fewer_bytes` include the weights that are sent once at the start, as DDP's do; in short runs of methods that
exchange seldom these are most of the bytes. `fewer_per_step` excludes them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness import Session
from benchmarks.harness.elastic_run import ElasticRun, elastic_config
from benchmarks.harness.jobs import add_job_arguments, call_each
from benchmarks.harness.methods import BARE, DDP, METHODS, MUON_PEER, OURS, steps_of, training
from benchmarks.harness.peer_programs import hivemind_peers, ray_server, usable
from benchmarks.harness.pipes import Message
from benchmarks.harness.workload import Case, Shape, make_config
from smolcluster.config.schema import Config
from smolcluster.errors import SmolclusterError

EXAMPLE = "python -m benchmarks p3 --jobs 8 --only diloco DDP allreduce bare"
SHAPE = Shape("0.8m", 128, 4, 4, 64, 8)
WORKERS, SEED = 2, 42
WITHIN, NOT_ABOVE = "within", "not_above"
GOALS = {WITHIN: (400.0, 0.01), NOT_ABOVE: (2000.0, 0.0)}  # times fewer bytes, and how much higher the loss may be
NEVER = 10**6  # an interval beyond every run
BESIDE = ("syncps, fp32", "syncps, int8", "syncps, powersgd 32", "edp, int8, pulls every 4")  # of ours, with --peers
BESIDE_METHODS = (BARE, "diloco, fp32", "diloco, wan")
COMPARED = [name for name in METHODS if name not in (DDP, "allreduce")]
COLUMNS = [
    "setting",
    "megabytes",
    "fewer_bytes",
    "fewer_per_step",
    "val_loss",
    "difference",
    "to_same",
    WITHIN,
    NOT_ABOVE,
]


def _syncps(codec: str, **options: Any) -> Case:
    strength = " ".join(f"{value:g}" for value in options.values())
    options = {"codec": codec, "worker_update_interval": NEVER, **options}
    return Case(f"syncps, {codec} {strength}".rstrip(), "syncps", options)


def _edp(codec: str, *, interval: int, **options: Any) -> Case:
    strength = " ".join(f"{value:g}" for value in options.values())
    options = {"codec": codec, "worker_update_interval": interval, **options}
    return Case(f"edp, {codec} {strength}".rstrip() + f", pulls every {interval}", "edp", options)


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
    parser.add_argument("--steps", type=int, help="of a run (default: 990; quick: 6)")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="settings with one of these in their names (default: all)"
    )
    parser.add_argument(
        "--peers", action="store_true", help="named peers, DDP and a few of ours; kept as p3-peers.json"
    )
    add_job_arguments(parser, "runs")


def run(session: Session, arguments: argparse.Namespace) -> None:
    steps = arguments.steps or (6 if session.quick else 990)
    settings, methods, named = _chosen(session, arguments)
    tokens = steps * WORKERS * SHAPE.batch_size * SHAPE.max_seq_len
    session.parameters = {**SHAPE.overrides(), "workers": WORKERS, "steps": steps, "tokens": tokens, "goals": GOALS}

    # Everything once.
    runs = Runs(steps, jobs=arguments.jobs, keep=arguments.keep)
    names = [*methods, *(setting.name for setting in settings)]
    runs.complete(DDP, *names, seeds=[SEED])
    rows = [{**runs.row(DDP, SEED), WITHIN: "peer", NOT_ABOVE: "peer"}]
    for name in named:
        peer = _print_result(name, train_named(name, steps, seed=SEED))
        rows.append({**_against(runs.done[DDP, SEED], peer), "setting": name, WITHIN: "peer"})
    rows += [runs.row(name, SEED) for name in names]
    _check_same_work(rows)
    session.show(f"{steps} steps, {tokens:,} tokens, {WORKERS} workers", rows, COLUMNS)
    if arguments.peers:
        session.name = "p3-peers"
        return
    _confirm_best(session, rows, runs)


def _chosen(session: Session, arguments: argparse.Namespace) -> tuple[list[Case], list[str], list[str]]:
    """Of the parameter servers, of the methods in a world of ranks, and of named peers."""

    def wanted(name: str) -> bool:
        return arguments.only is None or any(word in name for word in arguments.only)

    settings = [s for s in SETTINGS if wanted(s.name)]
    methods = [name for name in COMPARED if wanted(name)]
    named = {name: what for name, what in NAMED.items() if wanted(name)}
    if not settings and not named and not methods:
        names = ", ".join([*NAMED, *COMPARED, *(s.name for s in SETTINGS)])
        raise SmolclusterError(f"no setting has '{' or '.join(arguments.only)}' in its name: {names}")
    if arguments.peers:
        settings = [s for s in settings if s.name in BESIDE]
        methods = [name for name in methods if name in BESIDE_METHODS]
    if session.quick and arguments.only is None:
        settings = [s for s in settings if s.name in ("syncps, topk 0.01", "edp, int8, pulls every 4")]
        methods = [name for name in methods if name in (BARE, "diloco, wan")]
        named = {
            name: what for name, what in named.items() if name in ("hivemind, fp32", "Ray, parameter server, fp32")
        }
    return settings, methods, usable(named)


class Runs:
    """Runs of settings with seeds, each made once."""

    def __init__(self, steps: int, *, jobs: int = 1, keep: Path | None = None) -> None:
        self.steps = steps
        self._how: dict[str, Any] = {"jobs": jobs, "keep": keep}
        self.done: dict[tuple[str, int], Message] = {}

    def complete(self, *names: str, seeds: Iterable[int]) -> None:
        """Make those that are missing, of these settings and of what they are held to, at once."""
        wanted = dict.fromkeys((each, seed) for seed in seeds for name in names for each in (DDP, _same(name), name))
        missing = [each for each in wanted if each not in self.done]
        made = call_each(_train, [(name, self.steps, seed) for name, seed in missing], **self._how)
        self.done.update(zip(missing, made, strict=True))

    def row(self, name: str, seed: int) -> dict[str, Any]:
        peer, same, ours = (self.done[each, seed] for each in (DDP, _same(name), name))
        row = {**_against(peer, ours), "setting": name, "to_same": ours["val_loss"] - same["val_loss"]}
        row[WITHIN] = "yes" if row["to_same"] <= GOALS[WITHIN][1] else "no"
        row[NOT_ABOVE] = "yes" if row["difference"] <= GOALS[NOT_ABOVE][1] else "no"
        return row


def _same(name: str) -> str:
    """Return the synchronous run of the same optimizer."""
    return MUON_PEER if name in OURS and OURS[name].optimizer != "adamw" else DDP


def _train(name: str, steps: int, seed: int) -> Message:
    if name in METHODS:
        return _print_result(name, train_method(name, steps, seed=seed))
    return _print_result(name, train_ours(next(s for s in SETTINGS if s.name == name), steps, seed=seed))


def _print_result(name: str, done: Message) -> Message:
    print(f"  {name:<32}{done['megabytes']:10.2f} MB, loss {done['val_loss']:.4f}, {done['seconds']:.0f} s", flush=True)
    return done


def _confirm_best(session: Session, rows: list[dict[str, Any]], runs: Runs) -> None:
    """For each goal, find the setting with the fewest bytes that holds with other seeds. Try one of each goal at a time."""
    by_bytes = sorted(rows, key=lambda row: float(row["bytes"]))
    left = {goal: [str(row["setting"]) for row in by_bytes if row.get(goal) == "yes"] for goal in GOALS}
    confirmed: dict[str, list[dict[str, Any]]] = {goal: [] for goal in GOALS}
    while trying := [goal for goal in GOALS if left[goal]]:
        runs.complete(*(left[goal][0] for goal in trying), seeds=_seeds(session))
        for goal in trying:
            confirmed[goal].append(_confirm(session, goal, left[goal].pop(0), runs))
            if confirmed[goal][-1]["holds"] == "yes":
                left[goal].clear()
    columns = ["setting", "fewer_bytes", "fewer_per_step", "higher", "target", "verdict", "holds"]
    for goal in GOALS:
        if confirmed[goal]:
            title = f"the fewest bytes, {goal}, with other seeds ({session.repeats} in all)"
            session.show(title, confirmed[goal], columns)
        else:
            print(f"no setting is {goal}\n")


def _seeds(session: Session) -> range:
    return range(SEED, SEED + session.repeats)


def _confirm(session: Session, goal: str, name: str, runs: Runs) -> dict[str, Any]:
    samples = [runs.row(name, seed) for seed in _seeds(session)]
    (target, allowed), column = GOALS[goal], "to_same" if goal == WITHIN else "difference"
    higher, fewer, per_step = (
        statistics.median(float(sample[key]) for sample in samples) for key in (column, "fewer_bytes", "fewer_per_step")
    )
    return {
        "setting": name,
        "fewer_bytes": fewer,
        "fewer_per_step": per_step,
        "higher": higher,
        "target": f">= {target:g}",
        "verdict": "met" if fewer >= target else "missed",
        "holds": "yes" if higher <= allowed else "no",
        "samples": samples,
    }


def _against(peer: Message, ours: Message) -> dict[str, Any]:
    return {
        **ours,
        "fewer_bytes": peer["bytes"] / ours["bytes"],
        "fewer_per_step": peer["bytes_per_step"] / ours["bytes_per_step"],
        "difference": ours["val_loss"] - peer["val_loss"],
    }


def _check_same_work(rows: list[dict[str, Any]]) -> None:
    """In fp32 syncps and Ray's server compute what DDP computes; sums are taken in another order."""
    for row in rows:
        if row["setting"] in ("syncps, fp32", "Ray, parameter server, fp32") and abs(row["difference"]) > 0.01:
            raise SmolclusterError(f"{row['setting']} lost DDP's path: loss {row['difference']:+.4f}")


# Ours


def train_ours(setting: Case, steps: int, *, seed: int) -> Message:
    overrides = {"training.seed": seed, "logging.log_interval": steps, **setting.overrides()}
    config = elastic_config(SHAPE, workers=WORKERS, steps=steps, strategy=setting.strategy, overrides=overrides)
    with tempfile.TemporaryDirectory() as folder, ElasticRun(config, Path(folder) / "run") as run:
        started = time.perf_counter()
        run.watch(timeout_s=60.0 + 5.0 * steps)
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


# Methods in a world of ranks


def train_method(name: str, steps: int, *, seed: int) -> Message:
    with training(name, SHAPE, steps=steps, size=WORKERS, seed=seed) as world:
        done = steps_of(world, steps, val_samples=None, last=True)
    return _result(done["bytes"], done["bytes_now"] / steps, val_loss=done["val_loss"], seconds=done["seconds"])


# Named peers


def peer_config(steps: int, *, seed: int) -> Config:
    overrides = {"training.seed": seed, "training.device": "cpu", "strategy.name": "allreduce"}
    return make_config(SHAPE, steps=steps, overrides=overrides)


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
