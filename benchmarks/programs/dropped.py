"""Drop contributions to rounds of local steps, as the DiLoCo paper drops outer gradients.

Each worker's contribution to each round is lost with the same probability. The mean is over those that arrive; if none does,
the outer optimizer takes its step with a gradient of 0. A worker whose contribution is lost continues from its own weights, not
from the common ones, so its work is in its next contribution. After the last round all have the common weights.

Every rank draws for all ranks, from the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smolcluster.comm.group import Group
from smolcluster.comm.rounds import Combination
from smolcluster.errors import UserError
from smolcluster.strategies.base import Strategy
from smolcluster.strategies.base.local_steps import LocalSteps


class Dropping:
    """Wraps the combination of one rank."""

    def __init__(
        self,
        combination: Combination,
        parameters: Sequence[nn.Parameter],
        *,
        rank: int,
        size: int,
        share: float,
        seed: int,
    ) -> None:
        self._combination, self._parameters = combination, parameters
        self._rank, self._size, self._share = rank, size, share
        self._random = random.Random(seed)
        self._own: list[Tensor] = []  # weights of this rank at the end of a round that was lost

    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        """Contribute with an equal share of the mean, or with a weight of 0."""
        arrives = [self._random.random() >= self._share for _ in range(self._size)]
        if not arrives[self._rank]:  # the parameters are at the anchor now, and their gradients are anchor - weights
            self._own = [p.detach() - p.grad for p in self._parameters if p.grad is not None]
        weight = arrives[self._rank] / max(1, sum(arrives))
        self._combination.start(slot, weight=weight, scale=scale, stop=stop)

    @torch.no_grad()
    def before_step(self) -> None:
        """Restore this rank's own weights after a round in which its contribution was lost."""
        for parameter, own in zip(self._parameters, self._own, strict=False):
            parameter.copy_(own)
        self._own = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._combination, name)


def drop_contributions(strategy: Strategy[Any], group: Group, *, share: float, seed: int) -> Dropping:
    """Wrap the combination of a strategy of local steps."""
    if not isinstance(strategy, LocalSteps):
        raise UserError(
            f"{type(strategy).__name__} has no rounds of local steps, of which a contribution could be dropped"
        )
    parameters = list(strategy.replica.parameters)
    dropping = Dropping(
        strategy.rounds.combination, parameters, rank=group.rank, size=group.size, share=share, seed=seed
    )
    strategy.rounds.combination = dropping  # type: ignore[assignment]
    return dropping
