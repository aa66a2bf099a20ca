"""Loss and accuracy on the validation set, shared out over the workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smolcluster.comm.group import Group
from smolcluster.compute.precision import autocast
from smolcluster.compute.replica import to_device
from smolcluster.data.dataset import Dataset
from smolcluster.strategies.base import Share
from smolcluster.tasks.base import Task, count_of


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
    """Means over the first `samples` validation samples: `val_loss`, and `val_accuracy`, `val_ppl` where the task has them.

    Batches are weighted by their samples, or by the targets in them that count where the task says so. Share i
    of n takes every n-th batch from i on; sums meet in one small all-reduce, in double precision.
    """
    share = share or Share(index=group.rank, count=group.size)
    num_samples = min(len(data), samples or len(data))
    num_batches = math.ceil(num_samples / batch_size)
    numbers = list(range(share.index, num_batches, share.count))
    if share.lockstep:  # who has none left takes part in one more that does not count
        numbers += [num_batches] * (math.ceil(num_batches / share.count) - len(numbers))
    sums = torch.zeros(3, dtype=torch.float64)  # loss, accuracy, weights
    has_accuracy = False
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
            has_accuracy = "accuracy" in metrics
            values = [metrics["loss"], metrics.get("accuracy", torch.zeros(())), torch.ones(())]
            sums += torch.tensor([float(v) for v in values], dtype=torch.float64) * weight
    model.train()

    sums = torch.cat([sums, torch.tensor([float(has_accuracy)], dtype=torch.float64)]).to(group.device)
    group.all_reduce(sums).wait()
    loss_sum, accuracy_sum, weights, with_accuracy = sums.tolist()
    loss = loss_sum / weights if weights else math.nan  # nothing counts
    result = {"val_loss": loss}
    if with_accuracy:
        result["val_accuracy"] = accuracy_sum / weights
    if task.perplexity:
        result["val_ppl"] = math.exp(loss) if loss < 700 else math.inf
    return result
