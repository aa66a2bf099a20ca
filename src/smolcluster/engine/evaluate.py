"""The task's metrics on the validation set, divided among the workers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smolcluster.comm.group import Group, gather_json
from smolcluster.compute.precision import autocast
from smolcluster.compute.replica import to_device
from smolcluster.data.dataset import Dataset
from smolcluster.errors import UserError
from smolcluster.strategies.base import Share
from smolcluster.tasks.base import Task, count_of

NAME = re.compile(r"[\w./@-]{1,64}")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    data: Dataset,
    *,
    group: Group,
    device: torch.device,
    batch_size: int,
    samples: int | None,
    measure: Callable[[Any], dict[str, Tensor]] | None = None,
    share: Share | None = None,
) -> dict[str, float]:
    """Return the means of the task's metrics over the first `samples` validation samples: `val_loss`, `val_accuracy`, ...

    Batches are weighted by their samples, or by their targets where the task counts them. Share i
    of n takes every n-th batch from i on; sums meet in one small all-reduce, in double precision.
    """
    share = share or Share(index=group.rank, count=group.size)
    num_samples = min(len(data), samples or len(data))
    num_batches = math.ceil(num_samples / batch_size)
    numbers = list(range(share.index, num_batches, share.count))
    if share.lockstep:  # ranks without a batch compute one that does not count
        numbers += [num_batches] * (math.ceil(num_batches / share.count) - len(numbers))
    sums: dict[str, tuple[float, float]] = {}  # by name: values times weights, and weights
    model.eval()
    for number in numbers:
        counts = share.counts and number < num_batches
        first = number * batch_size if number < num_batches else 0
        indices = np.arange(first, min(num_samples, first + batch_size))
        part = to_device(data.batch(indices), device)
        with autocast(task.config.training.precision, device):
            metrics = task.metrics(model, part) if measure is None else measure(part)
        weight = count_of(task, part) if counts else 0.0
        weight = len(indices) if weight is None else weight
        if weight:
            for name, value in check_metrics(task, metrics).items():
                total, weights = sums.get(name, (0.0, 0.0))
                sums[name] = total + value * weight, weights + weight
    model.train()

    names = list(dict.fromkeys(name for theirs in gather_json(group, list(sums)) for name in theirs))
    pairs = torch.tensor([sums.get(name, (0.0, 0.0)) for name in names], dtype=torch.float64).to(group.device)
    if names:
        group.all_reduce(pairs).wait()
    result = {f"val_{name}": total / weight for name, (total, weight) in zip(names, pairs.tolist(), strict=True)}
    if task.perplexity and "val_loss" in result:
        loss = result["val_loss"]
        result["val_ppl"] = math.exp(loss) if loss < 700 else math.inf
    return result


def check_metrics(task: Task, metrics: Any) -> dict[str, float]:
    """Return the metrics of one batch as numbers. Raises UserError where they are not named numbers."""
    if not isinstance(metrics, dict):
        raise UserError(f"metrics() of {task.name} must return a dict of named numbers, not {type(metrics).__name__}")
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise UserError(f"metrics() of {task.name}: {name!r:.80} is no name; use letters, digits and . _ / @ -")
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
            raise UserError(f"metrics() of {task.name}: '{name}' must be one number, not {what}") from None
    return found
