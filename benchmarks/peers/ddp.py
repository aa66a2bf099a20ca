"""torch's DistributedDataParallel, used as its documentation says: average over ranks, clip, step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.bare import Recipe


class DDPTraining:
    def __init__(self, model: nn.Module, recipe: Recipe, *, gradient_as_bucket_view: bool) -> None:
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view)
        self.recipe = recipe
        self.optimizer = recipe.adamw(self.model)
        self.updates = 0

    def run(self, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """One step per batch. Returns the loss of the last."""
        parameters = list(self.model.parameters())
        loss = torch.zeros(())
        for x, y in batches:
            logits = self.model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip)
            rate = self.recipe.rate(self.updates)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.updates += 1
        return loss.item()
