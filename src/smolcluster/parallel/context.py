"""Context parallel: each rank of the axis has a part of every sequence, for sequences too long for one rank.

    rank c of C has tokens c T/C to (c+1) T/C of each sequence, at their own positions
    in each attention:  all-gather the keys and values of all parts; queries attend to those up to the last token of this rank
    backward:           reduce-scatter their gradients
    loss:               the mean over all tokens: the mean of each part times its share of the targets, added up
    gradients:          summed over the axis together with the data shards

It is exact. A rank keeps 1/C of the activations; keys and values are complete, for one layer at a time. Later parts attend
to more tokens, so the ranks are not equally busy in attention.

Bytes per step, sent and received each, for L layers and K bytes of keys and values of a whole batch: 2 L (C-1)/C K, forward and
backward together.

Liu et al., "Ring attention with blockwise transformers for near-infinite context", 2023, uses a ring instead of the gather;
Llama Team, "The Llama 3 herd of models", 2024, section 3.3, gathers like this module.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from smolcluster.comm.group import Group
from smolcluster.comm.sharded import full_tensor
from smolcluster.compute.replica import Batch, zero_loss
from smolcluster.errors import UserError
from smolcluster.models.protocols import SequenceSharded
from smolcluster.parallel.axes import divisors
from smolcluster.tasks.base import Task, count_of


class SequenceShards:
    """Cut batches along the sequence, keep this rank's part, and gather keys and values."""

    def __init__(self, group: Group, task: Task, example: Any) -> None:
        """`example`: a batch, to refuse one that cannot be cut before training starts."""
        self._group, self._task = group, task
        self.cut(example)

    def prepare(self, model: nn.Module) -> None:
        if not isinstance(model, SequenceSharded):
            raise UserError(
                f"{type(model).__name__} cannot be trained on parts of sequences: it has no cut_sequence(piece, gather); "
                "see models/protocols.py, or use strategy.cp=1"
            )
        model.cut_sequence(self._group.rank, self.gather)

    def batch(self, batch: Batch) -> Batch:
        """Cut every micro-batch."""
        return replace(batch, parts=[self.cut(part) for part in batch.parts])

    def cut(self, part: Any) -> tuple[Any, float]:
        """Return this rank's part of a micro-batch, and its share of the targets."""
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
        """Return this part's loss; over all ranks they add up to the mean over all tokens."""
        part, share = piece
        return self._task.loss(model, part) * share if share else zero_loss(self._task.loss, model, part)

    def metrics(self, model: nn.Module, part: Any) -> dict[str, Tensor]:
        mine, share = self.cut(part)
        found = self._task.metrics(model, mine)
        values = torch.stack([full_tensor(value).double() for value in found.values()]).to(self._group.device)
        values = values * share if share else torch.zeros_like(values)  # a mean over nothing is NaN
        self._group.all_reduce(values).wait()
        return dict(zip(found, values, strict=True))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gather(self, piece_BKTE: Tensor) -> Tensor:
        """Gather along the tokens: all parts up to this rank's."""
        num_tokens = piece_BKTE.size(2)
        everything: Tensor = _Gather.apply(piece_BKTE, self._group)  # type: ignore[no-untyped-call]
        return everything[:, :, : (self._group.rank + 1) * num_tokens]


class _Gather(torch.autograd.Function):
    """All-gather along dimension 2; backward reduce-scatters the gradients."""

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
