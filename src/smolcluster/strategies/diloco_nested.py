"""diloco with `inner: fsdp`: a site of several ranks trains one replica, sharded; sites exchange as the workers of diloco do.

    a site, for H = `inner_steps` steps:    w <- inner optimizer(w, clip(the gradient of the site at w))      fsdp, stage 3
    rank i of each site, with rank i of the other sites, for the shards that it has:
        delta <- theta - w                   mean <- the mean of delta over sites, weighted by their samples
        theta <- outer optimizer(theta, mean)                             w <- theta

A site is the ranks of one machine, or `inner_size` consecutive ranks. Sampling is that of all ranks in their order, so that the
batch of a site is that of its ranks together. The outer method is that of `diloco.py`: outer optimizer, codecs, error feedback.
Blocks of a codec are those of a rank's shards. Means over a mesh of (sites, shards) ranks:

    sites    exchange across, once a round:      2 (K-1)/K S/n / H bytes per step and rank of K sites of n ranks, for dense S
    shards   exchange inside, in every step:     as fsdp stage 3 on n ranks

Memory of a rank: that of fsdp, and for its shards theta, the outer momentum and what is exchanged: 12 P/n, 4 P/n more for m.

A checkpoint has the whole theta, and the shards of every rank: of the inner moments, the outer momentum and error feedback, in
the middle of a round also of w. The same sites resume bitwise; others start from theta, and the moments of the first site.

A round exchanges the whole model and is waited for: no fragments, no overlap. Mesh plane only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smolcluster.comm.codecs.feedback import under
from smolcluster.comm.group import Group, gather_json
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.comm.rounds import Committed, MeshRounds
from smolcluster.comm.sharded import local
from smolcluster.compute.replica import Batch
from smolcluster.compute.timing import DelayedFlag, Span
from smolcluster.config.options import DiLoCoOptions, FSDPOptions
from smolcluster.errors import UserError
from smolcluster.parallel.axes import Axes, divisors, group_of, machines, ranks_per_machine
from smolcluster.parallel.placement import Cost, Node, Placement, Shape
from smolcluster.parallel.zero import shard_shape
from smolcluster.strategies.base import Context, Scope, Share, State, StepReport, Strategy
from smolcluster.strategies.base.local_round import MOMENTS, OUTER, ROUND, WEIGHTS, LocalRound
from smolcluster.strategies.base.replicated import CODEC
from smolcluster.strategies.diloco import DiLoCo
from smolcluster.strategies.fsdp_sharded import ShardedFSDP
from smolcluster.tasks.base import Task

INSIDE = FSDPOptions.model_validate({"fsdp_stage": 3})
OF_A_RANK = (WEIGHTS, MOMENTS, ROUND, OUTER, CODEC)  # prefixes in `State.own`


class SiteFSDP(ShardedFSDP[FSDPOptions]):
    """fsdp, stage 3, on the ranks of one site."""

    def __init__(self, context: Context, mesh: DeviceMesh | None) -> None:
        super().__init__(INSIDE, context)
        self._of_site = mesh

    def _make_mesh(self) -> DeviceMesh | None:
        return self._of_site

    def _group_along(self, *axes: str) -> Group:
        return self.context.group if "dp" in axes else MemoryGroup.world(1)[0]

    @contextmanager
    def sharded(self) -> Iterator[None]:
        """Change the shards inside: what was gathered before is not used after."""
        with self._exchange.in_full():
            yield


class NestedDiLoCo(Strategy[DiLoCoOptions]):
    @classmethod
    def plan(cls, options: DiLoCoOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        try:
            size = site_size(options, machines(nodes))
        except UserError as error:
            return Placement(refusals=[str(error)])
        seats = Axes(shards=len(nodes)).seats(nodes, same_stream=False)
        if shape is None:
            return Placement(seats=seats)
        inner = ShardedFSDP.plan(INSIDE, nodes[:size], shape)
        if inner.refusals:
            return inner
        costs = [cls._cost(options, inner.costs[i % size], nodes[::size], shape, i, size) for i in range(len(nodes))]
        return Placement(seats=seats, costs=costs)

    @classmethod
    def _cost(
        cls, options: DiLoCoOptions, inner: Cost, sites: Sequence[Node], shape: Shape, rank: int, size: int
    ) -> Cost:
        """Return the cost of a rank: of fsdp in its site, and of its shards in the exchange of a round."""
        shards = [shard for whole in shape.tensors if math.prod(shard := shard_shape(whole, rank % size, size))]
        count = sum(map(math.prod, shards)) if shape.tensors else -(-shape.parameters // size)
        part = replace(shape, parameters=count, tensors=shards, model=None)
        outer = DiLoCo.exchanged(options, sites, part).costs[rank // size]
        nbytes, h = count * shape.bytes_per_parameter, options.steps_per_round
        return replace(
            inner,
            parameter_bytes=inner.parameter_bytes + nbytes,
            optimizer_bytes=inner.optimizer_bytes + nbytes * DiLoCo.outer_states(options),
            gradient_bytes=inner.gradient_bytes + outer.gradient_bytes,
            bytes_sent=inner.bytes_sent + outer.bytes_sent // h,
            bytes_received=inner.bytes_received + outer.bytes_received // h,
            messages=inner.messages + -(-outer.messages // h),
            bytes_at_once=outer.bytes_sent,
        )

    def setup(self, task: Task) -> None:
        context, rank = self.context, self.context.group.rank
        self._size = size = site_size(self.options, machines(context.seats))
        if len(set(seen := gather_json(context.group, size))) > 1:
            raise UserError(
                f"ranks see sites of {seen} ranks; start the same number on each machine, or set inner_size"
            )
        world = context.group.size
        if size == world and rank == 0:
            context.warn(
                f"all {world} workers are one site: nothing is exchanged between sites; set strategy.inner_size for more sites"
            )
        site = group_of(context.group, [range(at, at + size) for at in range(0, world, size)])
        across = group_of(context.group, [range(at, world, size) for at in range(size)])
        assert site is not None
        assert across is not None
        self._site = site
        counts = [context.samples_per_step[at : at + size] for at in range(0, world, size)]
        first = rank - rank % size
        nodes = [Node(name=seat.node, machine=seat.machine) for seat in context.seats[first : first + size]]
        seats = Axes(shards=size).seats(nodes, same_stream=False)
        inside = replace(
            context,
            group=self._site,
            seat=seats[rank % size],
            seats=seats,
            samples_per_step=counts[rank // size],
            stop_requested=lambda: False,  # all sites stop after the same round
        )
        self.inner = SiteFSDP(inside, self._make_mesh(world // size))
        self.inner.setup(task)
        self.replica = self.inner.replica
        self._open_rounds(replace(context, group=across, samples_per_step=[sum(of_site) for of_site in counts]))

    def _make_mesh(self, sites: int) -> DeviceMesh | None:
        if self._size == 1:
            return None
        with unset_fake_temporarily():
            mesh = init_device_mesh(self.context.device.type, (sites, self._size), mesh_dim_names=("sites", "shards"))
            return mesh["shards"]

    def _open_rounds(self, across: Context) -> None:
        """Exchange the shards of this rank with those that have the same ones. `across`: the group of these."""
        trained = {name: p for name, p in self.replica.model.named_parameters() if p.requires_grad}
        self._trained = {name: p for name, p in trained.items() if local(p.detach()).numel()}
        # theta: what the outer optimizer moves
        self._anchor = {name: nn.Parameter(local(p.detach()).clone()) for name, p in self._trained.items()}
        outer, self._stop, self._mine = DiLoCo(self.options, across), False, LocalRound(self.replica.updates)
        self.outer = outer.outer_optimizer(list(self._anchor.values()))
        self.rounds = MeshRounds(
            outer.combination(self._anchor),
            self._apply,
            group=across.group,
            samples=across.samples_per_step,
            local_steps=self.options.steps_per_round,
            stop_requested=lambda: self._stop,
            stop_flag=DelayedFlag(across.device).read,
        )

    # A step

    def step(self, batch: Batch) -> StepReport:
        report, mine = self.inner.step(batch), self._mine
        mine.samples, mine.weight = mine.samples + batch.samples, mine.weight + batch.weight
        report.stop = False
        if self.rounds.ends(batch.step):
            comm = Span(self.context.device)
            self._exchange(batch.step, counted=batch.counts is not None)
            comm.end()
            report.comm, report.stop = report.comm or comm, self.rounds.stop
        return report

    @torch.no_grad()
    def _exchange(self, step: int, *, counted: bool = False) -> None:
        """End a round: all ranks of a site contribute with its weight, each its shards."""
        sums = torch.tensor(
            [float(self.context.stop_requested()), self._mine.samples, self._mine.weight],
            dtype=torch.float64,
            device=self._site.device,
        )
        self._site.all_reduce(sums).wait()
        stop, samples, weight = sums.tolist()
        self._stop = stop > 0
        with self.inner.sharded():
            for name, anchor in self._anchor.items():
                anchor.grad = anchor - self._local(name)
            with self.rounds.contribute(step, samples=int(samples), weight=weight, counted=counted, scale=1.0) as mine:
                mine.start()
            self.rounds.settle(in_flight=0)

    @torch.no_grad()
    def _apply(self, result: Committed) -> None:
        self.rounds.combination.give(result)
        self.outer.step()
        for name, anchor in self._anchor.items():
            anchor.grad = None
            self._local(name).copy_(anchor)
        self._mine = LocalRound(self.replica.updates)

    def _local(self, name: str) -> Tensor:
        return local(self._trained[name].detach())

    @property
    def _in_round(self) -> bool:
        return self.replica.updates > self._mine.first

    def drain(self) -> None:
        if self._in_round:
            self._exchange(self.replica.updates)
        self.inner.drain()

    # Evaluation

    def measure(self, task: Task, part: Any) -> dict[str, Tensor]:
        with self._at_anchor():
            return self.inner.measure(task, part)

    @property
    def share(self) -> Share:
        group = self.context.group
        return Share(index=group.rank, count=group.size, lockstep=True, replicas=self._site)

    @contextmanager
    def _at_anchor(self) -> Iterator[None]:
        """Have theta in the place of this rank's weights."""
        if not self._in_round:
            yield
            return
        kept = {name: self._local(name).clone() for name in self._trained}
        self._put(self._anchor)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, shards: dict[str, Any]) -> None:
        with self.inner.sharded():
            for name, shard in shards.items():
                self._local(name).copy_(shard)

    # Saving

    def state(self, of: Scope = "run") -> State:
        with self._at_anchor():
            state = self.inner.state("weights" if of == "weights" else "run")
            if self._size == 1:  # not copied, and about to change
                state.weights = {name: tensor.clone() for name, tensor in state.weights.items()}
        if of == "weights":
            return state
        own = {f"{MOMENTS}{name}": local(tensor) for name, tensor in self.replica.state_dict()[0].items()}
        own |= {f"{CODEC}{name}": tensor for name, tensor in self.rounds.own_state().items()}
        for name, anchor in self._anchor.items():
            own |= {f"{OUTER}{kind}/{name}": tensor for kind, tensor in self.outer.state[anchor].items()}
        if self._in_round:
            own |= {f"{WEIGHTS}{name}": self._local(name) for name in self._trained} | self._mine.state()
        state.own = {**state.own, **own}
        state.numbers["site_size"] = self._size
        return state

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        buffers = {name: tensor for name, tensor in state.own.items() if not name.startswith(OF_A_RANK)}
        self.inner.load_state(replace(state, own=buffers))
        for name, anchor in self._anchor.items():
            anchor.copy_(self._local(name))
        own = state.own if state.numbers.get("site_size") == self._size else {}
        kept = self.replica.state_dict()[0]
        for name, tensor in under(MOMENTS, own).items():
            if name in kept:
                local(kept[name]).copy_(tensor)
        for name, tensor in under(OUTER, own).items():
            kind, _, of = name.partition("/")
            self.outer.state[self._anchor[of]][kind] = tensor.to(self._anchor[of].device, copy=True)
        if feedback := under(CODEC, own):
            self.rounds.load_own(feedback)
        middle = LocalRound.saved_in(own)
        self._mine = middle or LocalRound(self.replica.updates)
        if middle is not None:
            self._put(under(WEIGHTS, own))


def site_size(options: DiLoCoOptions, hosts: Sequence[str]) -> int:
    """Return the ranks of a site: `inner_size`, or those of each machine. Raises UserError if there is no such number."""
    n, use = len(hosts), "strategy.inner fsdp makes a site of each machine"
    size = options.inner_size or ranks_per_machine([range(n)], hosts, use=use, option="strategy.inner_size")
    if n % size:
        raise UserError(f"strategy.inner_size = {size} does not divide {n} workers; try {divisors(n)}")
    return size
