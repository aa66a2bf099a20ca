"""How the data shards of a mesh share gradients and updates, between backward and the next forward.

Exchange   a combination of `comm/rounds.py`: all sum gradients (stage 0), or their owners do (stage 1); none with one shard
Sharded    stages 2 and 3: torch's FSDP2                                                                   fsdp2.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from smolcluster.comm.group import Group
from smolcluster.comm.rounds import Combination, Committed
from smolcluster.compute.replica import Batch, Replica
from smolcluster.parallel.owned_buckets import OwnedBuckets, rounded_to


class GradientExchange:
    loss_weight = 1.0  # what the loss is multiplied by before backward
    copies = 1  # how many data shards hold the same gradients after `finish`

    def __init__(
        self,
        weight: float,
        group: Group,
        combine: Callable[[Replica], Combination] | None = None,
        *,
        lower: torch.dtype | None = None,
    ) -> None:
        """`combine` makes the combination, once there is a replica; `lower`: the type that owners alone have in full."""
        self._group, self._combine, self._lower = group, combine, lower
        self._combination: Combination | None = None
        self._owned: OwnedBuckets | None = None
        self._started = False
        self.weigh(weight)

    def weigh(self, weight: float) -> None:
        """Set this shard's part of all samples, or of all targets of a step."""
        self._weight = weight

    def used_in(self, model: nn.Module) -> dict[str, torch.dtype]:
        """The type that each parameter and buffer of this part of a model has in forward."""
        rounded = rounded_to(self._lower, model)
        return {name: rounded.get(tensor, tensor.dtype) for name, tensor in everything_in(model).items()}

    def wrap(self, model: nn.Module) -> None:
        """Before there is an optimizer: cut the parameters up."""

    def attach(self, replica: Replica) -> None:
        self._replica = replica
        if self._combine is None:
            return
        self._combination = self._combine(replica)
        if isinstance(self._combination, OwnedBuckets):
            self._owned = self._combination
            self._owned.begin()
        else:
            self.copies = self._group.size

    @property
    def owners(self) -> bool:
        """Whether each data shard has the optimizer state of some whole parameters."""
        return self._owned is not None

    def updates(self, parameter: Tensor) -> bool:
        """Whether this rank updates it."""
        return self._owned is None or self._owned.updates(parameter)

    def compute(self, batch: Batch) -> Tensor:
        """Forward and backward, where no pipeline does it."""
        with nullcontext() if self._owned is None else self._owned.explained():
            return self._replica.compute(batch, before_last=self._start)

    def _start(self) -> None:
        if self._combination is not None:
            self._combination.start(0, weight=self._weight)
        self._started = True

    def finish(self) -> None:
        """Gradients on the parameters are the mean over all samples."""
        if not self._started:  # a pipeline ran backward
            self._start()
        self._started = False
        if self._combination is not None:
            self._combination.finish(0)
            self._combination.wait(0)
            self._combination.give(Committed(0, 0))

    def hand_out(self) -> None:
        """The updated parameters are everywhere they belong."""
        if self._combination is not None:
            self._combination.complete()

    @contextmanager
    def in_full(self) -> Iterator[None]:
        """Parameters are as the optimizer has them inside, to be saved or loaded."""
        with nullcontext() if self._owned is None else self._owned.in_full():
            yield


def everything_in(model: nn.Module) -> dict[str, Tensor]:
    return {**model.state_dict(keep_vars=True), **dict(model.named_buffers())}
