"""allreduce (ClassicDP): every worker has the whole model and a share of each batch; gradients are averaged.

With staleness bound K, worker state is (weights at version v, step s), and all workers apply the same averaged gradients
g_0, g_1, g_2, ... in that order:

    for s = 0, 1, 2, ...:
        v <- max(0, s - K) after a start, or later if fewer gradients are in flight
        my gradient <- gradient of the loss on my share of batch s, at weights version v
        start  g_s <- sum over workers of (my samples / all samples) * my gradient        (overlaps with backward)
        if s - v = K:  wait for g_v;  w <- optimizer(w, clip(g_v));  v <- v + 1

So s - v <= K always, replicas stay bit-identical for any optimizer, and K = 0 is plain synchronous training. `drain` applies
what is in flight, before evaluation and checkpoints; the delay then builds up again from 0. Since v follows from s alone, a
gradient beyond the bound cannot arise here; `on_stale` matters only where workers may be late or lost.

Weights start as rank 0's. Gradients are weighted by samples, so unlike batch sizes stay exact; or by the targets that count,
where the task says so, which are added up beside forward: one number more. What a worker did not use
counts as zero there; a parameter that none of them used is left alone. Buffers (running means) are rank 0's whenever the model
is evaluated or saved.

Bytes per step and worker, sent and received each, for S bytes of parameters on N workers:   2 (N-1)/N S
and one number for each tensor of the model, which says how many workers used it.
Memory: K + 1 sets of gradients.

The ring that makes this bandwidth-optimal: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009. Overlap with backward: Li et al., "PyTorch Distributed", 2020. Bounded delay: Ho et al., "More effective
distributed ML via a stale synchronous parallel parameter server", 2013.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor

from smolcluster.comm.buckets import GradientBuckets
from smolcluster.comm.group import gather_json, share_of
from smolcluster.compute.replica import Batch
from smolcluster.compute.timing import DelayedFlag, Span
from smolcluster.errors import UserError
from smolcluster.strategies.base import Options, State, StepReport
from smolcluster.strategies.placement import Cost, Node, Placement, Shape, worker_on_each
from smolcluster.strategies.replicated import Replicated, train_alone
from smolcluster.tasks.base import Task


class AllReduceOptions(Options):
    staleness_bound: int = Field(0, ge=0, description="averaged gradients in flight; 0 is synchronous")
    on_stale: Literal["drop", "stop"] = Field(
        "stop", description="for a gradient beyond the bound (never happens on a fixed world)"
    )
    bucket_mb: float = Field(25.0, gt=0, description="gradients travel in buckets of this size")


class AllReduce(Replicated[AllReduceOptions]):
    name = "allreduce"
    algorithm = "ClassicDP"
    summary = "whole model on every worker, averaged gradients, optional bounded staleness"

    @classmethod
    def plan(cls, options: AllReduceOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if shape is None:
            return Placement(seats=worker_on_each(nodes))
        size, n = shape.parameters * shape.bytes_per_parameter, len(nodes)
        moved = 2 * (n - 1) * size // n
        cost = Cost(
            parameter_bytes=size,
            gradient_bytes=size * (options.staleness_bound + 1),
            optimizer_bytes=size * shape.optimizer_states,
            bytes_sent=moved,
            bytes_received=moved,
            messages=2 * (n - 1) * max(1, round(size / (options.bucket_mb * 2**20))),
        )
        return Placement(seats=worker_on_each(nodes), costs=[cost] * n)

    def setup(self, task: Task) -> None:
        super().setup(task)
        self._group = self.context.group
        self._check_same_model()
        self._broadcast(self.replica.weights())
        counts = self.context.samples_per_step
        self._weight = counts[self._group.rank] / sum(counts)
        self._num_slots = self.options.staleness_bound + 1
        self._sent = 0  # gradients given to the group; those applied are replica.updates
        self._buckets = GradientBuckets(
            self.replica.parameters,
            self._group,
            bucket_bytes=int(self.options.bucket_mb * 2**20),
            num_slots=self._num_slots,
        )
        self._stop = DelayedFlag(self.context.device)

    def step(self, batch: Batch) -> StepReport:
        if self._group.size == 1 and self._num_slots == 1:
            return train_alone(self.replica, batch, stop=self.context.stop_requested())
        replica, slot = self.replica, self._sent % self._num_slots
        rate, staleness = replica.learning_rate, self._sent - replica.updates

        # My gradient, at the weights I have; buckets leave while backward runs.
        share = self._share_of(batch)
        loss = replica.compute(
            batch,
            before_last=lambda: self._buckets.arm(
                slot, weight=share(), stop=self.context.stop_requested(), scale=replica.loss_scale
            ),
        )
        self._buckets.disarm()
        if batch.counts is not None:
            loss = loss * (
                share() / self._weight
            )  # so that the mean over ranks, by samples, is that of the global batch
        self._sent += 1

        # The oldest gradient in flight, once there are more than K of them.
        norm, comm, stop = None, None, False
        if self._sent - replica.updates > self.options.staleness_bound:
            norm, comm, stop = self._apply_oldest()
        return StepReport(
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            samples=batch.samples,
            tokens=batch.tokens,
            staleness=staleness,
            comm=comm,
            stop=stop,
        )

    def _share_of(self, batch: Batch) -> Callable[[], float]:
        """My part of the mean over the step; where targets are counted it is known only when they are added up."""
        return (lambda: self._weight) if batch.counts is None else share_of(self._group, batch.weight)

    def _apply_oldest(self) -> tuple[Tensor, Span, bool]:
        slot = self.replica.updates % self._num_slots
        comm = Span(self.context.device)
        self._buckets.wait(slot)
        comm.end()
        stop = self._stop.read(self._buckets.stop_count(slot))
        self._buckets.give(slot)
        norm = self.replica.apply(scale=self._buckets.scale_of(slot))
        return norm, comm, stop

    def drain(self) -> None:
        while self.replica.updates < self._sent:
            self._apply_oldest()
        super().drain()
        self._broadcast(dict(self.replica.model.named_buffers()))

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._sent = self.replica.updates

    def _broadcast(self, tensors: dict[str, Tensor]) -> None:
        """Rank 0's values for everybody."""
        for tensor in tensors.values():
            if tensor.numel():
                exchanged = tensor.to(self._group.buffer_device(tensor.device))
                self._group.broadcast(exchanged, source=0).wait()
                if exchanged is not tensor:
                    tensor.copy_(exchanged)

    def _check_same_model(self) -> None:
        """A rank with another model would end the run in the backend, without a word."""
        layout = [(n, str(t.dtype), list(t.shape)) for n, t in self.replica.weights().items()]
        print_ = hashlib.sha256(repr(layout).encode()).hexdigest()[:16]
        everyone = gather_json(self._group, print_)
        others = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
        if others:
            raise UserError(
                f"ranks {others} built another model than rank 0; start all ranks with the same configuration"
            )
