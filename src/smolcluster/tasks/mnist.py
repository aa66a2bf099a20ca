"""Handwritten digits with a two-layer network."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smolcluster.config.schema import Config
from smolcluster.data.cache import Progress
from smolcluster.data.mnist import open_mnist
from smolcluster.models.simple_nn import SimpleNN
from smolcluster.tasks.base import Task


class Classification(Task):
    """Base of classification tasks: cross entropy and accuracy for a model with one logit per class."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs, labels = batch
        logits = model(inputs)
        accuracy = (logits.argmax(dim=-1) == labels).to(torch.float32).mean()
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}


class MnistTask(Classification):
    def __init__(self, config: Config, *, progress: Progress | None = None) -> None:
        super().__init__(config)
        self._progress = progress

    @property
    def name(self) -> str:
        return "mnist"

    @cached_property
    def _data(self) -> tuple[Any, Any]:
        return open_mnist(self.config.data, progress=self._progress)

    def model(self) -> nn.Module:
        c = self.config.model
        return SimpleNN(input_dim=c.input_dim, hidden=c.hidden, out=c.out)

    def train_data(self) -> Any:
        return self._data[0]

    def val_data(self) -> Any:
        return self._data[1]
