"""How the data shards of a mesh share gradients and updates, between backward and the next forward.

Exchange   one shard: there is nothing to share
Summed     stage 0: gradients are summed in buckets, beside backward
Owned      stage 1: each parameter has an owner, who gets its gradient, updates it and hands it out
Sharded    stages 2 and 3: torch's FSDP2                                                           fsdp.py
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from smolcluster.comm.buckets import GradientBuckets
from smolcluster.comm.group import Group
from smolcluster.comm.sharded import gradient, like, local
from smolcluster.compute.replica import Batch, Replica
from smolcluster.errors import UserError
from smolcluster.parallel.shards import owners


class Exchange:
    """With one shard there is nothing to do."""

    loss_weight = 1.0  # what the loss is multiplied by before backward
    copies = 1  # how many data shards hold the same gradients after `finish`
    owners = False  # each data shard has the optimizer state of some whole parameters

    def __init__(self, weight: float) -> None:
        self.weigh(weight)

    def weigh(self, weight: float) -> None:
        """Set this shard's part of all samples, or of all targets of a step."""
        self._weight = weight

    def used_in(self, model: nn.Module) -> dict[str, torch.dtype]:
        """The type that each parameter and buffer of this part of a model has in forward."""
        return {name: tensor.dtype for name, tensor in everything_in(model).items()}

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

    def prepare(self) -> None:
        """Parameters are as forward wants them."""

    def settle(self) -> None:
        """Parameters are as the optimizer has them: those that were gathered for a while are in pieces again."""


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
    """Stage 1. Gradients go to the owners of their parameters and updated parameters come back, a buffer full at a time.

    Row r of the buffer takes what rank r owns; shares are padded to the largest. Sums are put where the owner's own gradients
    were, so that beside them there is only the buffer. After the gradients of a share come as many numbers: how many ranks used
    each parameter. One that nobody used has no gradient, as in `comm/buckets.py`.

    With a `lower` type the matrices that autocast would round at every use are kept rounded, and their gradients are. Only the
    owner has such a matrix in full besides, its master, which takes the place of the other while it is updated and saved.
    """

    owners = True

    def __init__(self, group: Group, *, bucket_bytes: int, weight: float, lower: torch.dtype | None = None) -> None:
        super().__init__(weight)
        self._group, self._bucket_bytes, self._lower = group, bucket_bytes, lower
        self._masters: dict[nn.Parameter, Tensor] = {}  # of what this rank owns
        self._working: dict[nn.Parameter, Tensor] = {}  # while the masters are in their places

    def used_in(self, model: nn.Module) -> dict[str, torch.dtype]:
        rounded = rounded_to(self._lower, model)
        return {name: rounded.get(tensor, tensor.dtype) for name, tensor in everything_in(model).items()}

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        group, parts = self._group, [local(p.detach()) for p in replica.parameters]
        sizes = [part.numel() for part in parts]
        owner = owners(sizes, group.size)
        self._own = {p for p, place in zip(replica.parameters, owner, strict=True) if place == group.rank}
        rounded = rounded_to(self._lower, replica.model)
        for parameter in replica.parameters:
            if parameter in rounded:
                if parameter in self._own:
                    self._masters[parameter] = parameter.data
                parameter.data = parameter.data.to(rounded[parameter])

        shares = [[i for i, place in enumerate(owner) if place == rank] for rank in range(group.size)]
        self._shares = shares
        # Nothing is rounded on its way: sums are taken in the widest type, and updates travel as the bytes they are.
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        used = [local(p.detach()).nbytes for p in replica.parameters]
        longest = max(sum(sizes[i] + 1 for i in share) for share in shares)
        room = self._bucket_bytes // (2 * group.size * dtype.itemsize)  # gloo works on a copy of it
        width = max(1, min(longest, room))
        counts = [[(len(sizes) + rank, len(share))] for rank, share in enumerate(shares)]
        gradients = [[(i, sizes[i]) for i in share] for share in shares]
        self._to_owners = deal_turns([mine + used for mine, used in zip(gradients, counts, strict=True)], width)
        self._to_all = deal_turns([[(i, used[i]) for i in share] for share in shares], width * dtype.itemsize)
        home = group.buffer_device(parts[0].device)
        self._buffer = torch.zeros(group.size * width, dtype=dtype, device=home)
        self._row = torch.zeros(width, dtype=dtype, device=home)
        self._all_used = [torch.ones(len(share), dtype=dtype, device=home) for share in shares]
        self._counts = torch.zeros(len(shares[group.rank]), dtype=dtype, device=home)  # ranks that used what I own

    def compute(self, batch: Batch) -> Tensor:
        try:
            return super().compute(batch)
        except RuntimeError as error:
            if self._lower is None or "dtype" not in str(error):
                raise
            raise UserError(
                f"a layer wants its weights in their own type ({str(error).splitlines()[0]}): "
                "the model cannot be used with strategy.param_dtype in stage 1; leave it out"
            ) from error

    def updates(self, parameter: nn.Parameter) -> bool:
        return parameter in self._own

    @torch.no_grad()
    def finish(self) -> None:
        parameters, me = self._replica.parameters, self._group.rank
        unused = {i for i, parameter in enumerate(parameters) if parameter.grad is None}
        gradients = [self._flat_gradient(p) for p in parameters] + self._used(unused)
        sums: dict[int, Tensor] = {}  # of what this rank owns
        for rows, row, pieces in self._each_turn(self._to_owners, self._buffer, self._row):
            for piece in pieces:
                there, flat = rows[piece.owner, piece.at : piece.at + piece.length], gradients[piece.parameter]
                there.zero_() if flat is None else there.copy_(piece.of(flat)).mul_(self._weight)
            self._group.reduce_scatter(row, rows.view(-1)).wait()
            for piece in pieces:
                if piece.parameter >= len(parameters):
                    if piece.owner == me:
                        piece.of(self._counts).copy_(row[piece.at : piece.at + piece.length])
                    continue
                number, parameter = piece.parameter, parameters[piece.parameter]
                if piece.owner == me:
                    if number not in sums:
                        sums[number] = self._room_for_sum(parameter, gradients[number])
                    piece.of(sums[number]).copy_(row[piece.at : piece.at + piece.length])
                if piece.ends and (piece.owner != me or parameter in self._masters):
                    gradients[number] = parameter.grad = None
        self.settle()
        for number, summed in sums.items():
            parameter = parameters[number]
            if parameter.grad is None:
                parameter.grad = summed.view(parameter.shape)
        own = self._shares[me]
        if not unused.isdisjoint(own):  # else there is nothing to learn from the counts
            for i, count in zip(own, self._counts.tolist(), strict=True):
                if i in unused and count == 0:
                    parameters[i].grad = None

    def _used(self, unused: set[int]) -> list[Tensor | None]:
        """For the owner of each share: which of its parameters this rank used."""
        rows: list[Tensor | None] = []
        for share, ones in zip(self._shares, self._all_used, strict=True):
            row = ones if unused.isdisjoint(share) else ones.new_tensor([float(i not in unused) for i in share])
            rows.append(row)
        return rows

    def _flat_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """As one row that shares its memory; an owner has one in any case."""
        mine = gradient(parameter)
        if mine is None and parameter in self._own:
            mine = torch.zeros_like(local(parameter.detach()))
            parameter.grad = like(parameter, mine)
        if mine is not None and not mine.is_contiguous():
            mine = mine.contiguous()
            parameter.grad = like(parameter, mine)
        return None if mine is None else mine.view(-1)

    def _room_for_sum(self, parameter: nn.Parameter, mine: Tensor | None) -> Tensor:
        assert mine is not None
        master = self._masters.get(parameter)
        return mine if master is None else torch.empty_like(mine, dtype=master.dtype)

    @torch.no_grad()
    def hand_out(self) -> None:
        self.prepare()
        me = self._group.rank
        parts = [_in_order(local(p.detach())).view(torch.uint8) for p in self._replica.parameters]
        buffer, own_row = self._buffer.view(torch.uint8), self._row.view(torch.uint8)
        for rows, row, pieces in self._each_turn(self._to_all, buffer, own_row):
            for piece in pieces:
                if piece.owner == me:
                    row[piece.at : piece.at + piece.length].copy_(piece.of(parts[piece.parameter]))
            self._group.all_gather(rows.view(-1), row).wait()
            for piece in pieces:
                if piece.owner != me:
                    piece.of(parts[piece.parameter]).copy_(rows[piece.owner, piece.at : piece.at + piece.length])

    @torch.no_grad()
    def prepare(self) -> None:
        for parameter, working in self._working.items():
            working.copy_(self._masters[parameter])
            parameter.data = working
        self._working.clear()

    def settle(self) -> None:
        """Masters are in their places."""
        for parameter, master in self._masters.items():
            if parameter not in self._working:
                self._working[parameter] = parameter.data
                parameter.data = master

    def _each_turn(
        self, turns: list[tuple[int, list[Piece]]], buffer: Tensor, row: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, list[Piece]]]:
        for width, pieces in turns:
            yield buffer[: self._group.size * width].view(-1, width), row[:width], pieces


