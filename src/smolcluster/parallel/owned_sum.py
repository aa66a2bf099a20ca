"""ZeRO stage 1 on the elastic plane: gradient sums go to the owners of parameters, which send the updated parameters back.

Each member owns some of the parameters (`shards.py`) and backs up the member before it. Owner and backup both hold the sums of
a round and the optimizer state; after the commit both take the step, and the owner sends its parameters to all.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from smolcluster.comm.codecs import Codec
from smolcluster.comm.codecs.feedback import under
from smolcluster.comm.contributions import Contributions
from smolcluster.comm.group import Group, Work, gather_json
from smolcluster.comm.rounds import Combination, Committed
from smolcluster.comm.view import View
from smolcluster.compute.optim import named_state, update_named_state
from smolcluster.compute.replica import Replica
from smolcluster.errors import SmolclusterError
from smolcluster.parallel.shards import backed_up_by, backup_of, owners, providers


class OwnedSum(Combination):
    """Sums go to the owners of parameters; each updates its own and those that it backs up."""

    def __init__(self, replica: Replica, *, num_slots: int) -> None:
        self._replica = replica
        self._names = {p: n for n, p in replica.model.named_parameters()}
        self._home = torch.device("cpu")
        self._gradients: list[list[Tensor]] = []
        self._slots: list[_OwnedSlot | None] = [None] * num_slots
        self._unfinished = False  # a step was applied, and updated parameters of others are missing

    # Views

    def formed(self, group: Group, view: View, established: Sequence[str | None]) -> None:
        instances = [member.instance for member in view.members]
        self._assign(group)
        if not established:
            return  # the run begins: every member has the whole state
        try:
            holders = [instances.index(holder) for holder in providers(established)]
        except (LookupError, ValueError) as error:
            raise SmolclusterError(
                f"optimizer state is lost: {error}; continue from the last checkpoint with --resume"
            ) from error
        before = owners(self._sizes, len(established))

        # A step was committed while a member died: broadcast its parameters from the member that has them.
        unfinished = torch.tensor([float(self._unfinished)])
        group.all_reduce(unfinished).wait()
        if unfinished.item():
            for place, holder in enumerate(holders):
                self._broadcast(
                    [p for p, o in zip(self._replica.parameters, before, strict=True) if o == place], holder
                )
        self._unfinished = False

        # Send optimizer state to its new owners and backups.
        had = {instance: place for place, instance in enumerate(established) if instance is not None}
        self._move_state(instances, had, before, holders)

    def _assign(self, group: Group) -> None:
        """Assign parameters to owners: a row of the buffer per member, padded to the longest."""
        self._group, n = group, group.size
        # A group of its own: sums and updated parameters are not exchanged in the same order on all members.
        self._gathers = group.sub(range(n))
        self._sizes = [p.numel() for p in self._replica.parameters]
        self._owner = owners(self._sizes, n)
        self._rows = [[j for j, o in enumerate(self._owner) if o == place] for place in range(n)]
        ends = [list(itertools.accumulate((self._sizes[j] for j in row), initial=0)) for row in self._rows]
        self._width = max(1, max(lengths[-1] for lengths in ends))
        # Of each row: its parameters, and where each is in it.
        self._spans = [
            [(j, slice(*span)) for j, span in zip(row, itertools.pairwise(lengths), strict=True)]
            for row, lengths in zip(self._rows, ends, strict=True)
        ]
        self._allocate()

    def _allocate(self) -> None:
        n = self._group.size
        self._slots = [_OwnedSlot(n, self._width, self._dtype, self._home) for _ in self._slots]
        self._gradients = self._gradients or [
            [torch.zeros_like(p, device=self._home) for p in self._replica.parameters] for _ in self._slots
        ]

    def _broadcast(self, parameters: Sequence[nn.Parameter], holder: int) -> None:
        if parameters:
            flat = torch.cat([p.detach().reshape(-1).to(self._home) for p in parameters])
            self._group.broadcast(flat, source=holder).wait()
            _spread(flat, [p.detach() for p in parameters])

    def _move_state(
        self, instances: Sequence[str], had: dict[str, int], before: Sequence[int], holders: Sequence[int]
    ) -> None:
        n, me = len(instances), self._group.rank
        state = named_state(self._replica.model, self._replica.optimizer)
        by_name: dict[str, list[str]] = {}
        for key in state:
            by_name.setdefault(key.split("/", 1)[1], []).append(key)

        def holds(place: int, j: int) -> bool:
            """Return whether the member now at `place` has the state of parameter j from the previous view."""
            former = had.get(instances[place])
            return former is not None and before[j] in (former, backed_up_by(former, len(holders)))

        outgoing: dict[str, list[list[Any]]] = {}
        parts: dict[int, list[Tensor]] = {}
        for j, parameter in enumerate(self._replica.parameters):
            if holders[before[j]] != me:
                continue
            for place in {self._owner[j], backup_of(self._owner[j], n)}:
                if place != me and not holds(place, j):
                    for key in by_name.get(self._names[parameter], ()):
                        tensor = state[key].to(self._home).contiguous()
                        dtype = str(tensor.dtype).removeprefix("torch.")
                        outgoing.setdefault(str(place), []).append([key, dtype, list(tensor.shape)])
                        parts.setdefault(place, []).append(tensor.reshape(-1).view(torch.uint8))
        everyone = gather_json(self._group, outgoing)
        works: list[Work] = [self._group.send(torch.cat(flats), to=place) for place, flats in parts.items()]
        for source, listed in enumerate(everyone):
            if str(me) in listed:
                rows = listed[str(me)]
                tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for _, dtype, shape in rows]
                flat = torch.empty(sum(t.nbytes for t in tensors), dtype=torch.uint8)
                self._group.recv(flat, source=source).wait()
                _spread(flat, [t.reshape(-1).view(torch.uint8) for t in tensors])
                update_named_state(
                    self._replica.model,
                    self._replica.optimizer,
                    {key: tensor for (key, _, _), tensor in zip(rows, tensors, strict=True)},
                )
        for work in works:
            work.wait()

    @property
    def _dtype(self) -> torch.dtype:
        return self._replica.parameters[0].dtype

    # Steps

    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        """Note the weight: gradients are exchanged after backward, in one reduce-scatter."""
        self._weight = weight / scale

    def finish(self, slot: int) -> None:
        for parameter, kept in zip(self._replica.parameters, self._gradients[slot], strict=True):
            if parameter.grad is None:
                kept.zero_()
            else:
                kept.copy_(parameter.grad).mul_(self._weight)
            parameter.grad = None
        self.again(slot, zero=False)

    def again(self, slot: int, *, zero: bool) -> None:
        sums, kept = self._slot(slot), self._gradients[slot]
        for place, spans in enumerate(self._spans):
            for j, span in spans:
                if zero:
                    kept[j].zero_()
                sums.whole[place, span] = kept[j].reshape(-1)
        sums.works = [self._group.reduce_scatter(sums.own, sums.whole)]
        sums.passed_on = False

    def done(self, slot: int) -> bool:
        sums = self._slot(slot)
        if sums.done and not sums.passed_on:
            self._pass_on(slot)
        return sums.passed_on and sums.done

    def wait(self, slot: int) -> None:
        sums = self._slot(slot)
        sums.wait()
        if not sums.passed_on:
            self._pass_on(slot)
            sums.wait()

    def _pass_on(self, slot: int) -> None:
        """Send the sums that this member owns to its backup."""
        sums, n, me = self._slot(slot), self._group.size, self._group.rank
        sums.wait()
        sums.passed_on = True
        if n > 1:
            send = self._group.send(sums.own, to=backup_of(me, n), tag=slot)
            sums.works = [send, self._group.recv(sums.backup, source=backed_up_by(me, n), tag=slot)]

    def norms(self, slot: int) -> tuple[float, float]:
        return float(get_total_norm(self._gradients[slot])), float(get_total_norm([self._slot(slot).own]))

    def give(self, result: Committed) -> None:
        sums, n, me = self._slot(result.slot), self._group.size, self._group.rank
        for place, flat in {backed_up_by(me, n): sums.backup, me: sums.own}.items():
            for j, span in self._spans[place]:
                parameter = self._replica.parameters[j]
                parameter.grad = flat[span].view(parameter.shape).to(parameter.device) * result.factor
        self._unfinished = True

    def complete(self) -> None:
        """Gather the updated parameters from their owners."""
        n, me = self._group.size, self._group.rank
        mine = torch.zeros(self._width, dtype=self._dtype)
        for j, span in self._spans[me]:
            mine[span] = self._replica.parameters[j].detach().reshape(-1)
        everyone = torch.empty(n, self._width, dtype=self._dtype)
        assert self._gathers is not None
        self._gathers.all_gather(everyone, mine).wait()
        for place, row in enumerate(self._rows):
            if place != me:
                _spread(everyone[place], [self._replica.parameters[j].detach() for j in row])
        self._unfinished = False
        self._drop_foreign_state()

    def _drop_foreign_state(self) -> None:
        """Free optimizer state that this member no longer holds: after a commit in this view its new owner has it."""
        n, me = self._group.size, self._group.rank
        held = {self._replica.parameters[j] for place in (me, backed_up_by(me, n)) for j in self._rows[place]}
        for parameter in [p for p in self._replica.optimizer.state if p not in held]:
            del self._replica.optimizer.state[parameter]

    def owned(self, names: Sequence[str]) -> list[str]:
        own = {self._names[self._replica.parameters[j]] for j in self._rows[self._group.rank]}
        return [name for name in names if name.split("/", 1)[1] in own]

    def _slot(self, slot: int) -> _OwnedSlot:
        sums = self._slots[slot]
        assert sums is not None
        return sums


class EncodedOwnedSum(OwnedSum):
    """OwnedSum with a codec: encoded gradients go to owner and backup, which add them up in the same order.

    Updated parameters are sent uncoded.
    """

    def __init__(self, replica: Replica, *, codec: Codec, num_slots: int) -> None:
        super().__init__(replica, num_slots=num_slots)
        trained = {n: p for n, p in replica.model.named_parameters() if p.requires_grad}
        self._parts, self._codec = Contributions(trained, codec=codec, num_slots=num_slots), codec
        self._sums: list[dict[int, Tensor] | None] = [None] * num_slots

    def own_state(self) -> dict[str, Tensor]:
        return {f"{self._codec.name}/{name}": tensor for name, tensor in self._parts.own_state().items()}

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        self._parts.load_own(under(f"{self._codec.name}/", tensors))

    def formed(self, group: Group, view: View, established: Sequence[str | None]) -> None:
        self._committed = view.step
        super().formed(group, view, established)

    def _allocate(self) -> None:
        n = self._group.size
        wants = [sorted({*self._rows[place], *self._rows[backed_up_by(place, n)]}) for place in range(n)]
        self._parts.formed(self._group, wants, step=self._committed)

    def start(self, slot: int, *, weight: float, scale: float = 1.0, stop: bool = False) -> None:
        self._parts.start(slot, weight=weight, scale=scale)

    def finish(self, slot: int) -> None:
        self._sums[slot] = None
        self._parts.finish(slot)

    def again(self, slot: int, *, zero: bool) -> None:
        self._sums[slot] = None
        self._parts.again(slot, zero=zero)

    def done(self, slot: int) -> bool:
        return self._parts.done(slot)

    def wait(self, slot: int) -> None:
        if self._sums[slot] is None:
            self._parts.wait(slot)
            self._parts.wait_sent(slot)
            weight, means = self._parts.mean(slot)
            shapes = [parameter.shape for parameter in self._replica.parameters]
            self._sums[slot] = {
                j: torch.zeros(shapes[j]) if mean is None else mean.mul_(weight) for j, mean in means.items()
            }

    def norms(self, slot: int) -> tuple[float, float]:
        sums = self._sums[slot]
        assert sums is not None
        own = [sums[j] for j in self._rows[self._group.rank]]
        return self._parts.norm(slot), float(get_total_norm(own))

    def give(self, result: Committed) -> None:
        sums = self._sums[result.slot]
        assert sums is not None
        for j, summed in sums.items():
            parameter = self._replica.parameters[j]
            parameter.grad = summed.mul_(result.factor).to(parameter.device, parameter.dtype)
        self._sums[result.slot] = None
        self._parts.counted(result.slot)
        self._unfinished = True


class _OwnedSlot:
    """The sums of one step: `whole` goes in, `own` comes out, `backup` is of the owner before."""

    def __init__(self, members: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.whole = torch.zeros(members, width, dtype=dtype, device=device)
        self.own = torch.zeros(width, dtype=dtype, device=device)
        self.backup = torch.zeros(width, dtype=dtype, device=device) if members > 1 else self.own
        self.works: list[Work] = []
        self.passed_on = False

    @property
    def done(self) -> bool:
        return all(work.done for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


def _spread(flat: Tensor, parts: Sequence[Tensor]) -> None:
    offset = 0
    for part in parts:
        part.copy_(flat[offset : offset + part.numel()].view(part.shape))
        offset += part.numel()
