"""allreduce (ClassicDP) where members come and go: all-to-all peers, bounded staleness, the same steps on every replica.

    for each step s that is lent to me:
        my gradient <- gradient of the loss on my samples, at my weights, which have seen steps 1 .. v;   s - 1 - v <= K
        start  g_s <- sum over members of (weight * gradient); weight: samples, or targets    (overlaps with backward)
        as soon as g_v+1 is complete and committed:   w <- optimizer(w, clip(g_v+1 / all weights));   v <- v + 1
        wait only when more than K steps are in flight

So all replicas apply the same g_1, g_2, ... in order and stay bit-identical; K = 0 is plain synchronous training. Which members
count for g_s is agreed before g_s is applied (`coordinated.py`); a member's death costs its share of the steps in flight.
A member keeps its own gradients until they are committed, so that the others' part can be summed again without the lost.

Bytes per step and worker, sent and received each, for S bytes of parameters on N workers:   2 (N-1)/N S
Memory: 2 (K + 1) sets of gradients.

`allreduce.py` is the same algorithm on a fixed world, with the papers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from smolcluster.comm.buckets import GradientBuckets
from smolcluster.comm.elastic.group import ElasticGroup
from smolcluster.comm.elastic.view import View
from smolcluster.comm.memory_group import MemoryGroup
from smolcluster.compute.replica import Batch, Replica
from smolcluster.strategies.coordinated import Coordinated, CoordinatedOptions, Flight, Reduction, server_cost
from smolcluster.strategies.elastic import pack_state
from smolcluster.strategies.placement import Cost, Node, Placement, Shape, workers_and_server
from smolcluster.strategies.replicated import replica_state
from smolcluster.tasks.base import Task


class ElasticAllReduce(Coordinated[CoordinatedOptions]):
    name = "allreduce"
    algorithm = "ClassicDP"
    summary = "whole model on every worker, averaged gradients, optional bounded staleness; members come and go"

    @classmethod
    def plan(cls, options: CoordinatedOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if shape is None:
            return Placement(seats=workers_and_server(nodes))
        size, n = shape.parameters * shape.bytes_per_parameter, len(nodes)
        moved = 2 * (n - 1) * size // n
        cost = Cost(
            parameter_bytes=size,
            gradient_bytes=2 * size * (options.staleness_bound + 1),
            optimizer_bytes=size * shape.optimizer_states,
            bytes_sent=moved,
            bytes_received=moved,
            messages=2 * (n - 1) * max(1, round(size / (options.bucket_mb * 2**20))) + 2,
        )
        return Placement(seats=workers_and_server(nodes), costs=[cost] * n, server=server_cost(shape))

    def setup(self, task: Task) -> None:
        super().setup(task)
        if self.context.line is not None:
            bucket_bytes = int(self.options.bucket_mb * 2**20)
            self.reduction = SummedGradients(self.replica, bucket_bytes=bucket_bytes, num_slots=self.num_slots)


class SummedGradients(Reduction):
    """Every member gets the whole sum and applies it to its whole replica."""

    def __init__(self, replica: Replica, *, bucket_bytes: int, num_slots: int) -> None:
        self._replica = replica
        nobody = MemoryGroup.world(1)[0]  # until there is a view
        self._buckets = GradientBuckets(
            replica.parameters, nobody, bucket_bytes=bucket_bytes, num_slots=num_slots, keep=True
        )

    def formed(self, group: ElasticGroup, view: View, established: Sequence[str | None]) -> None:
        self._buckets.group = group

    def compute(self, batch: Batch, flight: Flight) -> Tensor:
        weight = flight.weight / self._replica.loss_scale
        loss = self._replica.compute(
            batch, before_last=lambda: self._buckets.arm(flight.slot, weight=weight, stop=False)
        )
        self._buckets.disarm()
        return loss

    def restart(self, flight: Flight, *, zero: bool) -> None:
        self._buckets.restart(flight.slot, zero=zero)

    def reduced(self, flight: Flight, *, wait: bool) -> bool:
        if not wait and not self._buckets.done(flight.slot):
            return False
        self._buckets.wait(flight.slot)
        return True

    def norms(self, flight: Flight) -> tuple[float, float]:
        return self._buckets.kept_norm(flight.slot) / (flight.weight or 1.0), self._buckets.sum_norm(flight.slot)

    def apply(self, flight: Flight, *, weight: float, norm: float) -> None:
        self._buckets.give(flight.slot, factor=1 / weight)
        self._replica.apply(scale=1.0, norm=norm)

    def upload(self, *, first: bool) -> dict[str, Tensor]:
        return pack_state(replica_state(self._replica))
