"""allreduce (ClassicDP): every worker has the whole model and a share of each batch; gradients are averaged.

With staleness bound K, worker state is (weights at version v, step s), and all workers apply the same averaged gradients
g_0, g_1, g_2, ... in that order:

    for s = 0, 1, 2, ...:
        my gradient <- gradient of the loss on my share of batch s, at weights version v
        start  g_s <- sum over workers of (my samples / all samples) * my gradient        (overlaps with backward)
        while s - v >= K:  wait for g_v;  w <- optimizer(w, clip(g_v));  v <- v + 1

So s - v <= K always, replicas stay bit-identical for any optimizer, and K = 0 is plain synchronous training. On the mesh plane
v = max(0, s - K). On the elastic plane g_v is applied once it is committed; the members agree on its contributors first
(`engine/elastic/member/rounds.py`), and the death of a member costs its share of the steps in flight. A worker whose gradients
arrive too late has them dropped, or stops: `on_stale`. Evaluation uses the weights at version v; a checkpoint of the mesh plane
also has the gradients in flight. They are applied after the last step.

All workers start with the weights of rank 0. Gradients are weighted by samples, so the mean is exact with unequal batch sizes;
or by targets where the task counts them, which takes one number more. A parameter that a worker did not use counts as zero; one
that no worker used is not updated. Buffers (running means) are local; evaluation and export use those of rank 0.

Bytes per step and worker, sent and received each, for S bytes of parameters on N workers:   2 (N-1)/N S
and one number for each tensor of the model: how many workers used it.
Memory: K + 1 sets of gradients; on the elastic plane twice that, since each worker keeps its own until they are committed.

With a `codec` on the elastic plane each tensor has an owner: workers send it their encoded gradients during backward, and it
returns the encoded sum (`comm/encoded_sum.py`). S is then the encoded bytes, and the owner of P of them moves S + (N-2) P: the
same for all where tensors divide evenly. Memory: K + 1 sets of sums, with error feedback K + 2 sets of residuals, and messages.

Ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. Overlap with backward:
Li et al., "PyTorch Distributed", 2020. Bounded delay: Ho et al., "More effective distributed ML via a stale synchronous
parallel parameter server", 2013.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from smolcluster.comm.rounds import Combination, Committed
from smolcluster.compute.replica import Batch
from smolcluster.compute.timing import Span
from smolcluster.config.options import AllReduceOptions
from smolcluster.parallel.encoding import summed_by_workers
from smolcluster.parallel.placement import Node, Placement, Shape
from smolcluster.strategies.base import StepReport
from smolcluster.strategies.base.replicated import Exchanging, train_alone
from smolcluster.tasks.base import Task

AllReduceT = TypeVar("AllReduceT", bound=AllReduceOptions)


class AllReduce(Exchanging[AllReduceT]):
    Config = AllReduceOptions

    @classmethod
    def plan(cls, options: AllReduceT, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        return summed_by_workers(options, nodes, shape, rounds=options.staleness_bound + 1)

    def setup(self, task: Task) -> None:
        super().setup(task)
        self._norm: Tensor | None = None
        if self.context.server_context is None:  # a coordinator trains nothing
            self.rounds = self.open_rounds(self.combination())

    def combination(self) -> Combination:
        return self.sum_of_workers(self.options)

    def step(self, batch: Batch) -> StepReport:
        if self.context.is_alone and self.rounds_in_flight == 0:
            return train_alone(self.replica, batch, stop=self.context.stop_requested())
        replica, self._norm = self.replica, None
        rate, staleness = replica.learning_rate, len(self.rounds.flights)

        # Compute my gradient at the current weights; buckets are sent during backward.
        with self.contribute(batch) as mine:
            mine.loss = loss = replica.compute(batch, before_last=mine.start)

        # Wait for the oldest gradients in flight, while there are more than K of them, and apply them.
        comm = Span(self.context.device)
        self.rounds.settle(in_flight=self.rounds_in_flight)
        comm.end()
        return StepReport(
            loss=loss * mine.loss_factor if mine.loss_factor != 1.0 else loss,
            grad_norm=self._norm,
            learning_rate=rate,
            samples=batch.samples,
            tokens=batch.tokens,
            staleness=staleness,
            comm=comm,
            stop=self.rounds.stop,
        )

    def apply(self, result: Committed) -> None:
        if result.empty:
            self.replica.updates += 1
            return
        self.rounds.combination.give(result)
        self._norm = self.replica.apply(scale=result.scale, norm=result.norm)

    def drain(self) -> None:
        self.rounds.settle(in_flight=0)
        super().drain()

    @property
    def rounds_in_flight(self) -> int:
        return self.options.staleness_bound

    @property
    def round_timeout(self) -> float | None:
        return self.options.step_timeout

    @property
    def stops_when_stale(self) -> bool:
        return self.options.on_stale == "stop"
