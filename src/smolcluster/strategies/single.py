"""single: one process, one device. Every other strategy is held against this one.

    for each step:
        g <- gradient of the loss on the batch
        w <- optimizer(w, clip(g))

Bytes per step: none.
"""

from __future__ import annotations

from collections.abc import Sequence

from smolcluster.compute.replica import Batch
from smolcluster.errors import UserError
from smolcluster.strategies.base import Cost, Node, Options, Seat, Shape, StepReport
from smolcluster.strategies.replicated import Replicated, train_alone


class Single(Replicated):
    name = "single"
    algorithm = "Single"
    summary = "one process on one device; the reference for all others"

    @classmethod
    def seats(cls, options: Options, nodes: Sequence[Node]) -> list[Seat]:
        if len(nodes) != 1:
            raise UserError(
                f"strategy single has one worker, not {len(nodes)}; use --workers 1 or --strategy allreduce"
            )
        return super().seats(options, nodes)

    @classmethod
    def cost(cls, options: Options, shape: Shape, nodes: Sequence[Node]) -> Cost:
        size = shape.parameters * shape.bytes_per_parameter
        return Cost(
            parameter_bytes=size,
            gradient_bytes=size,
            optimizer_bytes=size * shape.optimizer_states,
            bytes_sent=0,
            bytes_received=0,
            messages=0,
        )

    def step(self, batch: Batch) -> StepReport:
        return train_alone(self.replica, batch, stop=self.context.stop_requested())
