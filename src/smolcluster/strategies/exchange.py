"""How the data shards of a mesh share gradients and updates, between backward and the next forward.

Exchange   one shard: there is nothing to share
Summed     stage 0: gradients are summed in buckets, beside backward
Owned      stage 1: each parameter has an owner, who gets its gradient, updates it and hands it out
Sharded    stages 2 and 3: torch's FSDP2                                                           fsdp.py
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from smolcluster.comm.buckets import GradientBuckets
from smolcluster.comm.group import Group
from smolcluster.comm.sharded import gradient, like, local
from smolcluster.compute.replica import Batch, Replica
from smolcluster.strategies.shards import owners


class Exchange:
    """With one shard there is nothing to do."""

    loss_weight = 1.0  # what the loss is multiplied by before backward
    copies = 1  # how many data shards hold the same gradients after `finish`
    owners = False  # each data shard has the optimizer state of some whole parameters

    def __init__(self, weight: float) -> None:
        """`weight`: this shard's part of all samples."""
        self._weight = weight

    def used_in(self, tensor: Tensor) -> torch.dtype:
        """The type that this parameter or buffer has in forward."""
        return tensor.dtype

    def wrap(self, model: nn.Module) -> None:
        """Before there is an optimizer: cut the parameters up."""

    def attach(self, replica: Replica) -> None:
        self._replica = replica

    def compute(self, batch: Batch) -> Tensor:
        """Forward and backward, where no pipeline does it."""
        return self._replica.compute(batch)

    def finish(self) -> None:
        """Gradients on the parameters are the mean over all samples."""

    def hand_out(self) -> None:
        """The updated parameters are everywhere they belong."""

    def updates(self, parameter: nn.Parameter) -> bool:
        """Whether this rank updates it."""
        return True

    def settle(self) -> None:
        """Parameters that were gathered for a while are in pieces again."""


class Summed(Exchange):
    """Stage 0. Buckets leave while backward runs."""

    def __init__(self, group: Group, *, bucket_bytes: int, weight: float) -> None:
        super().__init__(weight)
        self._group, self._bucket_bytes = group, bucket_bytes
        self.copies = group.size
        self._sent = False

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._buckets = GradientBuckets(replica.parameters, self._group, bucket_bytes=self._bucket_bytes)

    def compute(self, batch: Batch) -> Tensor:
        loss = self._replica.compute(batch, before_last=lambda: self._buckets.arm(0, weight=self._weight, stop=False))
        self._buckets.disarm()
        self._sent = True
        return loss

    def finish(self) -> None:
        if not self._sent:  # a pipeline ran backward
            self._buckets.send(0, weight=self._weight)
        self._sent = False
        self._buckets.wait(0)
        self._buckets.give(0)


class Owned(Exchange):
    """Stage 1. Rank r owns what `_dealt[r]` says, in a row; row by row side by side, padded to the longest, they travel in
    buckets: so many columns of all rows at a time.
    """

    owners = True

    def __init__(self, group: Group, *, bucket_bytes: int, weight: float) -> None:
        super().__init__(weight)
        self._group, self._bucket_bytes = group, bucket_bytes

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        group, parts = self._group, [local(p.detach()) for p in replica.parameters]
        owner = owners([part.numel() for part in parts], group.size)
        self._dealt = [
            [p for p, place in zip(replica.parameters, owner, strict=True) if place == rank]
            for rank in range(group.size)
        ]
        self._own = set(self._dealt[group.rank])
        width = max(sum(local(p.detach()).numel() for p in dealt) for dealt in self._dealt)
        home = group.buffer_device(parts[0].device)
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))  # nothing is rounded on its way
        columns = min(width, max(1, self._bucket_bytes // (dtype.itemsize * group.size)))
        self._buckets = [range(start, min(start + columns, width)) for start in range(0, width, columns)]
        self._rows = torch.zeros(group.size * columns, dtype=dtype, device=home)
        self._row = torch.zeros(columns, dtype=dtype, device=home)

    def updates(self, parameter: nn.Parameter) -> bool:
        return parameter in self._own

    @torch.no_grad()
    def finish(self) -> None:
        group, mine = self._group, self._dealt[self._group.rank]
        found = {p: torch.zeros_like(_flat(p)) for p in mine}
        for columns in self._buckets:
            rows = self._rows[: group.size * len(columns)].view(group.size, -1)
            for row, dealt in zip(rows, self._dealt, strict=True):
                for place, parameter, span in _spans(dealt, columns):
                    given = gradient(parameter)
                    row[place].zero_() if given is None else row[place].copy_(given.reshape(-1)[span] * self._weight)
            row = self._row[: len(columns)]
            group.reduce_scatter(row, rows.view(-1)).wait()
            for place, parameter, span in _spans(mine, columns):
                found[parameter][span].copy_(row[place])
        for parameter in self._replica.parameters:
            flat, shape = found.get(parameter), local(parameter.detach()).shape
            parameter.grad = None if flat is None else like(parameter, flat.view(shape))

    @torch.no_grad()
    def hand_out(self) -> None:
        group = self._group
        flats = {p: _flat(p) for p in self._replica.parameters}
        for columns in self._buckets:
            rows, row = self._rows[: group.size * len(columns)].view(group.size, -1), self._row[: len(columns)]
            for place, parameter, span in _spans(self._dealt[group.rank], columns):
                row[place].copy_(flats[parameter][span])
            group.all_gather(rows.view(-1), row).wait()
            for row, dealt in zip(rows, self._dealt, strict=True):
                for place, parameter, span in _spans(dealt, columns):
                    if parameter not in self._own:
                        flats[parameter][span].copy_(row[place])
        for parameter, flat in flats.items():
            part = local(parameter.detach())
            if not part.is_contiguous():
                part.copy_(flat.view(part.shape))


def _flat(parameter: nn.Parameter) -> Tensor:
    """My part of it as a row; a copy, where it does not lie in memory as one."""
    return local(parameter.detach()).reshape(-1)


def _spans(parameters: Sequence[nn.Parameter], columns: range) -> Iterator[tuple[slice, nn.Parameter, slice]]:
    """Of these parameters in a row, what lies in these columns: where there, of which, and where in it."""
    offset = 0
    for parameter in parameters:
        length = local(parameter.detach()).numel()
        start, stop = max(columns.start, offset), min(columns.stop, offset + length)
        if start < stop:
            yield slice(start - columns.start, stop - columns.start), parameter, slice(start - offset, stop - offset)
        offset += length
