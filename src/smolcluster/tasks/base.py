"""What is trained: a model, its loss and its data.

A user's own task is a subclass in a file of theirs, started with `smolcluster train my_task.py:MyTask`. Three methods are
enough; the rest have defaults. A task says nothing about how many machines there are.
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
    """Subclass this. `self.config` is the resolved configuration."""

    tokens_per_sample: int = 0  # for throughput; 0 where samples are not made of tokens
    perplexity: bool = False  # report exp(val_loss)
    quick_check: bool = True  # run a batch, an evaluation and the sample before step 1, to find mistakes

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model with fresh weights. The random generator is already seeded, alike on every worker."""

    @abstractmethod
    def train_data(self) -> Any:
        """Anything with `__len__` and `__getitem__`, or with `__len__` and `batch(indices)`, or a tuple of tensors."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over the batch: over its samples, or over what `count` counts."""

    def val_data(self) -> Any | None:
        """Like `train_data`; None means no evaluation."""
        return None

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Means over a validation batch, by name: "loss", and any others, such as "accuracy"."""
        return {"loss": self.loss(model, batch)}

    def count(self, batch: Any) -> float | Tensor | None:
        """Return what the mean of `loss` divides by: how many targets of this batch count. None: its samples, all alike.

        By default the entries of `targets` that are not -100. Parts of a step are weighted by it, so that the loss of a step is
        the mean over all that counts in it, however it is divided. It depends on the batch alone, and is always None or never.
        """
        targets = self.targets(batch)
        return None if targets is None else (targets != -100).sum()

    def targets(self, batch: Any) -> Tensor | None:
        """Return what the mean of `loss` is taken over: the entries that are not -100. None: everything counts alike."""
        return None

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """By default what `training.optimizer` says. Learning rates follow the schedule, in their ratio to learning_rate."""
        return make_optimizer(model, self.config.training)

    def sample(self, model: nn.Module) -> tuple[str, str] | None:
        """A prompt and what the trained model makes of it, shown at the end."""
        return None


def count_of(task: Task, batch: Any) -> float | None:
    """What `task.count` returns, as a number that can be used; raises UserError where it cannot."""
    counted = task.count(batch)
    if counted is None:
        return None
    try:
        number = float(counted)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise UserError(f"count() of {task.name} must return how many targets count, or None, not {counted!r:.80}")
    return number
