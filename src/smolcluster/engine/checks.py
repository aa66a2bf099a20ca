"""What must hold before a run starts; each refusal says what to change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from smolcluster.config.schema import Config
from smolcluster.errors import UserError
from smolcluster.observe.text import size


def batch_size_of(config: Config, rank: int) -> int:
    """Samples per micro-step of a rank: its host's, where the cluster file gives one."""
    workers = config.cluster.workers
    host = workers[rank] if rank < len(workers) else ""
    return config.cluster.batch_size.get(host, config.training.batch_size or 1)


def check_enough_samples(num_samples: int, counts: list[int]) -> None:
    if num_samples == 0:
        raise UserError("the training data is empty; see data.name and data.root, or train_data() of your task")
    if len(counts) > num_samples:
        raise UserError(
            f"{len(counts)} workers but only {num_samples} training sample{'s' * (num_samples != 1)}; "
            f"use at most --workers {num_samples}"
        )
    if sum(counts) > num_samples:
        raise UserError(
            f"one step reads {sum(counts)} samples on {len(counts)} workers and there are only {num_samples} to train on; "
            f"use training.batch_size={max(1, num_samples // len(counts))} or less, or more data"
        )


def check_same_config(first: dict[str, Any], mine: dict[str, Any], *, rank: int, path: str = "") -> None:
    """Ranks started by hand must agree: name the first key that differs."""
    for key in first:
        if isinstance(first[key], dict) and isinstance(mine.get(key), dict):
            check_same_config(first[key], mine[key], rank=rank, path=f"{path}{key}.")
        elif first[key] != mine.get(key) and f"{path}{key}" not in ("training.device", "data.root", "data.cache_dir"):
            raise UserError(
                f"{path}{key} is {mine.get(key)!r} on rank {rank} and {first[key]!r} on rank 0; start all ranks alike"
            )


def check_disk_space(folder: Path, *, need_bytes: int) -> None:
    """Weights and two optimizer states must fit, or every save of the run would fail."""
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise UserError(
            f"a checkpoint needs about {size(need_bytes)} and {folder} has {size(free)} free; "
            "choose another --run-dir, or set training.checkpoint_steps=0"
        )
