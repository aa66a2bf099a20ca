"""A sequence of layers that sleep instead of computing, so that any number of ranks fits onto a few cores.

Each layer takes SMOLBENCH_REST_S seconds forward, as long for the gradient of its input, and as long for the gradient of its
weight. The two halves of backward can be separated, as zero-bubble schedules do.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.tasks.base import Task

REST, LAYERS = "SMOLBENCH_REST_S", "SMOLBENCH_LAYERS"
WIDTH = 8


def rest() -> None:
    time.sleep(float(os.environ.get(REST, "0.02")))


class _Stream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rest()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rest()
        return grad.clone()


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rest()
        return grad.clone()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x = x.detach().requires_grad_()  # so that the first layer has as much work as the others
        y: Tensor = _Stream.apply(x) + _Weight.apply(self.weight)  # type: ignore[no-untyped-call]
        return y


class Resting(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(*(Layer() for _ in range(int(os.environ.get(LAYERS, "4")))))

    def train_data(self) -> Any:
        return (torch.ones(4096, WIDTH), torch.zeros(4096))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output.square().mean()
