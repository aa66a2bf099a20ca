"""The interface of a task: a model, its loss and its data.

A user's task is a subclass in the user's file, started with `smolcluster train my_task.py:MyTask`. Three methods are required;
the others have defaults. A task does not depend on the number of machines.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.compute.optim import make_optimizer
from smolcluster.config.schema import Config
from smolcluster.errors import UserError


class Task(ABC):
    """Base class of tasks. `self.config` is the resolved configuration."""

    tokens_per_sample: int = 0  # for throughput; 0 if samples are not tokens
    perplexity: bool = False  # report exp(val_loss)
    quick_check: bool = True  # run a batch, an evaluation and the sample before step 1, to find mistakes

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model. The random generator is already seeded, the same on every worker."""

    @abstractmethod
    def train_data(self) -> Any:
        """Return an object with `__len__` and `__getitem__` or `batch(indices)`, or a tuple of tensors."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over the batch: over its samples, or over the targets that `count` counts."""

    def val_data(self) -> Any | None:
        """Return the validation data, like `train_data`; None: no evaluation."""
        return None

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return means over a validation batch by name: "loss", and any others, such as "accuracy"."""
        return {"loss": self.loss(model, batch)}

    def count(self, batch: Any) -> float | Tensor | None:
        """Return the denominator of `loss`'s mean: how many targets of this batch count. None: its number of samples.

        By default the entries of `targets` that are not -100. Parts of a step are weighted by it, so that the loss of a step is
        the mean over all its counted targets, however it is divided. It must depend only on the batch, and be None always or
        never.
        """
        targets = self.targets(batch)
        return None if targets is None else (targets != -100).sum()

    def targets(self, batch: Any) -> Tensor | None:
        """Return the targets of `loss`, of which entries equal to -100 are ignored. None: all samples have the same weight."""
        return None

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer, by default the one of `training.optimizer`. The schedule scales its learning rates."""
        return make_optimizer(model, self.config.training)

    def sample(self, model: nn.Module) -> tuple[str, str] | None:
        """Return a prompt and the trained model's continuation, shown at the end."""
        return None


def count_of(task: Task, batch: Any) -> float | None:
    """Return `task.count` as a finite number >= 0, or None. Raises UserError for other values."""
    counted = task.count(batch)
    if counted is None:
        return None
    try:
        number = float(counted)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise UserError(
            f"count() of {task.name} must return the number of targets that count, or None, not {counted!r:.80}"
        )
    return number
