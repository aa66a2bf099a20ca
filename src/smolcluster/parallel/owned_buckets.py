"""ZeRO stage 1 on the mesh plane: gradients are reduced to the owners of parameters, a buffer at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smolcluster.comm.group import Group, collect_tensors
from smolcluster.comm.rounds import Combination, Committed
from smolcluster.comm.sharded import box_name, gradient, like, local
from smolcluster.compute.replica import Replica
from smolcluster.errors import UserError
from smolcluster.parallel.shards import owners


class OwnedBuckets(Combination):
    """Reduce gradients to the owners of their parameters and gather the updated parameters, a buffer at a time.

    Row r of the buffer holds what rank r owns; rows are padded to the longest. Sums replace the owner's own gradients, so the
    buffer is the only extra memory. The gradients of a share are followed by use counts: how many ranks used each parameter. If
    no rank used one, it gets no gradient, as in `comm/buckets.py`.

    With a `lower` type, matrices that autocast would round at every use are kept rounded, like their gradients. Only the owner
    also has the master weights in full, which replace the rounded ones for the update and for saving.
    """

    def __init__(self, replica: Replica, group: Group, *, bucket_bytes: int, lower: torch.dtype | None = None) -> None:
        self._replica, self._group, self._bucket_bytes, self._lower = replica, group, bucket_bytes, lower
        self._masters: dict[nn.Parameter, Tensor] = {}  # of what this rank owns
        self._working: dict[nn.Parameter, Tensor] = {}  # the rounded ones, while the masters replace them
        self._norm: Tensor | None = None
        parts = [local(p.detach()) for p in replica.parameters]
        sizes = [part.numel() for part in parts]
        owner = owners(sizes, group.size)
        self._own = {p for p, place in zip(replica.parameters, owner, strict=True) if place == group.rank}
        shares = [[i for i, place in enumerate(owner) if place == rank] for rank in range(group.size)]
        self._shares = shares
        # Sums are taken in the widest type, and updates are sent as raw bytes: nothing is rounded.
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        longest = max(sum(sizes[i] + 1 for i in share) for share in shares)
        room = self._bucket_bytes // (2 * group.size * dtype.itemsize)  # gloo works on a copy of it
        width = max(1, min(longest, room))
        counts = [[(len(sizes) + rank, len(share))] for rank, share in enumerate(shares)]
        gradients = [[(i, sizes[i]) for i in share] for share in shares]
        self._to_owners = fill_rows([mine + used for mine, used in zip(gradients, counts, strict=True)], width)
        home = group.buffer_device(parts[0].device)
        self._buffer = torch.zeros(group.size * width, dtype=dtype, device=home)
        self._row = torch.zeros(width, dtype=dtype, device=home)
        self._all_used = [torch.ones(len(share), dtype=dtype, device=home) for share in shares]
        self._counts = torch.zeros(
            len(shares[group.rank]), dtype=dtype, device=home
        )  # ranks that used each owned parameter

    def begin(self) -> None:
        """Start, after all ranks have the same weights. With a lower type round the matrices and keep masters of owned ones."""
        rounded = rounded_to(self._lower, self._replica.model)
        for parameter in self._replica.parameters:
            if parameter in rounded:
                if parameter in self._own:
                    self._masters[parameter] = parameter.data
                parameter.data = parameter.data.to(rounded[parameter])
        sizes = [local(p.detach()).nbytes for p in self._replica.parameters]
        self._to_all = fill_rows([[(i, sizes[i]) for i in share] for share in self._shares], self._row.nbytes)

    def updates(self, parameter: Tensor) -> bool:
        """Return whether this rank updates the parameter, and saves it."""
        return parameter in self._own

    # A round

    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        """Note the weight: gradients are exchanged in `wait`."""
        self._weight, self._stop = weight / scale, stop

    def finish(self, slot: int) -> None:
        """Do nothing: `wait` exchanges."""

    def done(self, slot: int) -> bool:
        return False

    @torch.no_grad()
    def wait(self, slot: int) -> None:
        parameters, me = self._replica.parameters, self._group.rank
        unused = {i for i, parameter in enumerate(parameters) if parameter.grad is None}
        gradients = [self._flat_gradient(p) for p in parameters] + self._used(unused)
        sums: dict[int, Tensor] = {}  # of what this rank owns
        for rows, row, spans in self._each_turn(self._to_owners, self._buffer, self._row):
            for span in spans:
                there, flat = rows[span.owner, span.at : span.at + span.length], gradients[span.parameter]
                there.zero_() if flat is None else there.copy_(span.of(flat)).mul_(self._weight)
            self._group.reduce_scatter(row, rows.view(-1)).wait()
            for span in spans:
                if span.parameter >= len(parameters):
                    if span.owner == me:
                        span.of(self._counts).copy_(row[span.at : span.at + span.length])
                    continue
                number, parameter = span.parameter, parameters[span.parameter]
                if span.owner == me:
                    if number not in sums:
                        sums[number] = self._room_for_sum(parameter, gradients[number])
                    span.of(sums[number]).copy_(row[span.at : span.at + span.length])
                if span.ends and (span.owner != me or parameter in self._masters):
                    gradients[number] = parameter.grad = None
        self._use_masters()
        for number, summed in sums.items():
            parameter = parameters[number]
            if parameter.grad is None:
                parameter.grad = summed.view(parameter.shape)
        own = self._shares[me]
        if not unused.isdisjoint(own):  # else all owned parameters were used
            for i, count in zip(own, self._counts.tolist(), strict=True):
                if i in unused and count == 0:
                    parameters[i].grad = None

    def stop_count(self, slot: int) -> Tensor:
        """Count stop requests, and agree on the norm, of which each rank has a part."""
        own = [mine for p in self._replica.parameters if (mine := gradient(p)) is not None]
        totals = torch.zeros(2, dtype=torch.float64, device=self._group.device)
        if own:
            totals[0] = torch.stack(torch._foreach_norm(own)).double().square().sum()
        totals[1] = float(self._stop)
        self._group.all_reduce(totals).wait()
        self._norm = totals[0].sqrt()
        return totals[1:].float()

    def norm(self, slot: int) -> Tensor | None:
        norm, self._norm = self._norm, None
        return norm

    def give(self, result: Committed) -> None:
        """Do nothing: the sums are in `.grad`."""

    def _used(self, unused: set[int]) -> list[Tensor | None]:
        """Return, for the owner of each share, which of its parameters this rank used."""
        rows: list[Tensor | None] = []
        for share, ones in zip(self._shares, self._all_used, strict=True):
            row = ones if unused.isdisjoint(share) else ones.new_tensor([float(i not in unused) for i in share])
            rows.append(row)
        return rows

    def _flat_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient flat, sharing its memory; zeros for an owner without one."""
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
    def complete(self) -> None:
        """All-gather the updated parameters from their owners."""
        self._restore_rounded()
        me = self._group.rank
        parts = [_in_order(local(p.detach())).view(torch.uint8) for p in self._replica.parameters]
        buffer, own_row = self._buffer.view(torch.uint8), self._row.view(torch.uint8)
        for rows, row, spans in self._each_turn(self._to_all, buffer, own_row):
            for span in spans:
                if span.owner == me:
                    row[span.at : span.at + span.length].copy_(span.of(parts[span.parameter]))
            self._group.all_gather(rows.view(-1), row).wait()
            for span in spans:
                if span.owner != me:
                    span.of(parts[span.parameter]).copy_(rows[span.owner, span.at : span.at + span.length])

    def _each_turn(
        self, turns: list[tuple[int, list[BucketSpan]]], buffer: Tensor, row: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, list[BucketSpan]]]:
        for width, spans in turns:
            yield buffer[: self._group.size * width].view(-1, width), row[:width], spans

    # Masters, and what is saved

    def _use_masters(self) -> None:
        for parameter, master in self._masters.items():
            if parameter not in self._working:
                self._working[parameter] = parameter.data
                parameter.data = master

    @torch.no_grad()
    def _restore_rounded(self) -> None:
        for parameter, working in self._working.items():
            working.copy_(self._masters[parameter])
            parameter.data = working
        self._working.clear()

    @contextmanager
    def in_full(self) -> Iterator[None]:
        """Use the master weights inside, to save or load them."""
        self._use_masters()
        try:
            yield
        finally:
            self._restore_rounded()

    def owned(self, names: Sequence[str]) -> list[str]:
        parameters = self._replica.model.state_dict(keep_vars=True)
        return [name for name in names if parameters[name.partition("/")[2]] in self._own]

    def _saves(self, tensor: Tensor) -> bool:
        """Return whether this rank saves the tensor: its owner does, or the first rank for what is not trained."""
        return tensor in self._own or (self._group.rank == 0 and not tensor.requires_grad)

    def saved(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], in_boxes: bool) -> dict[str, Any]:
        """Return the state to save: all of it on the first rank, or with `in_boxes` what each rank owns."""
        group, parameters = self._group, self._replica.model.state_dict(keep_vars=True)
        mine = {n: t for n, t in weights.items() if self._saves(parameters[n])}
        if in_boxes:
            kinds, kept = {"weights": weights, "optimizer": optimizer}, {"weights": mine, "optimizer": optimizer}
            full_shapes = {kind: {n: list(t.shape) for n, t in tensors.items()} for kind, tensors in kinds.items()}
            boxes = {
                kind: {box_name(n, (0,) * t.ndim): t for n, t in tensors.items() if t.numel()}
                for kind, tensors in kept.items()
            }
            return {**boxes, "full_shapes": full_shapes}
        if self._lower is not None:
            weights = collect_tensors(group, mine)
        return {"weights": weights, "optimizer": collect_tensors(group, dict(optimizer))}

    def gradient_norms(self) -> dict[str, Tensor]:
        """Return the norm of each parameter's last gradient, which its owner has. All ranks call it together."""
        names = [n for n, p in self._replica.model.named_parameters() if p.requires_grad]
        mine = self._replica.gradient_norms
        row = torch.zeros(len(names), dtype=torch.float64, device=self._group.device)
        for place, name in enumerate(names):
            if name in mine:
                row[place] = mine[name]
        self._group.all_reduce(row).wait()
        return dict(zip(names, row, strict=True))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Wrap forward and backward: turn a dtype error into one that names the option."""
        try:
            yield
        except RuntimeError as error:
            if self._lower is None or "dtype" not in str(error):
                raise
            raise UserError(
                f"a layer needs its weights in their own type ({str(error).splitlines()[0]}): "
                "the model cannot be used with strategy.param_dtype in stage 1; leave it out"
            ) from error


def rounded_to(lower: torch.dtype | None, model: nn.Module) -> dict[Tensor, torch.dtype]:
    """Return the trained weights of layers that autocast rounds at every use, and of embeddings."""
    found: dict[Tensor, torch.dtype] = {}
    if lower is None:
        return found
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd):
            weight = module.weight
            if weight.requires_grad and weight.numel() and weight.dtype.itemsize > lower.itemsize:
                found[weight] = lower
    return found


class BucketSpan(NamedTuple):
    """A slice of a flat parameter, and its position in the row of its owner."""

    owner: int
    at: int
    parameter: int
    first: int
    length: int
    ends: bool  # it is the last of its parameter

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.first : self.first + self.length]


def fill_rows(shares: Sequence[Sequence[tuple[int, int]]], width: int) -> list[tuple[int, list[BucketSpan]]]:
    """Cut shares into turns of rows of at most `width` numbers: [(row length, slices)].

    A share lists its parameters as (number, length). The rows of the last turn are as long as needed.
    """
    longest = max(sum(length for _, length in share) for share in shares)
    turns: list[tuple[int, list[BucketSpan]]] = [
        (min(width, longest - first), []) for first in range(0, max(longest, 1), width)
    ]
    for owner, share in enumerate(shares):
        place = 0  # in the whole share
        for parameter, length in share:
            done = 0
            while done < length:
                turn, at = divmod(place, width)
                count = min(length - done, width - at)
                turns[turn][1].append(BucketSpan(owner, at, parameter, done, count, done + count == length))
                done, place = done + count, place + count
    return turns


def _in_order(tensor: Tensor) -> Tensor:
    """Return the tensor flat in memory order, sharing its memory; the order is the same on every rank."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
