"""single: one process, one device. The reference for every other strategy.

    for each step:
        g <- gradient of the loss on the batch
        w <- optimizer(w, clip(g))

Bytes per step: none.
"""

from __future__ import annotations

from collections.abc import Sequence

from smolcluster.compute.replica import Batch
from smolcluster.config.options import Options
from smolcluster.parallel.placement import Cost, Node, Placement, Shape, worker_on_each
from smolcluster.strategies.base import StepReport
from smolcluster.strategies.base.replicated import Replicated, train_alone


class Single(Replicated[Options]):
    @classmethod
    def plan(cls, options: Options, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if len(nodes) != 1:
            refusal = f"strategy single has one worker, not {len(nodes)}; use --workers 1 or --strategy allreduce"
            return Placement(refusals=[refusal])
        if shape is None:
            return Placement(seats=worker_on_each(nodes))
        size = shape.parameter_bytes
        cost = Cost(parameter_bytes=size, gradient_bytes=size, optimizer_bytes=shape.optimizer_bytes(size))
        return Placement(seats=worker_on_each(nodes), costs=[cost])

    def step(self, batch: Batch) -> StepReport:
        return train_alone(self.replica, batch, stop=self.context.stop_requested())
