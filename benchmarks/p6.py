"""P6: the most memory a rank takes, ZeRO stages 0 to 3 on four ranks, against the formula, FSDP2 alone, and the forecast.

Compared, for P parameters on N ranks with Adam, in bytes:

    stage                  0      1              2              3
    ZeRO, mixed precision  16 P   4 P + 12 P/N   2 P + 14 P/N   16 P/N     half parameters and gradients, three states in fp32
    the same in fp32       16 P   8 P + 8 P/N    4 P + 12 P/N   16 P/N
    what this run holds    `Strategy.plan`; see fsdp.py

How: four real processes on CPUs, each with a tracker of its tensors (`compute/memory_tracker.py`); the highest peak counts.
Beside it the growth of the process in resident memory, whose peak the kernel keeps. With --device cuda one rank runs on the GPU
in a fake group of four, whose collectives do nothing, and torch's allocator counts; the workspace of the GPU's libraries is
added to the forecast. Samples are few, so that activations are small. The peer is FSDP2 as in its tutorial, AdamW on
`fully_shard`. The forecast is that of `smolcluster plan --memory`.

Targets: at most 1.05 of ZeRO's formula, states and peak. The forecast: median error at most 5 %, never more than 5 % too low.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

import torch

from benchmarks.harness import Session
from benchmarks.harness.pipes import ask
from benchmarks.harness.processes import started
from benchmarks.harness.workload import Shape, make_config
from benchmarks.harness.world import World
from smolcluster.compute.device import choose_device
from smolcluster.config.schema import Config
from smolcluster.errors import SmolclusterError, UserError
from smolcluster.planner.candidates import Choice
from smolcluster.planner.forecast import Workload, forecast
from smolcluster.planner.memory_estimate import Activations
from smolcluster.tasks.find import find_task

EXAMPLE = "python -m benchmarks p6 --stages 1 3"
RANKS, LIMIT, ERROR = 4, 1.05, 0.05
SHAPES = {
    "tiny": Shape("tiny", 64, 4, 4, 32, 1),
    "85m": Shape("85m", 768, 12, 12, 32, 1),
    "1.5b": Shape("1.5b", 1600, 48, 25, 64, 1, vocab_size=50257),
    "355m": Shape("355m", 1024, 24, 16, 64, 1, vocab_size=50257),
}
COLUMNS = [
    *("precision", "stage", "formula", "states", "peak", "states_ratio", "peak_ratio", "verdict"),
    *("fsdp2", "ours_to_fsdp2", "forecast", "error", "resident"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3], help="default: all")
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], help="default: both; quick: fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--shape", choices=SHAPES, help="default: 85m; cuda: 355m; quick: tiny")


def run(session: Session, arguments: argparse.Namespace) -> None:
    cuda = arguments.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no NVIDIA GPU here; leave it out")
    name = arguments.shape or ("tiny" if session.quick else "355m" if cuda else "85m")
    ranks = 2 if session.quick else RANKS
    session.name = "p6-gpu" if cuda else "p6"
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # else glibc keeps much of what was freed, which counts as resident
    session.parameters = {
        **SHAPES[name].overrides(),
        "ranks": ranks,
        "limit": LIMIT,
        "error": ERROR,
        "device": arguments.device,
    }
    rows = []
    for precision in arguments.precision or (["fp32"] if session.quick else ["fp32", "bf16"]):
        config = make_config(
            SHAPES[name],
            steps=10,
            overrides={"strategy.name": "fsdp", "training.device": arguments.device, "training.precision": precision},
        )
        subject = Workload.open(config, find_task(config), num_ranks=ranks, device=choose_device(arguments.device))
        for stage in arguments.stages:
            rows.append(compare(session, subject, stage, precision))
            print(f"  {precision}, stage {stage}: {rows[-1]['verdict']}", flush=True)
    session.show(f"bytes of a rank, {subject.shape.parameters:,} parameters on {ranks} ranks", rows, COLUMNS)
    missed = [f"{row['precision']} {row['stage']}" for row in rows if row["verdict"] != "met"]
    errors = [row["error"] for row in rows]
    session.conclude(f"at most {LIMIT} x the formula", missed)
    low = min(errors)
    good = statistics.median(map(abs, errors)) <= ERROR and low >= -ERROR
    print(
        f"forecast, median error at most {ERROR:.0%} and never more than that too low: {'met' if good else 'missed'}, "
        f"median {statistics.median(map(abs, errors)):.1%}, lowest {low:+.1%}\n"
    )


def compare(session: Session, subject: Workload, stage: int, precision: str) -> dict[str, Any]:
    """One row: measured, peer, formula, forecast."""
    size, count = len(subject.nodes), subject.shape.parameters
    options: dict[str, Any] = {"fsdp_stage": stage}
    if stage == 1 and precision != "fp32":
        options |= {"param_dtype": precision}  # the others take it from the precision
    message = {"who": "ours", "options": options}
    seen = [most(measure(subject.config, message, size)) for _ in range(session.repeats)]
    peers = (
        [most(measure(subject.config, message | {"who": "FSDP2"}, size)) for _ in range(session.repeats)]
        if stage >= 2
        else []
    )
    choice = Choice(label=f"fsdp {stage}", strategy="fsdp", options=options)
    cost = subject.with_choice(choice).placement.cost
    estimate = forecast(subject, choice, ways=[Activations()])
    if estimate.cannot or not estimate.seats[0].ways:
        raise SmolclusterError(f"stage {stage} could not be estimated: {estimate.cannot or estimate.seats[0].note}")
    foretold = estimate.seats[0].ways[Activations()].at_peak.total + seen[0]["workspace"]
    peak = round(statistics.median(counted(one) for one in seen))
    states = round(statistics.median(_states(one) for one in seen))
    formula = zero(stage, precision, count, size)
    peer = round(statistics.median(counted(one) for one in peers)) if peers else None
    resident = [one["resident"] for one in seen if "resident" in one]
    return {
        "precision": precision,
        "stage": stage,
        "formula": formula,
        "own_formula": cost.states_bytes,
        "states": states,
        "peak": peak,
        "states_ratio": states / formula,
        "peak_ratio": peak / formula,
        "verdict": "met" if peak <= LIMIT * formula else "states met" if states <= LIMIT * formula else "missed",
        "fsdp2": peer,
        "ours_to_fsdp2": None if peer is None else peak / peer,
        "forecast": foretold,
        "error": foretold / peak - 1,
        "resident": round(statistics.median(resident)) if resident else None,
        "samples": seen,
        "peer_samples": peers,
    }


def zero(stage: int, precision: str, parameters: int, ranks: int) -> int:
    """Return ZeRO's formula: bytes of each parameter that every rank has, and bytes that are sharded."""
    table = {
        "fp32": [(16, 0), (8, 8), (4, 12), (0, 16)],
        "bf16": [(16, 0), (4, 12), (2, 14), (0, 16)],
    }
    stay, shared = table[precision][stage]
    return stay * parameters + shared * parameters // ranks


def counted(sample: dict[str, Any]) -> int:
    """Return the peak by the allocator, if it counts; else by the tracker."""
    allocated = sample.get("allocated")
    return int(sum(sample["peak"]["at"].values())) if allocated is None else int(allocated)


def _states(sample: dict[str, Any]) -> int:
    each = sample["peak"]["each"]
    return int(each["parameters"] + each["gradients"] + each["optimizer"])


def most(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return max(ranks, key=counted)


def measure(config: Config, message: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Return what each rank of a new world has measured; on a GPU, what its only real rank has."""
    plain = config.model_dump(mode="json")
    if config.training.device == "cpu":
        with World("benchmarks.programs.p6_rank", size=size, spec={"config": plain}) as world:
            return world.ask(message)
    command = [sys.executable, "-m", "benchmarks.programs.p6_rank", "alone"]
    with started(command, environ={"OMP_NUM_THREADS": "4"}, listen=True) as process:
        return [ask(process, config=plain, size=size, message=message)]
