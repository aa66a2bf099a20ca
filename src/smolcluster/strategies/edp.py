"""edp (EDP): an asynchronous parameter server. Workers never wait for each other.

    server:
        for each push (gradient g computed at version v, on n samples) from any worker:
            staleness <- version - v
            weight <- n / (1 + staleness)                         or n: `staleness_weighting`
            keep g;  lease the next samples to its worker
        when a global batch of samples has arrived:
            w <- optimizer(w, clip(weighted mean of what has arrived));  version <- version + 1

    worker, for each of its own steps:
        g <- gradient on my samples, at my weights
        push g, without waiting
        w <- optimizer(w, clip(g))                                the local copy
        every `worker_update_interval` steps: ask for the server's weights, and use them when they arrive

A pull overlaps with computing; its weights are copied in at a step boundary, before the next pull at the latest. With interval
1 that is at once, so one worker with interval 1 is `single`.

A global batch is as many samples as all live workers read in one step. So an update of the server takes as much data as a step
of a synchronous strategy, but a fast worker may deliver more of it. `server_batch: 1` updates at every push.

Staleness weights are relative: gradients of equal age count in full. Those older than `staleness_bound` are refused.

A worker's death costs its unfinished step. Samples whose gradient was lost or refused are leased again. A run over epochs ends
when as many samples have counted: those on lease at that moment (two leases a worker) have not, and samples of the next epoch
have counted in their place.

Bytes per step and worker, for S bytes of encoded gradients and W bytes of weights:   sent S, received W / interval

Dean et al., "Large scale distributed deep networks", 2012. Staleness weights: Zhang et al., "Staleness-aware Async-SGD",
2016. Buffered updates: Nguyen et al., "Federated learning with buffered asynchronous aggregation", 2022.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from smolcluster.comm.rounds import Committed
from smolcluster.compute.replica import Batch
from smolcluster.compute.timing import Span
from smolcluster.config.options import EDPOptions
from smolcluster.parallel.encoding import bytes_on_the_wire, server_cost
from smolcluster.parallel.placement import Cost, Node, Placement, Shape, workers_and_server
from smolcluster.strategies.base import StepReport
from smolcluster.strategies.base.replicated import Pushing

UNANSWERED = 2  # pushes that a worker may have in flight, so that a slow server is not flooded


class EDP(Pushing[EDPOptions]):
    combined = "server, as they arrive"
    _since_pull = 0  # steps
    _pulling = False
    _staleness = 0  # of the last acknowledged gradient

    @classmethod
    def plan(cls, options: EDPOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if shape is None:
            return Placement(seats=workers_and_server(nodes))
        n, size = len(nodes), shape.parameters * shape.bytes_per_parameter
        gradients, weights = bytes_on_the_wire(options, shape)
        worker = Cost(
            parameter_bytes=2 * size,  # its own, and a pull in flight
            gradient_bytes=size,
            optimizer_bytes=shape.optimizer_bytes(size),
            bytes_sent=gradients,
            bytes_received=weights // options.worker_update_interval,
            messages=2 * max(1, round(size / (options.bucket_mb * 2**20))),
        )
        smallest = max(1, min(node.batch_size for node in nodes))
        pushes = n if options.server_batch is None else -(-options.server_batch // smallest)  # in an update
        wanted = options.server_batch or sum(node.batch_size for node in nodes)
        server = server_cost(
            options,
            shape,
            workers=n,
            pushes=n + -(-wanted // smallest) - 1,  # all workers push when one push is missing for an update
            record_bytes=min(pushes * gradients, 4 * shape.parameters),  # as received, or their average
        )
        return Placement(seats=workers_and_server(nodes), costs=[worker] * n, server=server)

    def step(self, batch: Batch) -> StepReport:
        replica, rate, interval = self.replica, self.replica.learning_rate, self.options.worker_update_interval

        # Push my gradient without waiting.
        with self.contribute(batch) as mine:
            mine.loss = loss = replica.compute(batch)

        # Update the local copy, unless the server's weights replace it at once.
        norm = self._local_step() if interval > 1 else None
        replica.drop_gradients()
        self._since_pull += 1
        if self._since_pull >= interval:
            self.rounds.pull()
            self._since_pull, self._pulling = 0, True

        comm = Span(self.context.device)
        self.rounds.wait_until(self._may_continue)
        comm.end()
        return StepReport(
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            samples=batch.samples,
            tokens=batch.tokens,
            staleness=self._staleness,
            comm=comm,
            stop=self.rounds.stop,
        )

    def _may_continue(self) -> bool:
        weights_are_due = self._pulling and self._since_pull + 1 >= self.options.worker_update_interval
        return len(self.rounds.flights) <= UNANSWERED and not weights_are_due

    def _local_step(self) -> Tensor:
        """Update the local copy, unless the gradient is not finite. Return its norm."""
        norm = get_total_norm([p.grad for p in self.replica.parameters if p.grad is not None])
        return self.replica.apply() if bool(torch.isfinite(norm)) else norm

    def apply(self, result: Committed) -> None:
        """Handle the acknowledgement of a push: the server has counted the gradient, or refused it."""
        self._staleness = result.age
        if result.empty and not self._pulling:
            self._since_pull = self.options.worker_update_interval  # the local copy is too old or not finite: pull

    def take_weights(self, weights: Mapping[str, Tensor], step: int) -> None:
        for name, own in self.replica.weights().items():
            if own.is_floating_point():
                own.copy_(weights[name])
        self.replica.updates, self._pulling = step, False

    def rejoined(self) -> None:
        self._since_pull, self._pulling = 0, False

    @property
    def server_batch(self) -> int | None:
        return self.options.server_batch

    def weight_of(self, age: int) -> float | None:
        bound = self.options.staleness_bound
        if bound is not None and age > bound:
            return None
        return 1 / (1 + age) if self.options.staleness_weighting == "inverse" else 1.0
