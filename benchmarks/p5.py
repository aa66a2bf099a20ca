"""P5: the bubble of a pipeline, against its formula.

Compared: the idle time of ranks in a step, as a share of their working time, measured from the timeline of a real step
(`--draw-schedule`), with the formula:

    gpipe, 1f1b         (p-1)/m
    interleaved         (p-1)/(v m)
    zero-bubble, zbv    towards 0: shown, without a verdict

How: p processes run layers that sleep instead of computing (`tasks/resting.py`), so that they do not compete for cores. The
overhead of the engine, sending included, counts against us.

Target: within 3 points of the formula, for p = 4 and m = 8, 16, 32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import smolcluster
from benchmarks.harness import Session
from benchmarks.tasks import resting

EXAMPLE = "python -m benchmarks p5 --only 1f1b"
RANKS, POINTS = 4, 3.0
TASK = f"{Path(resting.__file__).resolve()}:Resting"
STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2, "zbv": 2}  # a rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=STAGES, help="one schedule (default: all)")
    parser.add_argument("--microbatches", type=int, nargs="+", help="default: 8 16 32; quick: 4")
    parser.add_argument("--rest", type=float, default=0.05, help="seconds a layer takes forward (default: 0.05)")


def run(session: Session, arguments: argparse.Namespace) -> None:
    counts = arguments.microbatches or ([4] if session.quick else [8, 16, 32])
    ranks = 2 if session.quick else RANKS
    os.environ[resting.REST] = str(arguments.rest)
    session.parameters = {"ranks": ranks, "rest_s": arguments.rest, "points": POINTS}
    rows = []
    for schedule, per_rank in STAGES.items():
        if arguments.only not in (None, schedule):
            continue
        for count in counts:
            samples = [measure(schedule, ranks, per_rank, count) for _ in range(session.repeats)]
            rows.append(row(schedule, ranks, per_rank, count, samples))
            print(f"  {schedule}, {count} micro-batches: {rows[-1]['verdict']}", flush=True)
    session.show(
        "idle time per working time",
        rows,
        ["schedule", "microbatches", "formula", "bubble", "points", "verdict"],
    )
    missed = [f"{r['schedule']} {r['microbatches']}" for r in rows if r["verdict"] == "missed"]
    session.conclude(f"within {POINTS:g} points", missed)


def row(schedule: str, ranks: int, per_rank: int, count: int, samples: list[float]) -> dict[str, Any]:
    bubble = statistics.median(samples)
    formula = {
        "gpipe": (ranks - 1) / count,
        "1f1b": (ranks - 1) / count,
        "interleaved": (ranks - 1) / (per_rank * count),
    }.get(schedule)
    points = None if formula is None else 100 * (bubble - formula)
    return {
        "schedule": schedule,
        "microbatches": count,
        "formula": formula,
        "bubble": bubble,
        "points": points,
        "samples": samples,
        "verdict": "shown" if points is None else "met" if points <= POINTS else "missed",
    }


def measure(schedule: str, ranks: int, per_rank: int, count: int) -> float:
    """Idle time over working time, in one step of a run."""
    os.environ[resting.LAYERS] = str(ranks * per_rank)
    with tempfile.TemporaryDirectory() as folder:
        smolcluster.train(
            TASK,
            strategy="pipeline",
            workers=ranks,
            steps=5,
            run_dir=Path(folder) / "run",
            overrides={
                "training.batch_size": count,
                "training.checkpoint_steps": 0,
                "training.device": "cpu",
                "strategy.schedule": schedule,
                "strategy.num_microbatches": count,
                "strategy.stages_per_rank": per_rank,
                "strategy.draw_schedule": True,
            },
            sinks=[],
        )
        idle = float(json.loads((Path(folder) / "run" / "schedule.json").read_text())["idle"])
    return idle / (1 - idle)
