"""Gradients in flat buckets, all-reduced over a group while backward is still running.

Backward produces gradients from the last layer to the first. Each one is scaled and copied into a flat bucket; a full
bucket is all-reduced at once, so most communication overlaps with the rest of backward. Buckets are sent in the same order
on every rank, in whatever order gradients become ready.

One `slot` holds the gradients of one step. With `num_slots` = K + 1, up to K steps are in flight while the next is computed.

The last bucket has additional elements: the number of ranks that requested a stop, so that all stop after the same step, and
for each parameter the number of ranks that used it. A parameter that no rank used gets no gradient, as on one worker: a
gradient of zero would let the optimizer decay it. Only a rank with unused parameters reads these counts, so a GPU is not
synchronized where all are used.

Where members may be lost, each keeps its local gradients in addition to the sums, to sum them again in the group of another
view.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from smolcluster.comm.group import Group, Work
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.comm.rounds import Combination, Committed
from smolcluster.comm.sharded import gradient, like, local
from smolcluster.comm.view import View

FIRST_BUCKET_BYTES = 2**20


@dataclass(slots=True)
class _BucketSlot:
    """The gradients of one step: `flats[i]` is bucket i, `views[j]` the view of parameter j in its bucket."""

    flats: list[Tensor]
    views: list[Tensor]
    used: Tensor  # for each parameter, whether this rank used it
    stop_count: Tensor
    # This rank's part of each bucket, which `views` then point into; empty for a fixed membership.
    mine: list[Tensor]
    unused: set[int] = field(default_factory=set)  # parameters that this rank did not use
    weight: float = 0.0  # of this rank's gradients
    works: list[Work] = field(default_factory=list)


class BucketSum(Combination):
    """Every member gets the full sum of gradients."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Group | None, *, bucket_bytes: int, num_slots: int
    ) -> None:
        """`group`: of a fixed membership. None: `formed` sets it, and each member keeps its part to combine it again."""
        self._keep = group is None
        self._group = group = group or MemoryGroup.world(1)[0]
        self._parameters = list(parameters)
        self._parts = [local(p.detach()) for p in self._parameters]  # this rank's part of each
        device = self._parts[0].device
        self._home = group.buffer_device(device)
        self._staged = self._home != device  # copies for a backend that does not support the device
        self._bucket_of, self._num_buckets = assign_buckets(
            [(p.dtype, p.nbytes) for p in self._parts],
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=min(FIRST_BUCKET_BYTES, bucket_bytes),
        )
        self._members = [[j for j, b in enumerate(self._bucket_of) if b == i] for i in range(self._num_buckets)]
        self._slots = [self._make_slot() for _ in range(num_slots)]
        self._current: _BucketSlot | None = None
        self._missing: list[int] = []
        self._ready: list[bool] = []
        self._next_to_send = 0
        for j, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, j))  # type: ignore[no-untyped-call]

    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        current = self._slots[slot]
        if self._keep:
            current.works.clear()  # of an aborted group
        assert not current.works, "the slot is still in flight"
        current.stop_count.fill_(float(stop))
        current.used.fill_(1.0)
        current.unused = set()
        current.weight = weight / scale
        self._current = current
        self._missing = [len(members) for members in self._members]
        self._ready = [False] * len(self._parameters)
        self._next_to_send = 0

    def finish(self, slot: int) -> None:
        """After backward: send the remaining buckets.

        The last backward may not have reached every parameter. One that an earlier micro-batch used still has its gradient;
        one that none used adds nothing to the sum.
        """
        current = self._slots[slot]
        for j, parameter in enumerate(self._parameters):
            if self._ready[j]:
                continue
            if parameter.grad is not None:
                self._on_gradient(j, parameter)
            else:
                current.views[j].zero_()
                current.used[j] = 0.0
                current.unused.add(j)
                self._mark(current, j)
        self._current = None

    def done(self, slot: int) -> bool:
        return all(work.done for work in self._slots[slot].works)

    def wait(self, slot: int) -> None:
        current = self._slots[slot]
        for work in current.works:
            work.wait()
        current.works.clear()

    def stop_count(self, slot: int) -> Tensor:
        return self._slots[slot].stop_count

    def give(self, result: Committed) -> None:
        """Set the sums as the parameters' gradients; None for a parameter that no rank used."""
        current = self._slots[result.slot]
        idle = self._idle(current)
        if result.factor != 1.0:
            torch._foreach_mul_(current.flats, result.factor)
        for j, (parameter, view) in enumerate(zip(self._parameters, self._views_of(current.flats), strict=True)):
            summed = view.to(parameter.device) if self._staged else view
            parameter.grad = None if j in idle else like(parameter, summed)

    def results(self, slot: int) -> list[Tensor | None]:
        current = self._slots[slot]
        idle = self._idle(current)
        return [None if j in idle else view for j, view in enumerate(self._views_of(current.flats))]

    def put(self, slot: int, results: Sequence[Tensor | None]) -> None:
        current = self._slots[slot]
        current.stop_count.zero_()
        current.unused = {j for j, mine in enumerate(results) if mine is None}
        used = self._used_in(current.flats)
        for j, (view, mine) in enumerate(zip(self._views_of(current.flats), results, strict=True)):
            used[j] = 0.0 if mine is None else 1.0
            view.zero_() if mine is None else view.copy_(mine)

    def formed(self, group: Group, view: View, established: Sequence[str | None]) -> None:
        self._group = group

    def again(self, slot: int, *, zero: bool) -> None:
        current = self._slots[slot]
        current.works.clear()
        if zero:
            current.unused = set(range(len(self._parameters)))
        for flat, mine in zip(current.flats, current.mine, strict=True):
            if zero:
                mine.zero_()
            flat.copy_(mine)
            current.works.append(self._group.all_reduce(flat))

    def contributed(self, slot: int) -> list[Tensor]:
        current = self._slots[slot]
        return [mine / (current.weight or 1.0) for mine in current.views]

    def norms(self, slot: int) -> tuple[float, float]:
        current = self._slots[slot]
        mine, held = (get_total_norm(self._gradients_in(flats)) for flats in (current.mine, current.flats))
        return float(mine), float(held)

    def shares(self, slot: int) -> dict[int, Tensor]:
        flats = self._slots[slot].flats
        return {number: flats[number] for number in range(self._group.rank, len(flats), self._group.size)}

    def follow(self, slot: int, shares: Mapping[int, Tensor], *, members: int) -> None:
        current = self._slots[slot]
        if shares.keys() != set(range(len(current.flats))):
            raise ValueError(f"got {len(shares)} buckets, expected {len(current.flats)}")
        current.unused = set(range(len(self._parameters)))  # on this rank; the counts are over all ranks
        for number, flat in enumerate(current.flats):
            share = shares[number]
            if share.shape != flat.shape or share.dtype != flat.dtype:
                raise ValueError(
                    f"bucket {number} is {share.dtype} of {tuple(share.shape)}, expected {flat.dtype} of "
                    f"{tuple(flat.shape)}"
                )
            flat.copy_(share)

    def _idle(self, slot: _BucketSlot) -> set[int]:
        """Return the parameters that no rank used. Reads the counts only if this rank has unused ones."""
        if not slot.unused:
            return set()
        counts = self._used_in(slot.flats).tolist()
        return {j for j in slot.unused if counts[j] == 0}

    def _on_gradient(self, j: int, parameter: Tensor) -> None:
        slot = self._current
        if slot is None:
            return
        mine = gradient(parameter)
        assert mine is not None
        if self._staged:
            slot.views[j].copy_(mine * slot.weight)
        else:
            torch.mul(mine, slot.weight, out=slot.views[j])
        parameter.grad = None
        self._mark(slot, j)

    def _mark(self, slot: _BucketSlot, j: int) -> None:
        """Gradient j is in its bucket: send every full bucket whose predecessors were sent."""
        self._ready[j] = True
        self._missing[self._bucket_of[j]] -= 1
        while self._next_to_send < self._num_buckets and self._missing[self._next_to_send] == 0:
            flat = slot.flats[self._next_to_send]
            if self._keep:
                flat.copy_(slot.mine[self._next_to_send])
            slot.works.append(self._group.all_reduce(flat))
            self._next_to_send += 1

    def _make_slot(self) -> _BucketSlot:
        flats = self._make_flats()
        mine = self._make_flats() if self._keep else []
        filled = mine or flats
        return _BucketSlot(
            flats=flats,
            views=self._views_of(filled),
            used=self._used_in(filled),
            stop_count=filled[-1][-1:],
            mine=mine,
        )

    def _make_flats(self) -> list[Tensor]:
        flats = []
        for i, members in enumerate(self._members):
            length = sum(self._parts[j].numel() for j in members)
            if i == self._num_buckets - 1:
                length += len(self._parts) + 1
            flats.append(torch.zeros(length, dtype=self._parts[members[0]].dtype, device=self._home))
        return flats

    def _used_in(self, flats: Sequence[Tensor]) -> Tensor:
        return flats[-1][-len(self._parts) - 1 : -1]

    def _gradients_in(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the buckets without the counts at the end of the last one."""
        return [*flats[:-1], flats[-1][: -len(self._parts) - 1]]

    def _views_of(self, flats: Sequence[Tensor]) -> list[Tensor]:
        views: list[Tensor | None] = [None] * len(self._parts)
        for flat, members in zip(flats, self._members, strict=True):
            offset = 0
            for j in members:
                part = self._parts[j]
                views[j] = flat[offset : offset + part.numel()].view(part.shape)
                offset += part.numel()
        return [view for view in views if view is not None]


def assign_buckets(
    parameters: Sequence[tuple[torch.dtype, int]], *, bucket_bytes: int, first_bucket_bytes: int
) -> tuple[list[int], int]:
    """Assign parameters to buckets, from the last parameter to the first, one dtype per bucket.

    The first bucket is small, so that communication starts early. Returns the bucket of each parameter and their number.
    """
    bucket_of = [0] * len(parameters)
    index, filled, limit = 0, 0, first_bucket_bytes
    for j in range(len(parameters) - 1, -1, -1):
        dtype, size = parameters[j]
        previous = parameters[j + 1][0] if j + 1 < len(parameters) else dtype
        if filled and (filled + size > limit or dtype != previous):
            index, filled, limit = index + 1, 0, bucket_bytes
        bucket_of[j] = index
        filled += size
    return bucket_of, index + 1
