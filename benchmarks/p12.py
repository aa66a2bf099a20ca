"""P12: the bytes that every strategy sends and receives, against its formula.

Elastic plane. Compared: `Strategy.plan`, which is the formula in the strategy's docstring, with the kernel's count on the
sockets of each worker (plain TCP on loopback): syncps, edp and elastic allreduce with every codec, fsdp stages 0 and 1, on
2 and 3 workers. The worker with the most bytes counts.

How: a worker reads its counters at the beginning of every step (`tasks/counted.py`); a step's bytes are the median over all
windows of half the run, which excludes the state that is sent at joining and bytes in flight at a reading. Included are
heartbeats and the framing of messages: a header of 128 bytes, a checksum of 4, JSON. The column `over` has all bytes beyond
the formula.

Target: at most 1.02 of the formula, and 256 bytes for each message that `cost` counts.

Mesh plane (`harness/mesh_bytes.py`): allreduce, fsdp stages 0 to 3 and hybrid, pipeline, tensor and mesh over gloo.
Compared: the formula of each strategy's page, what the run itself has counted, and the kernel. Target: at most 1.02 of what is
counted, headers included, and no byte missing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Session, mesh_bytes
from benchmarks.harness.elastic_run import ElasticRun, elastic_config, options_of
from benchmarks.harness.workload import Case, Shape
from benchmarks.tasks import counted
from smolcluster.comm.codecs import CODECS
from smolcluster.config.schema import Config
from smolcluster.errors import SmolclusterError
from smolcluster.parallel.placement import Cost, Node
from smolcluster.parallel.placement import Shape as Sizes
from smolcluster.tasks.find import find_task

EXAMPLE = "python -m benchmarks p12 --workers 2 --only syncps"
LIMIT = 1.02
HEADER_BYTES = 256  # around each message: header, checksum, JSON
INTERVAL = 4  # of the pulls of weights
TASK = f"{Path(counted.__file__).resolve()}:Counted"
COLUMNS = [
    "strategy",
    "workers",
    "formula_sent",
    "sent",
    "ratio_sent",
    "formula_received",
    "received",
    "ratio_received",
]


CASES = [
    *(
        Case(f"{strategy}, {codec}", strategy, {"codec": codec, "worker_update_interval": INTERVAL, **options})
        for strategy, options in (
            ("syncps", {}),
            ("edp", {"balance": False}),
        )  # a step is one micro-batch, which is counted
        for codec in CODECS
    ),
    Case("allreduce", "allreduce"),
    *(Case(f"allreduce, {codec}", "allreduce", {"codec": codec}) for codec in CODECS if codec != "fp32"),
    Case("fsdp 0", "fsdp", {"fsdp_stage": 0}),
    Case("fsdp 1", "fsdp", {"fsdp_stage": 1}),
    Case("fsdp 1, int8", "fsdp", {"fsdp_stage": 1, "codec": "int8"}),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="+", help="world sizes (default: 2 3; quick: 2)")
    names = sorted({case.strategy for case in CASES} | {case.strategy for case in mesh_bytes.CASES})
    parser.add_argument("--only", choices=names, help="one strategy (default: all)")
    parser.add_argument("--plane", choices=["elastic", "mesh"], help="one plane (default: both)")
    parser.add_argument("--steps", type=int, default=0, help="of a run (default: 60; quick: 20)")


def run(session: Session, arguments: argparse.Namespace) -> None:
    session.parameters = {"limit": LIMIT, "header_bytes": HEADER_BYTES}
    if arguments.plane != "mesh":
        run_elastic(session, arguments)
    if arguments.plane != "elastic":
        run_mesh(session, arguments)


def run_elastic(session: Session, arguments: argparse.Namespace) -> None:
    steps = arguments.steps or (20 if session.quick else 60)
    sizes = arguments.workers or ([2] if session.quick else [2, 3])
    # Few samples: bytes do not depend on them.
    shape = Shape("0.8m", 128, 4, 4, 64, 1) if not session.quick else Shape("tiny", 64, 2, 2, 16, 1)
    cases = [case for case in CASES if arguments.only in (None, case.strategy)]
    if session.quick:
        cases = [case for case in cases if case.options.get("codec") in (None, "fp32", "powersgd")]
    session.parameters["elastic"] = {**shape.overrides(), "steps": steps}
    rows = []
    for size in sizes:
        for case in cases:
            config = counted_config(shape, case, workers=size, steps=steps)
            rows.append({"strategy": case.name, "workers": size, **compare(config, moved(config))})
            print(f"  {case.name} on {size} workers: {rows[-1]['verdict']}", flush=True)
    conclude(session, "elastic plane: bytes per step of a worker", rows, [*COLUMNS, "over", "verdict"])


def run_mesh(session: Session, arguments: argparse.Namespace) -> None:
    steps = arguments.steps or (10 if session.quick else 20)
    shape = Shape("0.8m", 128, 4, 4, 64, 8)
    cases = [case for case in mesh_bytes.CASES if arguments.only in (None, case.strategy)]
    cases = [case for case in cases if case.workers in (arguments.workers or range(1, 3 if session.quick else 9))]
    session.parameters["mesh"] = {**shape.overrides(), "steps": steps}
    rows = []
    for case in cases:
        rows.append(mesh_bytes.measure(case, shape, steps=steps))
        print(f"  {case.name} on {case.workers} workers: {rows[-1]['verdict']}", flush=True)
    conclude(session, "mesh plane: bytes per step of the rank that is furthest off", rows, mesh_bytes.COLUMNS)


def conclude(session: Session, title: str, rows: list[dict[str, Any]], columns: list[str]) -> None:
    if not rows:
        return
    session.show(title, rows, columns)
    missed = [f"{row['strategy']} on {row['workers']}" for row in rows if row["verdict"] != "met"]
    session.conclude(f"at most {LIMIT} x and headers", missed)


def counted_config(shape: Shape, case: Case, *, workers: int, steps: int) -> Config:
    overrides = {"task": TASK, "logging.log_interval": 10 * steps, **case.overrides()}
    return elastic_config(shape, workers=workers, steps=steps, strategy=case.strategy, overrides=overrides)


def moved(config: Config) -> list[tuple[float, float]]:
    """Return what each worker sent and received in a step."""
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        counts.mkdir()
        with ElasticRun(config, Path(folder) / "run", environ={counted.FOLDER: str(counts)}) as run:
            run.watch(timeout_s=300.0)
        return steps_of(counts, config)


def steps_of(counts: Path, config: Config) -> list[tuple[float, float]]:
    """Return the same from the counters in a folder."""
    found = [counted.per_step(rows, interval=INTERVAL) for rows in counted.read_counts(counts)]
    if len(found) != config.cluster.num_workers:
        raise SmolclusterError(f"{len(found)} of {config.cluster.num_workers} workers have counted")
    if not all(sent and received for sent, received in found):
        raise SmolclusterError("this kernel does not count the bytes of sockets (TCP_INFO of Linux is needed)")
    return found


def formula(config: Config) -> Cost:
    strategy, options = options_of(config)
    with torch.device("meta"):
        tensors = [tuple(p.shape) for p in find_task(config).model().parameters()]
    sizes = Sizes(parameters=sum(torch.Size(t).numel() for t in tensors), tensors=tensors)
    nodes = [Node(name=f"worker{rank}", stays=False) for rank in range(config.cluster.num_workers or 1)]
    return strategy.plan(options, nodes, sizes).checked().cost


def compare(config: Config, workers: list[tuple[float, float]]) -> dict[str, Any]:
    """Return a row: the formula, the worker with the most bytes, and the verdict."""
    cost = formula(config)
    sent, received = (round(max(values)) for values in zip(*workers, strict=True))
    beyond = max(sent - LIMIT * cost.bytes_sent, received - LIMIT * cost.bytes_received)
    return {
        "formula_sent": cost.bytes_sent,
        "sent": sent,
        "ratio_sent": sent / cost.bytes_sent,
        "formula_received": cost.bytes_received,
        "received": received,
        "ratio_received": received / cost.bytes_received,
        "messages": cost.messages,
        "over": max(sent - cost.bytes_sent, received - cost.bytes_received),
        "samples": workers,
        "verdict": "met" if beyond <= HEADER_BYTES * cost.messages else "missed",
    }
