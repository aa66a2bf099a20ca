"""A spec and events with every field set, for tests that need only a few of them."""

from __future__ import annotations

from typing import Any

from smolcluster.engine.spec import WorkerSpec
from smolcluster.observe.events import RunStarted, StepLogged


def spec_of(**fields: Any) -> WorkerSpec:
    """Return the spec of the only rank."""
    alone = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1}
    return WorkerSpec(**({"config": {}, "host": "here", "run_dir": ""} | alone | fields))


def started(**fields: Any) -> RunStarted:
    defaults: dict[str, Any] = {
        "rank": 1, "role": "worker", "host": "macbook", "run_dir": "runs/a", "task": "gpt", "strategy": "edp",
        "algorithm": "EDP", "world_size": 2, "device": "cpu", "parameters": 1000, "first_step": 0, "steps": 100,
        "batch_size": 32, "global_batch": 64, "learning_rate": 1e-3, "project_name": "smolcluster", "config": {},
    }  # fmt: skip
    return RunStarted(**(defaults | fields))


def logged(step: int, rank: int = 0, **fields: Any) -> StepLogged:
    defaults: dict[str, Any] = {
        "role": "worker", "host": "mini", "time": 1000.0 + step, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0,
        "samples": 32 * step, "tokens": 64 * step, "tokens_per_s": 100.0, "samples_per_s": 50.0, "step_time_s": 0.5,
        "compute_s": 0.4, "comm_s": 0.1, "bytes_sent": 10, "bytes_received": 20, "staleness": 0.0,
    }  # fmt: skip
    return StepLogged(step=step, rank=rank, **(defaults | fields))
