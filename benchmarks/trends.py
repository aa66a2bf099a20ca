"""Quality of diloco at equal tokens, and its trends in miniature: H, workers, lost contributions, bits, k.

Work: a GPT of 0.8 M parameters (4 layers of 128, context 64, bytes) on the embedded text, 2,000 steps of 128 samples in all: 20
tokens for each parameter, as the papers train. The learning rate is that of the default configuration, 3e-3. The same weights,
order of samples, learning rates, clipping and number of steps for all, in worlds of ranks over sockets (`harness/methods.py`).
4 workers with 32 samples each, unless the row says otherwise. The loss is that of the whole validation set after the last
step; `perplexity` is the ratio to the synchronous run (`allreduce`) of the same optimizer.

    quality    diloco in fp32 and with each preset, AdamW and Muon inside
    H          local steps between exchanges, fp32
    workers    1 to 8, fp32, 32 samples a step by all of them
    dropped    a share of the contributions is lost, fp32 (`programs/dropped.py`)
    bits       of a number that is sent: preset wan with 1, 2, 4 and 16 bits; all numbers in int4 and fp32, rounds as in wan
    k          numbers sent of each block of 4096: preset wan with 32 to 512
    average    preset wan, a number averaged over the workers that sent it, or over all
    outer      the outer optimizer, fp32: the paper's Nesterov, one with less momentum, the plain mean

The last column is what a paper reports, with its arXiv number: losses of far larger models after far more tokens, of which only
the order can be compared. Empty: no figure known.

`--repeats` N: N seeds, of which the median counts (default: 1). Two seeds of one setting differ by a few hundredths of loss;
a ratio is taken with the same seed. With `--jobs` J, J worlds run at once: on 16 cores 4, of 4 ranks with one thread each. On a
GPU the ranks share it, and their tensors still go over sockets.

Target: perplexity with 4 workers at most 1.01 times that of the synchronous run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Session
from benchmarks.harness.jobs import add_job_arguments, call_each
from benchmarks.harness.methods import MUON, Method, diloco, steps_of, training
from benchmarks.harness.workload import Shape
from smolcluster.config.options import DiLoCoOptions
from smolcluster.errors import UserError

EXAMPLE = "python -m benchmarks trends --jobs 4"
WORKERS, SAMPLES, SEED = 4, 128, 42
STEPS, RATE, WARMUP = 2000, 3e-3, 30
LIMIT = 1.01  # of perplexity
MOST_WORKERS = 8
COLUMNS = ["setting", "val_loss", "perplexity", "megabytes", "paper"]
STREAMING, MULOCO, SPARSELOCO = "2501.18512", "2505.23725", "2508.15706"


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    method: Method
    workers: int = WORKERS
    dropped: float = 0.0  # share of the contributions
    paper: str = ""

    @property
    def key(self) -> str:
        """Return a key that settings share if they train alike."""
        method, options = self.method, dict(self.method.options)
        if method.strategy == "diloco":
            options = DiLoCoOptions.model_validate(options).model_dump(exclude={"preset"})
        return json.dumps([method.strategy, options, method.optimizer, self.workers, self.dropped], sort_keys=True)

    @property
    def synchronous(self) -> Setting:
        return Setting(f"allreduce, {self.method.optimizer}", Method(optimizer=self.method.optimizer))


def _wan(**options: Any) -> Method:
    return diloco("wan", **options)


def _quality() -> list[Setting]:
    papers = {
        ("fp32", "adamw"): f"3.142, synchronous 3.158 ({MULOCO})",
        ("fp32", MUON): f"3.120, synchronous AdamW 3.158 ({MULOCO})",
        ("lan", "adamw"): f"2.66 with FP4, synchronous 2.67 ({STREAMING})",
        ("wan", "adamw"): f"top-k of 1-3 % in 2 bits: below dense DiLoCo ({SPARSELOCO})",
    }
    settings = []
    for optimizer in ("adamw", MUON):
        for preset in (None, "lan", "wan"):
            name = preset or "fp32"
            method = diloco(preset, optimizer=optimizer)
            settings.append(Setting(f"{name}, {optimizer}", method, paper=papers.get((name, optimizer), "")))
    return settings


def _h() -> list[Setting]:
    papers = {30: f"2.50 ({STREAMING})", 100: f"2.53 ({STREAMING})"}
    return [Setting(f"H {h}", diloco(inner_steps=h), paper=papers.get(h, "")) for h in (5, 15, 30, 60, 100)]


def _workers() -> list[Setting]:
    papers = {2: f"2.48 ({STREAMING})", 4: f"2.50 ({STREAMING})"}
    return [Setting(f"{n} workers", diloco(), workers=n, paper=papers.get(n, "")) for n in (1, 2, 4, 8)]


def _dropped() -> list[Setting]:
    return [Setting(f"{share:.0%} dropped", diloco(), dropped=share) for share in (0.0, 0.1, 0.3, 0.5)]


def _bits() -> list[Setting]:
    rounds: dict[str, Any] = {"inner_steps": 15, "outer_lr": 0.9, "outer_momentum": 0.5}  # those of wan
    papers = {2: f"below dense DiLoCo ({SPARSELOCO})"}
    sparse = [Setting(f"{bits or 16} bits", _wan(codec_bits=bits), paper=papers.get(bits, "")) for bits in (1, 2, 4, 0)]
    int4 = Setting(
        "dense, 4 bits", diloco(codec="int4", **rounds), paper=f"FP4 and 4 bits: as fp32 ({STREAMING}, {MULOCO})"
    )
    return [*sparse, int4, Setting("dense, fp32", diloco(**rounds))]


def _k() -> list[Setting]:
    papers = dict.fromkeys((64, 128), f"1-3 %: below dense DiLoCo ({SPARSELOCO})")
    return [
        Setting(f"k {k} ({k / 4096:.1%})", _wan(codec_k=k), paper=papers.get(k, "")) for k in (32, 64, 128, 256, 512)
    ]


def _average() -> list[Setting]:
    paper = f"divides by all; its code by those who sent ({SPARSELOCO})"
    return [Setting("over senders", _wan(), paper=paper), Setting("over all", _wan(average="all"))]


def _outer() -> list[Setting]:
    rates = {"0.7, momentum 0.9": (0.7, 0.9), "0.9, momentum 0.5": (0.9, 0.5), "1, no momentum": (1.0, 0.0)}
    return [
        Setting(f"{name}, H {h}", diloco(outer_lr=rate, outer_momentum=momentum, inner_steps=h))
        for name, (rate, momentum) in rates.items()
        for h in (15, 30)
    ]


GROUPS = {
    "quality": _quality,
    "H": _h,
    "workers": _workers,
    "dropped": _dropped,
    "bits": _bits,
    "k": _k,
    "average": _average,
    "outer": _outer,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help=f"of a run (default: {STEPS}; quick: 6)")
    parser.add_argument("--samples", type=int, help=f"of a step (default: {SAMPLES}; quick: 32)")
    parser.add_argument("--rate", type=float, default=RATE, help=f"learning rate (default: {RATE:g})")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="of these groups (default: all; quick: dropped)")
    add_job_arguments(parser, "worlds")


def run(session: Session, arguments: argparse.Namespace) -> None:
    steps, samples = (
        arguments.steps or (6 if session.quick else STEPS),
        arguments.samples or (32 if session.quick else SAMPLES),
    )
    if steps < 1:
        raise UserError(f"--steps {steps}: at least 1 is needed")
    if samples < 1 or samples % MOST_WORKERS:
        raise UserError(f"--samples {samples}: a multiple of {MOST_WORKERS} is needed, for as many workers")
    session.repeats = arguments.repeats or 1
    groups = {name: GROUPS[name]() for name in arguments.only or (["dropped"] if session.quick else GROUPS)}
    if session.quick:
        groups = {name: settings[-2:] for name, settings in groups.items()}
    session.parameters = {
        **shape_of(WORKERS, samples).overrides(),
        "samples": samples,
        "workers": WORKERS,
        "steps": steps,
        "learning_rate": arguments.rate,
        "device": arguments.device,
        "limit": LIMIT,
    }

    seeds = range(SEED, SEED + session.repeats)
    how = How(steps, samples, arguments.rate, arguments.device)
    done = _done([s for settings in groups.values() for s in settings], how, seeds, arguments)
    for name, settings in groups.items():
        references = {s.synchronous.key: s.synchronous for s in settings}.values()
        rows = [_row(setting, done, seeds) for setting in [*references, *settings]]
        if name == "quality":
            for row in rows[len(references) :]:
                row |= {"target": f"<= {LIMIT}", "verdict": "met" if row["perplexity"] <= LIMIT else "missed"}
        columns = [*COLUMNS[:-1], "target", "verdict", COLUMNS[-1]] if name == "quality" else COLUMNS
        session.show(f"{name}: {steps} steps of {samples} samples", rows, columns)


@dataclass(frozen=True, slots=True)
class How:
    """What all settings have in common."""

    steps: int
    samples: int  # of a step
    rate: float
    device: str


def shape_of(workers: int, samples: int) -> Shape:
    return Shape("0.8m", 128, 4, 4, 64, samples // workers)


Done = Mapping[tuple[str, int], Mapping[str, float]]


def _done(settings: Sequence[Setting], how: How, seeds: Sequence[int], arguments: argparse.Namespace) -> Done:
    """Train every setting and its synchronous run, once with each seed. Those that take longest begin first."""
    wanted = {each.key: each for setting in settings for each in (setting, setting.synchronous)}
    first = sorted(wanted.values(), key=lambda setting: (setting.method.optimizer != MUON, -setting.workers))
    orders = [(setting, how, seed) for setting in first for seed in seeds]
    results = call_each(train, orders, jobs=arguments.jobs, keep=arguments.keep)
    return {(setting.key, seed): result for (setting, _, seed), result in zip(orders, results, strict=True)}


def train(setting: Setting, how: How, seed: int) -> dict[str, float]:
    """Train once. Return the loss, and the bytes sent by all workers."""
    shape, size = shape_of(setting.workers, how.samples), setting.workers
    overrides = {
        "training.learning_rate": how.rate,
        "training.device": how.device,
        "lr_schedule.warmup_iters": WARMUP,
    }
    with training(
        setting.method, shape, steps=how.steps, size=size, seed=seed, dropped=setting.dropped, overrides=overrides
    ) as world:
        done = steps_of(world, how.steps, val_samples=None, last=True)
    print(f"  {setting.name:<24}loss {done['val_loss']:.4f}, {done['seconds']:.0f} s", flush=True)
    return {"val_loss": done["val_loss"], "megabytes": done["bytes"] / 1e6, "seconds": done["seconds"]}


def _row(setting: Setting, done: Done, seeds: Sequence[int]) -> dict[str, Any]:
    mine, peer = ([done[each.key, seed] for seed in seeds] for each in (setting, setting.synchronous))
    ratios = [math.exp(m["val_loss"] - p["val_loss"]) for m, p in zip(mine, peer, strict=True)]
    return {
        "setting": setting.name,
        "workers": setting.workers,
        "val_loss": statistics.median(m["val_loss"] for m in mine),
        "perplexity": statistics.median(ratios),
        "megabytes": statistics.median(m["megabytes"] for m in mine),
        "paper": setting.paper,
        "samples": [dict(m) for m in mine],
    }
