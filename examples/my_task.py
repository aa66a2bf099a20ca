"""Your own model, loss and data. This one learns a wave from noisy points; nothing is downloaded.

    smolcluster train examples/my_task.py --workers 2 --steps 300 --learning-rate 0.003

Every strategy runs it unchanged, on one process or on many machines.
"""

import math

import torch
from torch import Tensor, nn

from smolcluster import Task


class Sine(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def train_data(self) -> tuple[Tensor, Tensor]:
        return noisy_wave(samples=4096, seed=0)

    def val_data(self) -> tuple[Tensor, Tensor]:
        return noisy_wave(samples=512, seed=1)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    def sample(self, model: nn.Module) -> tuple[str, str]:
        return f"sin(2) is {math.sin(2):.2f}; ", f"the model says {model(torch.tensor([2.0])).item():.2f}"


def noisy_wave(*, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(samples, 1, generator=generator) * 6 - 3
    return x, torch.sin(x) + 0.05 * torch.randn(samples, 1, generator=generator)
