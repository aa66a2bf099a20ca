"""One run of P14, in a process of its own: `python -m benchmarks.programs.p14_run ORDER`. Prints its loss as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.elastic_run import ElasticRun, Who
from benchmarks.harness.processes import started, train_command
from benchmarks.harness.slow import slowed
from smolcluster.config import load_config, resolve
from smolcluster.engine.elastic import history
from smolcluster.errors import SmolclusterError
from smolcluster.observe.jsonl import read_metrics

CONTEXT, BATCH = 64, 16  # the batch is that of one worker
LIMIT_S = 900.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    strategy: str
    workers: int  # of single: the worker batches in its one batch
    seed: int
    steps: int
    slow: bool = False  # the last worker, to a quarter of its core
    tiny: bool = False
    options: tuple[tuple[str, Any], ...] = ()  # other than default

    @property
    def name(self) -> str:
        return self.strategy + "".join(f", {key} {value}" for key, value in self.options)

    def overrides(self) -> dict[str, Any]:
        """As configuration keys, on top of what `smolcluster train` trains without any."""
        alone = self.strategy == "single"
        overrides: dict[str, Any] = {
            "strategy.name": self.strategy,
            "cluster.num_workers": 1 if alone else self.workers,
            "model.max_seq_len": CONTEXT,
            "training.batch_size": BATCH * (self.workers if alone else 1),
            "training.steps": self.steps,
            "training.seed": self.seed,
            "training.device": "cpu",
            "training.eval_steps": 0,
            "training.eval_samples": 10**6,  # all
            "training.checkpoint_steps": 0,
            **{f"strategy.{key}": value for key, value in self.options},
        }
        if not alone:
            overrides["cluster.plane"] = "elastic"
        if self.tiny:
            overrides |= {"model.model_dim": 32, "model.num_layers": 1, "model.num_heads": 2, "model.ff_dim": 64}
            overrides["training.eval_samples"] = 64
        return overrides


def run_elastic(order: Order, cores: Sequence[int], folder: Path) -> dict[str, Any]:
    """The server runs on the first core, worker r on core r + 1; they share cores where there are too few."""
    config = resolve(load_config(["default"], overrides=order.overrides()))
    seats: dict[Who, int] = {rank: cores[(1 + rank) % len(cores)] for rank in range(order.workers)}
    last = order.workers - 1
    with (
        ElasticRun(config, folder, cores={"server": cores[0], **seats}) as run,
        contextlib.ExitStack() as stack,
    ):
        if order.slow:
            run.watch(lambda rows: True, timeout_s=LIMIT_S)
            stack.enter_context(slowed(run.pid(last), core=seats[last]))
        run.watch(timeout_s=LIMIT_S)
    commits = [line for line in history.read(folder / "history.jsonl") if line["kind"] == "commit"]
    return {
        **_figures(run.summary, [(row.step, row.loss) for row in run.rows], order.steps),
        "samples": sum(part["samples"] for commit in commits for part in commit["contributors"]),
        "share_of_slow": share_of(last, commits[len(commits) // 4 :]) if order.slow else None,
        "staleness": run.summary.get("staleness_mean"),
    }


def share_of(rank: int, commits: Sequence[dict[str, Any]]) -> float:
    """Return the samples of a worker, divided by the mean of the others."""
    samples: dict[int, int] = {}
    for part in (part for commit in commits for part in commit["contributors"]):
        samples[part["rank"]] = samples.get(part["rank"], 0) + part["samples"]
    return samples.pop(rank, 0) / statistics.mean(samples.values())


def run_single(order: Order, cores: Sequence[int], folder: Path) -> dict[str, Any]:
    os.sched_setaffinity(0, cores)
    command = train_command(folder, {"logging.log_interval": 10, **order.overrides()}, config="default")
    with started(command, environ={"OMP_NUM_THREADS": str(len(cores))}) as process:
        if process.wait(timeout=LIMIT_S) != 0:
            raise SmolclusterError(f"single ended with {process.returncode}")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row.get("type", "step") == "step"]
    return {
        **_figures(summary, [(row["step"], row["loss"]) for row in rows if "loss" in row], order.steps),
        "samples": int(summary["samples"]),
    }


def _figures(summary: dict[str, Any], rows: Sequence[tuple[int, float]], steps: int) -> dict[str, Any]:
    return {
        "val_loss": float(summary["val_loss"]),
        "train_loss": statistics.mean(loss for step, loss in rows if step > 0.75 * steps),
        "seconds": summary.get("wall_s"),
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    options = tuple((key, value) for key, value in given["order"].pop("options"))
    order = Order(**given["order"], options=options)
    with tempfile.TemporaryDirectory() as folder:
        kind = run_single if order.strategy == "single" else run_elastic
        print(json.dumps(kind(order, given["cores"], Path(folder) / "run")), flush=True)


if __name__ == "__main__":
    main()
