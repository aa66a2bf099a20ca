"""Exchange gradients and updates between data shards on the mesh plane, between backward and the next forward.

GradientExchange   a combination of `comm/rounds.py`: all-reduce (stage 0) or reduce to owners (stage 1)
Fsdp2Exchange      stages 2 and 3: torch's FSDP2                                           fsdp2.py
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
    loss_weight = 1.0  # factor of the loss before backward
    copies = 1  # number of data shards with the same gradients after `finish`

    def __init__(
        self,
        weight: float,
        group: Group,
        combine: Callable[[Replica], Combination] | None = None,
        *,
        lower: torch.dtype | None = None,
    ) -> None:
        """`combine` makes the combination for a replica; `lower`: the type of weights that only owners have in full."""
        self._group, self._combine, self._lower = group, combine, lower
        self._combination: Combination | None = None
        self._owned: OwnedBuckets | None = None
        self._started = False
        self.weigh(weight)

    def weigh(self, weight: float) -> None:
        """Set this shard's part of the samples or targets of a step."""
        self._weight = weight

    def used_in(self, model: nn.Module) -> dict[str, torch.dtype]:
        """Return the type of each parameter and buffer in forward."""
        rounded = rounded_to(self._lower, model)
        return {name: rounded.get(tensor, tensor.dtype) for name, tensor in everything_in(model).items()}

    def wrap(self, model: nn.Module) -> None:
        """Shard the parameters, before the optimizer is made."""

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
        """Whether each data shard owns whole parameters and their optimizer state."""
        return self._owned is not None

    def updates(self, parameter: Tensor) -> bool:
        """Return whether this rank updates the parameter."""
        return self._owned is None or self._owned.updates(parameter)

    def compute(self, batch: Batch) -> Tensor:
        """Run forward and backward, without a pipeline."""
        with nullcontext() if self._owned is None else self._owned.explained():
            return self._replica.compute(batch, before_last=self._start)

    def _start(self) -> None:
        if self._combination is not None:
            self._combination.start(0, weight=self._weight)
        self._started = True

    def finish(self) -> None:
        """Wait until `.grad` holds the mean over all samples."""
        if not self._started:  # a pipeline ran backward
            self._start()
        self._started = False
        if self._combination is not None:
            self._combination.finish(0)
            self._combination.wait(0)
            self._combination.give(Committed(0, 0))

    def send_updates(self) -> None:
        """Distribute the updated parameters."""
        if self._combination is not None:
            self._combination.complete()

    @contextmanager
    def in_full(self) -> Iterator[None]:
        """Use the optimizer's view of the parameters inside, to save or load them."""
        with nullcontext() if self._owned is None else self._owned.in_full():
            yield


def everything_in(model: nn.Module) -> dict[str, Tensor]:
    return {**model.state_dict(keep_vars=True), **dict(model.named_buffers())}
