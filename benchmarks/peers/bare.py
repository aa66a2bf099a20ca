"""A bare PyTorch training loop, as short and as fast as one would write it by hand.

Same weights, same batches, same AdamW (fused), same clipping and same learning rates as ours; no strategy, no events, no
meter, no seeds per step. The loss is read every `log_interval` steps, as in a loop that prints it.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.models import GPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    learning_rate: float
    min_lr: float
    warmup: int
    steps: int
    weight_decay: float
    betas: tuple[float, float]
    clip: float

    def rate(self, n: int) -> float:
        if n < self.warmup:
            return self.learning_rate * (n + 1) / self.warmup
        done = min(1.0, (n - self.warmup) / max(1, self.steps - 1 - self.warmup))
        return self.min_lr + 0.5 * (self.learning_rate - self.min_lr) * (1 + math.cos(math.pi * done))

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Of parameters: matrices decay, vectors do not."""
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        return [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]

    def adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.groups(model), lr=self.learning_rate, betas=self.betas, fused=True)


class BareLoop:
    def __init__(
        self,
        model: GPT,
        recipe: Recipe,
        *,
        inputs: Tensor,
        targets: Tensor,
        order: Tensor,
        batch_size: int,
        device: torch.device,
        precision: str = "fp32",
        compile: bool = False,
        log_interval: int = 10,
    ) -> None:
        self.model = model.to(device)
        self.recipe = recipe
        self.optimizer = recipe.adamw(self.model)
        self.inputs, self.targets, self.order, self.batch_size = inputs, targets, order, batch_size
        self.device, self.precision, self.log_interval = device, precision, log_interval
        self.loss: Any = torch.compile(model.loss) if compile else model.loss
        self.step = 0
        self.losses: dict[int, float] = {}

    def run(self, steps: int) -> None:
        cuda = self.device.type == "cuda"
        parameters = list(self.model.parameters())
        self.model.train()
        for _ in range(steps):
            rows = self.order[self.step * self.batch_size : (self.step + 1) * self.batch_size]
            x, y = self.inputs[rows], self.targets[rows]
            if cuda:
                x = x.pin_memory().to(self.device, non_blocking=True)
                y = y.pin_memory().to(self.device, non_blocking=True)
            mixed = torch.autocast(self.device.type, dtype=torch.bfloat16) if self.precision == "bf16" else None
            with mixed or contextlib.nullcontext():
                loss = self.loss(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip)
            rate = self.recipe.rate(self.step)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            if self.step % self.log_interval == 0:
                self.losses[self.step] = loss.item()
