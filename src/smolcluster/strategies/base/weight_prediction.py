"""Weight prediction: estimate the server's weights at the time a worker's next gradient is applied (`edp`).

Let j pushes g_1 to g_j of this worker, oldest first, be in flight, w be the server's weights and c their last change. If the
gradients of all workers were like these, the next j updates of AdamW would move the server to

    w + (b + .. + b^j) c + d_1 (1 + b + .. + b^(j-1)) + .. + d_j          where d = -rate x (1 - b) x clip(g) / sqrt(v)

with b the decay of AdamW's first moment. A worker's own second moment v is of gradients of fewer samples, so it is too large,
by up to the number of workers; in each tensor it has the right proportions. So the server sends the mean of its sqrt(v) in
every tensor, and the norm by which it clips. With other optimizers the prediction is w.

Hakimi et al., "Taming momentum in a distributed asynchronous environment", 2019; Guan et al., "XPipe: efficient pipeline model
parallelism for multi-GPU DNN training", 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from smolcluster.compute.optim import is_adamw, named_groups, second_moment_of
from smolcluster.compute.replica import Replica
from smolcluster.strategies.base.replicated import Announced

MAX_AHEAD = 4  # pushes in flight that a prediction includes
MAX_NORM_RATIO = 2.0  # per worker: a gradient with a larger norm, relative to the server's, is scaled down


class WeightPrediction:
    """The server's weights as this worker knows them, and the predicted changes by its pushes in flight."""

    def __init__(self, replica: Replica, trained: Mapping[str, nn.Parameter]) -> None:
        self._replica, self._trained = replica, trained
        self.server = {name: p.detach().clone() for name, p in trained.items()}
        self.in_flight: dict[int, dict[str, Tensor]] = {}  # by push: d of each tensor, until the server has counted it
        self._announced = Announced()  # of the last update
        self._change: dict[str, Tensor] = {}  # in it

    def set_weights(self) -> None:
        """Set the model's weights to the prediction."""
        decay = self._replica.optimizer.param_groups[0].get("betas", (0.0,))[0]
        carried = [0.0]  # by momentum, of a change: after 0, 1, 2 .. further updates
        for power in range(1, len(self.in_flight) + 1):
            carried.append(carried[-1] + decay**power)
        for name, p in self._trained.items():
            own = p.detach().copy_(self.server[name])
            if name in self._change:
                own.add_(self._change[name], alpha=carried[-1])
            for number, step in enumerate(reversed(self.in_flight.values())):  # the newest first
                if name in step:
                    own.add_(step[name], alpha=1 + carried[number])

    def add(self, push: int) -> Tensor:
        """Count the gradients on the parameters as in flight, if they are finite. Return their norm."""
        replica, announced = self._replica, self._announced
        norm = get_total_norm([p.grad for p in replica.parameters if p.grad is not None])
        if not bool(torch.isfinite(norm)):
            return norm
        norm = norm / replica.loss_scale
        self.in_flight[push] = step = {}
        if len(self.in_flight) > MAX_AHEAD:
            del self.in_flight[next(iter(self.in_flight))]
        if not is_adamw(replica.optimizer):
            return norm
        max_norm = MAX_NORM_RATIO * announced.workers * announced.norm or float(norm)
        unscale = min(1.0, max_norm / float(norm)) / replica.loss_scale if norm > 0 else 1.0
        clip_norm = replica.grad_clip_norm
        clip = min(1.0, clip_norm / (announced.norm or float(norm))) if clip_norm and norm > 0 else 1.0
        sizes = dict(zip(self._trained, announced.denominators, strict=False))
        for name, p, group in named_groups(self._trained, replica.optimizer):
            if p.grad is None:
                continue
            gradient = p.grad * unscale
            denominator = second_moment_of(replica.optimizer, p, group, gradient)
            size = denominator.mean() / sizes[name] if sizes.get(name) else 1.0
            decay = group["betas"][0]
            rate = replica.rate_of(replica.updates, group) * (1 - decay) / (1 - decay ** (replica.updates + 1))
            step[name] = gradient.div_(denominator).mul_(-rate * clip * size)
        return norm

    def drop(self, push: int) -> None:
        """Drop a push that the server has refused."""
        self.in_flight.pop(push, None)

    def follow(self, announced: Announced) -> bool:
        """Follow the server by one update. Return False where its change is missing."""
        self.in_flight = {push: step for push, step in self.in_flight.items() if push > announced.counted}
        if announced.change is None:
            return False
        predicts = is_adamw(self._replica.optimizer)
        for name, own in self.server.items():
            change = announced.change[name].to(own.device, own.dtype, copy=predicts)
            own.add_(change)
            if predicts:
                self._change[name] = change
        self._announced = replace(announced, change=None)
        return True
