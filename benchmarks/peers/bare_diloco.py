"""DiLoCo as a bare loop, what OpenDiLoCo and torchft do: local AdamW steps, then an outer Nesterov step on the mean distance.

Everything is fp32: the distances of all parameters are one flat tensor, summed by `all_reduce`. Weights and outer momentum are
the same on all ranks, AdamW's state is each rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from benchmarks.peers.bare import Recipe


class BareDiLoCo:
    def __init__(
        self, model: nn.Module, recipe: Recipe, *, inner_steps: int = 30, outer_lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        self.model, self.recipe, self.inner_steps = model, recipe, inner_steps
        self.parameters = list(model.parameters())
        self.inner = recipe.adamw(model)
        self.anchor = nn.Parameter(parameters_to_vector(self.parameters).detach())
        self.outer = torch.optim.SGD([self.anchor], lr=outer_lr, momentum=momentum, nesterov=True)
        self.steps = 0

    def run(self, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """One step per batch. Returns the loss of the last."""
        loss = torch.zeros(())
        for x, y in batches:
            loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip)
            for group in self.inner.param_groups:
                group["lr"] = self.recipe.rate(self.steps)
            self.inner.step()
            self.inner.zero_grad(set_to_none=True)
            self.steps += 1
            if self.steps % self.inner_steps == 0:
                self.exchange()
        return loss.item()

    def finish(self) -> None:
        """The last round may be shorter."""
        if self.steps % self.inner_steps:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        distance = self.anchor - parameters_to_vector(self.parameters)
        dist.all_reduce(distance)
        self.anchor.grad = distance / dist.get_world_size()
        self.outer.step()
        parts = torch.split(self.anchor, [p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))
