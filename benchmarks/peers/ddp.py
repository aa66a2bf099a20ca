"""torch's DistributedDataParallel, used as documented: average over ranks, clip, step; with a hook or without.

PowerSGD's hook fails on gloo with more than one bucket, so there is only one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.bare import Recipe

Hook = Literal["fp16", "powersgd"]
ONE_BUCKET_MB = 400
POWERSGD_RANK = 4


class DDPTraining:
    def __init__(
        self, model: nn.Module, recipe: Recipe, *, gradient_as_bucket_view: bool, hook: Hook | None = None
    ) -> None:
        buckets: dict[str, Any] = {"bucket_cap_mb": ONE_BUCKET_MB} if hook == "powersgd" else {}
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view, **buckets)
        if hook == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
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
