"""Bytes on the mesh plane: what fsdp, tensor, pipeline and mesh transfer, from three sources.

    formula    of the strategy's page in docs/, for gloo
    counted    by the run itself, as in metrics.jsonl and summary.json
    kernel     on the sockets of each rank, over gloo on loopback

A = B T D bytes of activations between layers, S bytes of parameters, N ranks. The formulas omit what is small: the reduction of
the gradient norm and of the loss, gradients of norms and biases, and gloo's header of 144 bytes for each piece of a tensor.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import smolcluster
from benchmarks.harness.processes import child_environment, environment
from benchmarks.harness.workload import Case, Shape
from benchmarks.tasks import counted
from smolcluster.config.options import PipelineOptions
from smolcluster.parallel.axes import Axes
from smolcluster.parallel.stages import Cut

TASK = f"{Path(counted.__file__).resolve()}:CountedByRank"
LIMIT = 1.02
COLUMNS = ["strategy", "workers", "formula", "counted", "kernel", "kernel/counted", "kernel/formula", "verdict"]
WARM = 4  # steps that are not counted
VOCABULARY = 256  # the bytes of the embedded text
WORD = 4  # fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCase(Case):
    axes: Axes

    @property
    def workers(self) -> int:
        return self.axes.size


def fsdp(stage: int, workers: int, shards: int | None = None) -> MeshCase:
    name = f"fsdp {stage}" if shards is None else f"fsdp {stage}, hybrid of {shards}"
    axes = Axes(replicas=workers // (shards or workers), shards=shards or workers)
    return MeshCase(name, "fsdp", {"fsdp_stage": stage, "shard_size": shards}, axes=axes)


def mesh(dp: int, tp: int, pp: int, stage: int) -> MeshCase:
    options = {"dp": dp, "tp": tp, "pp": pp, "fsdp_stage": stage, "num_microbatches": 2 if pp > 1 else None}
    name = f"mesh dp {dp} x tp {tp} x pp {pp}, stage {stage}"
    return MeshCase(name, "mesh", options, axes=Axes(pp=pp, shards=dp, tp=tp))


def pipeline(schedule: str, workers: int) -> MeshCase:
    return MeshCase(f"pipeline {schedule}", "pipeline", {"schedule": schedule}, axes=Axes(pp=workers))


def tensor(workers: int, sequence: bool) -> MeshCase:
    name = "tensor, sequence" if sequence else "tensor"
    return MeshCase(name, "tensor", {"sequence_parallel": sequence}, axes=Axes(tp=workers))


CASES = [
    MeshCase("allreduce", "allreduce", axes=Axes(shards=2)),
    *(fsdp(stage, 2) for stage in range(4)),
    *(fsdp(stage, 3) for stage in range(4)),
    fsdp(2, 4, shards=2),
    fsdp(3, 4, shards=2),
    *(pipeline(schedule, 2) for schedule in ("gpipe", "1f1b", "interleaved", "zbv")),
    pipeline("1f1b", 4),
    *(tensor(size, sequence) for size in (2, 4) for sequence in (True, False)),
    mesh(2, 2, 1, 0),
    mesh(2, 1, 2, 3),
    mesh(1, 2, 2, 0),
    mesh(2, 2, 2, 0),
]


# The formulas


def formula(case: MeshCase, shape: Shape, *, gloo: bool = True) -> list[float]:
    """Return the bytes that each rank sends in a step; it receives as many."""
    return [
        _along_data(case, shape, rank) + _along_tensor(case, shape, rank, gloo) + _along_pipe(case, shape, rank)
        for rank in range(case.axes.size)
    ]


def stream_bytes(shape: Shape) -> int:
    return shape.batch_size * shape.max_seq_len * shape.model_dim * WORD


def _cut(case: MeshCase, shape: Shape) -> Cut:
    schedule = case.options.get("schedule", "1f1b")
    return Cut.plan(shape.num_layers, case.axes.pp, PipelineOptions.model_validate({"schedule": schedule}))


def _held(case: MeshCase, shape: Shape, rank: int) -> float:
    """Return the bytes of this rank's parameters, before the data axis shards them."""
    dim, cut, place = shape.model_dim, _cut(case, shape), case.axes.coords(rank)["pp"]
    layers = sum(len(cut.layers[stage]) for stage in cut.of(place))
    first, last = 0 in cut.of(place), len(cut.ranks) - 1 in cut.of(place)
    matrices, vectors = 12 * dim * dim * layers, 13 * dim * layers  # norms 4, qkv 3, out 1, up 4, down 1
    columns = 7 * dim * layers  # biases that are sharded
    table = VOCABULARY * dim * (first + (last and not first))
    shared = (matrices + columns + table) / case.axes.tp + vectors - columns
    return (shared + shape.max_seq_len * dim * first + 2 * dim * last) * WORD


