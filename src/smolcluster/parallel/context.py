"""Context parallel: each rank of the axis has a piece of every sequence, for sequences too long for one.

    rank c of C has tokens c T/C to (c+1) T/C of each sequence, at their own positions
    in each attention:  all-gather the keys and values of all pieces; my queries look at those up to my last token
    backward:           reduce-scatter their gradients, each piece gets the sum of what all ranks found
    loss:               the mean over all tokens: my piece's mean times its part of the targets; parts add up
    gradients:          summed over the axis together with the data shards

It is exact. A rank keeps 1/C of the activations; keys and values are whole, for one layer at a time. Later pieces have more to
look at, so the ranks are not equally busy in attention.

Bytes per step, sent and received each, for L layers and K bytes of keys and values of a whole batch: 2 L (C-1)/C K, forward and
backward together.

Liu et al., "Ring attention with blockwise transformers for near-infinite context", 2023, has the ring in place of the gather;
Llama Team, "The Llama 3 herd of models", 2024, section 3.3, gathers as this does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from smolcluster.comm.group import Group
from smolcluster.comm.sharded import whole
from smolcluster.compute.replica import Batch, zero_loss
from smolcluster.errors import UserError
from smolcluster.models.protocols import SequenceSharded
from smolcluster.parallel.axes import divisors
from smolcluster.tasks.base import Task, count_of


class Pieces:
    """This rank's piece of every sequence."""

    def __init__(self, group: Group, task: Task, example: Any) -> None:
        """`example` is a batch: what cannot be cut is refused before anything starts."""
        self._group, self._task = group, task
        self.cut(example)

    def tell(self, model: nn.Module) -> None:
        if not isinstance(model, SequenceSharded):
            raise UserError(
                f"{type(model).__name__} cannot be trained on pieces of sequences: it has no cut_sequence(piece, gather); "
                "see models/protocols.py, or use strategy.cp=1"
            )
        model.cut_sequence(self._group.rank, self.gather)

    def batch(self, batch: Batch) -> Batch:
        """My piece of each part, and what it counts."""
        return replace(batch, parts=[self.cut(part) for part in batch.parts])

    def cut(self, part: Any) -> tuple[Any, float]:
        """My piece of a batch, and its part of the targets."""
        rank, size = self._group.rank, self._group.size

        def piece(tensor: Tensor) -> Tensor:
            if tensor.ndim < 2:
                raise UserError(
                    f"strategy.cp = {size} cuts batches along the sequence, and one has a tensor of shape {tuple(tensor.shape)}"
                )
            if tensor.size(1) % size:
                raise UserError(
                    f"strategy.cp = {size} does not divide sequences of {tensor.size(1)} tokens; try {divisors(tensor.size(1))}"
                )
            return tensor.chunk(size, dim=1)[rank]

        mine = tree_map_only(Tensor, lambda t: piece(t).clone(), part)
        counted, total = count_of(self._task, mine), count_of(self._task, part)
        if counted is None or total is None:
            return mine, 1.0 / size
        return mine, counted / total if total else 0.0

    def loss(self, model: nn.Module, piece: tuple[Any, float]) -> Tensor:
        """The losses of all pieces add up to the mean over all tokens."""
        part, share = piece
        return self._task.loss(model, part) * share if share else zero_loss(self._task.loss, model, part)

    def metrics(self, model: nn.Module, part: Any) -> dict[str, Tensor]:
        mine, share = self.cut(part)
        found = self._task.metrics(model, mine)
        values = torch.stack([whole(value).double() for value in found.values()]).to(self._group.device)
        values = values * share if share else torch.zeros_like(values)  # a mean over nothing is NaN
        self._group.all_reduce(values).wait()
        return dict(zip(found, values, strict=True))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather(self, piece_BKTE: Tensor) -> Tensor:
        """Along the tokens: all pieces up to this one."""
        num_tokens = piece_BKTE.size(2)
        everything: Tensor = _Gather.apply(piece_BKTE, self._group)  # type: ignore[no-untyped-call]
        return everything[:, :, : (self._group.rank + 1) * num_tokens]


class _Gather(torch.autograd.Function):
    """All pieces along dimension 2; backward sums what every rank found for a piece where that piece came from."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, group: Group) -> Tensor:
        ctx.group = group
        pieces = torch.empty(group.size, *piece.shape, dtype=piece.dtype, device=piece.device)
        group.all_gather(pieces.view(-1), piece.contiguous().view(-1)).wait()
        return torch.cat(pieces.unbind(), dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        pieces = torch.stack(gradient.chunk(ctx.group.size, dim=2))
        mine = torch.empty_like(pieces[0])
        ctx.group.reduce_scatter(mine.view(-1), pieces.view(-1)).wait()
        return mine, None