def rounded_to(lower: torch.dtype | None, model: nn.Module) -> dict[Tensor, torch.dtype]:
    """The trained matrices that autocast rounds before it multiplies with them, and those that are looked up."""
    found: dict[Tensor, torch.dtype] = {}
    if lower is None:
        return found
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd):
            weight = module.weight
            if weight.requires_grad and weight.numel() and weight.dtype.itemsize > lower.itemsize:
                found[weight] = lower
    return found


def everything_in(model: nn.Module) -> dict[str, Tensor]:
    return {**model.state_dict(keep_vars=True), **dict(model.named_buffers())}


class Piece(NamedTuple):
    """A stretch of a flat parameter, and its place in the row of its owner."""

    owner: int
    at: int
    parameter: int
    first: int
    length: int
    ends: bool  # there is no more of the parameter

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.first : self.first + self.length]


def deal_turns(shares: Sequence[Sequence[tuple[int, int]]], width: int) -> list[tuple[int, list[Piece]]]:
    """What goes into rows of `width` numbers, turn by turn, until the longest share is through.

    A share lists its parameters, each with its number and its length. The rows of the last turn are as long as it needs.
    """
    longest = max(sum(length for _, length in share) for share in shares)
    turns: list[tuple[int, list[Piece]]] = [
        (min(width, longest - first), []) for first in range(0, max(longest, 1), width)
    ]
    for owner, share in enumerate(shares):
        place = 0  # in the whole share
        for parameter, length in share:
            done = 0
            while done < length:
                turn, at = divmod(place, width)
                count = min(length - done, width - at)
                turns[turn][1].append(Piece(owner, at, parameter, done, count, done + count == length))
                done, place = done + count, place + count
    return turns


def _in_order(tensor: Tensor) -> Tensor:
    """All its numbers as one row that shares its memory, in the order they lie there, which is the same on every rank."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
