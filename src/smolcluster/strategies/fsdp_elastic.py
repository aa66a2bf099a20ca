"""fsdp (ZeRO) stages 0 and 1 where members come and go.

Stage 0 is `allreduce` on the elastic plane. Stage 1 shards the optimizer: every member has the whole model and its gradients,
and owns some of the parameters (`parallel/shards.py`).

    for each step s:
        my gradient on my samples, at my weights
        reduce-scatter: the sum of each parameter's gradient goes to its owner
        the owner passes the sum on to its buddy                                       DONE(s), with the norm of its part
        after COMMIT(s): w[own] <- optimizer(w[own], clip(g[own]));  the same for the ward's parameters
        all-gather: every owner sends its updated parameters, and only those

The owner and its buddy hold the sums and the optimizer state before a step is committed. So when an owner dies, its buddy has
all that is needed: it takes the committed step in the owner's place and hands the parameters out. In a new view the
parameters are dealt anew, and optimizer state moves from those who hold it to those who should. Only when a member and its
buddy die at the same moment is something lost, and the run must go on from its checkpoint.

Bytes per step and worker, sent and received each, for S bytes of parameters on N workers:   2 (N-1)/N S + S/N
where parameters deal evenly; in general 2N - 1 times the largest share, since shares are padded to it.
Optimizer memory: 2/N of the whole, its own and its ward's.   Gradients: 2 (K + 1) sets.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from smolcluster.comm.elastic.view import View
from smolcluster.comm.group import Group, Work, gather_json
from smolcluster.comm.rounds import Combination, Committed
from smolcluster.compute.optim import named_state, put_named_state
from smolcluster.compute.replica import Replica
from smolcluster.config.options import ElasticFSDPOptions
from smolcluster.errors import SmolclusterError
from smolcluster.parallel.placement import Cost, Node, Placement, Shape, with_coordinator, worker_on_each
from smolcluster.parallel.shards import buddy, largest_share, owners, providers, ward
from smolcluster.strategies.allreduce import AllReduce


class ElasticFSDP(AllReduce[ElasticFSDPOptions]):
    @classmethod
    def plan(cls, options: ElasticFSDPOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if options.fsdp_stage > 1:
            said = f"fsdp_stage {options.fsdp_stage} needs machines that stay; on the elastic plane there are 0 and 1"
            return Placement(refusals=[said])
        if shape is None:
            return with_coordinator(Placement(seats=worker_on_each(nodes)), nodes, shape)
        size, n = shape.parameters * shape.bytes_per_parameter, len(nodes)
        sharded = options.fsdp_stage == 1 and n > 1
        moved = 2 * (n - 1) * size // n
        if sharded:
            tensors = shape.tensors or [(-(-shape.parameters // n),)] * n
            moved = (2 * n - 1) * largest_share(list(map(math.prod, tensors)), n) * shape.bytes_per_parameter
        cost = Cost(
            parameter_bytes=size,
            gradient_bytes=size * (options.staleness_bound + 1),
            optimizer_bytes=size * shape.optimizer_states * (2 if sharded else n) // n,
            bytes_sent=moved,
            bytes_received=moved,
            messages=2 * (n - 1) + 1,
        )
        return with_coordinator(Placement(seats=worker_on_each(nodes), costs=[cost] * n), nodes, shape)

    def combination(self) -> Combination:
        if self.results_are_whole:
            return super().combination()
        assert self.context.line is not None
        instance = self.context.line.transport.me.instance
        return OwnedSum(self.replica, instance=instance, num_slots=self.rounds_in_flight + 1)

    @property
    def results_are_whole(self) -> bool:
        return self.options.fsdp_stage == 0


class OwnedSum(Combination):
    """Sums go to the owners of parameters; each takes the step for its own and its ward's."""

    whole = False

    def __init__(self, replica: Replica, *, instance: str, num_slots: int) -> None:
        self._replica, self._instance = replica, instance
        self._names = {p: n for n, p in replica.model.named_parameters()}
        self._home = torch.device("cpu")
        self._gradients = [
            [torch.zeros_like(p, device=self._home) for p in replica.parameters] for _ in range(num_slots)
        ]
        self._slots: list[_Slot | None] = [None] * num_slots
        self._unfinished = False  # a step was taken, and the others' parameters have not all come

    # Views

    def formed(self, group: Group, view: View, established: Sequence[str | None]) -> None:
        instances = [member.instance for member in view.members]
        self._deal(group)
        if not established:
            return  # the run begins: everybody has the whole state
        try:
            holders = [instances.index(holder) for holder in providers(established)]
        except (LookupError, ValueError) as error:
            raise SmolclusterError(
                f"optimizer state is lost: {error}; continue from the last checkpoint with --resume"
            ) from error
        before = owners(self._sizes, len(established))

        # A step that was committed while somebody died: its parameters, from whoever has them.
        unfinished = torch.tensor([float(self._unfinished)])
        group.all_reduce(unfinished).wait()
        if unfinished.item():
            for place, holder in enumerate(holders):
                self._hand_out([p for p, o in zip(self._replica.parameters, before, strict=True) if o == place], holder)
        self._unfinished = False

        # Optimizer state goes to those who should have it now.
        had = {instance: place for place, instance in enumerate(established) if instance is not None}
        self._move_state(instances, had, before, holders)

    def _deal(self, group: Group) -> None:
        """Lay the gradients out by owner: a row per member, padded to the longest."""
        self._group, n = group, group.size
        # Sums and updated parameters are each exchanged in the order of steps, but not in one order on all members.
        self._gathers = group.sub(range(n))
        self._sizes = [p.numel() for p in self._replica.parameters]
        self._owner = owners(self._sizes, n)
        self._rows = [[j for j, o in enumerate(self._owner) if o == place] for place in range(n)]
        self._width = max(1, max(sum(self._sizes[j] for j in row) for row in self._rows))
        self._slots = [_Slot(n, self._width, self._dtype, self._home) for _ in self._slots]

    def _hand_out(self, parameters: Sequence[nn.Parameter], holder: int) -> None:
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
            """Whether the member now at `place` had the state of parameter j."""
            former = had.get(instances[place])
            return former is not None and before[j] in (former, ward(former, len(holders)))

        outgoing: dict[str, list[list[Any]]] = {}
        parts: dict[int, list[Tensor]] = {}
        for j, parameter in enumerate(self._replica.parameters):
            if holders[before[j]] != me:
                continue
            for place in {self._owner[j], buddy(self._owner[j], n)}:
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
                put_named_state(
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

    def start(self, slot: int, *, weight: float, stop: bool = False) -> None:
        """Gradients are exchanged when backward is over: one reduce-scatter for all."""
        self._weight = weight

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
        for place, row in enumerate(self._rows):
            offset = 0
            for j in row:
                if zero:
                    kept[j].zero_()
                sums.whole[place, offset : offset + self._sizes[j]] = kept[j].reshape(-1)
                offset += self._sizes[j]
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
        """My sums to my buddy."""
        sums, n, me = self._slot(slot), self._group.size, self._group.rank
        sums.wait()
        sums.passed_on = True
        if n > 1:
            send = self._group.send(sums.own, to=buddy(me, n), tag=slot)
            sums.works = [send, self._group.recv(sums.ward, source=ward(me, n), tag=slot)]

    def norms(self, slot: int) -> tuple[float, float]:
        return float(get_total_norm(self._gradients[slot])), float(get_total_norm([self._slot(slot).own]))

    def give(self, result: Committed) -> None:
        sums, n, me = self._slot(result.slot), self._group.size, self._group.rank
        for place, flat in {ward(me, n): sums.ward, me: sums.own}.items():
            offset = 0
            for j in self._rows[place]:
                parameter = self._replica.parameters[j]
                part = flat[offset : offset + self._sizes[j]].view(parameter.shape)
                parameter.grad = part.to(parameter.device) * result.factor
                offset += self._sizes[j]
        self._unfinished = True

    def complete(self) -> None:
        """Every owner hands out its parameters."""
        n, me = self._group.size, self._group.rank
        mine = torch.zeros(self._width, dtype=self._dtype)
        _gather([self._replica.parameters[j].detach() for j in self._rows[me]], mine)
        everyone = torch.empty(n, self._width, dtype=self._dtype)
        assert self._gathers is not None
        self._gathers.all_gather(everyone, mine).wait()
        for place, row in enumerate(self._rows):
            if place != me:
                _spread(everyone[place], [self._replica.parameters[j].detach() for j in row])
        self._unfinished = False
        self._drop_foreign_state()

    def _drop_foreign_state(self) -> None:
        """A step was committed in this view, so whoever should have what I no longer own has it."""
        n, me = self._group.size, self._group.rank
        held = {self._replica.parameters[j] for place in (me, ward(me, n)) for j in self._rows[place]}
        for parameter in [p for p in self._replica.optimizer.state if p not in held]:
            del self._replica.optimizer.state[parameter]

    def owned(self, names: Sequence[str]) -> list[str]:
        own = {self._names[self._replica.parameters[j]] for j in self._rows[self._group.rank]}
        return [name for name in names if name.split("/", 1)[1] in own]

    def _slot(self, slot: int) -> _Slot:
        sums = self._slots[slot]
        assert sums is not None
        return sums


class _Slot:
    """The sums of one step: `whole` goes in, `own` comes out, `ward` comes from the member before."""

    def __init__(self, members: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.whole = torch.zeros(members, width, dtype=dtype, device=device)
        self.own = torch.zeros(width, dtype=dtype, device=device)
        self.ward = torch.zeros(width, dtype=dtype, device=device) if members > 1 else self.own
        self.works: list[Work] = []
        self.passed_on = False

    @property
    def done(self) -> bool:
        return all(work.done for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


def _gather(parts: Sequence[Tensor], flat: Tensor) -> None:
    offset = 0
    for part in parts:
        flat[offset : offset + part.numel()] = part.reshape(-1)
        offset += part.numel()


def _spread(flat: Tensor, parts: Sequence[Tensor]) -> None:
    offset = 0
    for part in parts:
        part.copy_(flat[offset : offset + part.numel()].view(part.shape))
        offset += part.numel()