def _along_data(case: MeshCase, shape: Shape, rank: int) -> float:
    """Return (N-1)/N S for each reduce-scatter and all-gather, and the all-reduce across replicas.

    Stage 3 has one all-gather more than stages 1 and 2, in a pipeline one for each micro-batch.
    """
    axes, held = case.axes, _held(case, shape, rank)
    more = case.options.get("num_microbatches") or 1 if case.options.get("fsdp_stage") == 3 else 0
    passes = 2 + more
    across = 2 * (axes.replicas - 1) / axes.replicas * held / axes.shards
    return passes * (axes.shards - 1) / axes.shards * held + across


def _along_pipe(case: MeshCase, shape: Shape, rank: int) -> float:
    """Return A for every boundary of this rank's stages; a tied embedding is summed over both ends."""
    axes, cut = case.axes, _cut(case, shape)
    place = axes.coords(rank)["pp"]
    cuts = [pair for pair in zip(cut.ranks, cut.ranks[1:], strict=False) if pair[0] != pair[1] and place in pair]
    shards = axes.tp if case.options.get("sequence_parallel", True) else 1
    ends = {cut.ranks[0], cut.ranks[-1]}
    tied = VOCABULARY * shape.model_dim * WORD / axes.tp if len(ends) == 2 and place in ends else 0.0
    if case.options.get("fsdp_stage", 0) >= 2:
        tied /= axes.shards
    return len(cuts) * stream_bytes(shape) / shards + tied


def _along_tensor(case: MeshCase, shape: Shape, rank: int, gloo: bool) -> float:
    """Return the all-reduces of A: 4 a layer, 1 for the embedding, 1 for the head; two halves each with a sequence axis."""
    axes, cut = case.axes, _cut(case, shape)
    place = axes.coords(rank)["pp"]
    layers = sum(len(cut.layers[stage]) for stage in cut.of(place))
    count = 4 * layers + (0 in cut.of(place)) + (len(cut.ranks) - 1 in cut.of(place))
    # gloo's reduce-scatter is an all-reduce of which a part is kept: 2 instead of 1.
    halves = 3 if gloo and case.options.get("sequence_parallel", True) else 2
    return count * halves * (axes.tp - 1) / axes.tp * stream_bytes(shape)


# Runs


def measure(case: MeshCase, shape: Shape, *, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        counts, run = Path(folder) / "counts", Path(folder) / "run"
        counts.mkdir()
        with environment({**child_environment(), counted.FOLDER: str(counts)}):
            smolcluster.train(
                TASK,
                strategy=case.strategy,
                workers=case.workers,
                steps=steps,
                run_dir=run,
                overrides={**settings(shape), **case.overrides()},
                sinks=[],
            )
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return compare(case, shape, rows, counts)


def settings(shape: Shape) -> dict[str, Any]:
    return {
        **shape.overrides(),
        "training.device": "cpu",
        "training.eval_steps": 0,
        "training.checkpoint_steps": 0,
        "logging.log_interval": 1,
    }


def compare(case: MeshCase, shape: Shape, rows: Sequence[Mapping[str, Any]], counts: Path) -> dict[str, Any]:
    """Return the row of the rank whose kernel count is furthest from what the run counted."""
    expected = formula(case, shape)
    ranks = []
    for rank in range(case.workers):
        mine = [row for row in rows if row["rank"] == rank and row["step"] > WARM]
        span = mine[-1]["step"] - mine[0]["step"]
        counted_bytes = [(mine[-1][key] - mine[0][key]) / span for key in ("bytes_sent", "bytes_received")]
        kernel = counted.per_step(counted.read_rows(counts / f"{rank}.txt"), interval=1)
        ranks.append((expected[rank], *counted_bytes, *kernel))
    worst = max(ranks, key=lambda r: max(r[3] / r[1], r[4] / r[2]))
    ratio = max(worst[3] / worst[1], worst[4] / worst[2])
    least = min(min(r[3] / r[1], r[4] / r[2]) for r in ranks)
    return {
        "strategy": case.name,
        "workers": case.workers,
        "formula": round(worst[0]),
        "counted": round(worst[1]),
        "kernel": round(worst[3]),
        "kernel/counted": ratio,
        "kernel/formula": max(max(r[3], r[4]) / r[0] for r in ranks),
        "samples": ranks,
        "verdict": "met" if ratio <= LIMIT and least > 0.999 else "missed",
    }
