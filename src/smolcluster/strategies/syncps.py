"""syncps (SyncPS): a synchronous parameter server.

    server, for t = 1, 2, ...:
        collect the gradients of step t from all workers but known stragglers, for `timeout` seconds after the first
        g_t <- their mean, weighted by samples (or targets, where the task counts them); record it
        send g_t to all
        w <- optimizer(w, clip(g_t))
        every `worker_update_interval` steps send w as well

    worker, for each step t:
        push my gradient on my share of batch t
        w <- optimizer(w, clip(g_t))                          when g_t arrives
        w <- alpha * server's w + (1 - alpha) * w             when the server's weights arrive; alpha is `polyak_alpha`

Only gradients of the current step count. A late one is refused (`stale_rejected`); its worker receives each g_t that it missed
and applies them in order. A worker that reads too slowly to keep up receives the whole state instead.

A late worker is a straggler: it costs the others one `timeout`, not one per step. It gets no lease until its late gradient has
arrived, then joins the next step. Its gradients count if they arrive before the step is complete, but the server waits for it
again only after one came within `timeout` of the first of its step. Late gradients are timed, too: with `batch_size: auto` a
straggler gets fewer samples.

With a lossy codec all apply the decoded g_t, the server included, so that all take the same step.

With interval 1 and alpha 1 this is `single`. A worker's death costs its share of one step; the server's death costs the
unfinished step, since every g_t is recorded before it is sent: encoded as it is sent, or with error feedback as the gradients
it is the mean of.

Bytes per step and worker, for S bytes of encoded gradients and W bytes of weights:   sent S, received S + W / interval
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from smolcluster.comm.codecs import chosen_codec
from smolcluster.comm.rounds import Committed
from smolcluster.compute.replica import Batch
from smolcluster.compute.timing import Span
from smolcluster.config.options import SyncPSOptions
from smolcluster.parallel.encoding import bytes_on_the_wire, server_cost
from smolcluster.parallel.placement import Cost, Node, Placement, Shape, workers_and_server
from smolcluster.strategies.base import StepReport
from smolcluster.strategies.base.replicated import Pushing


class SyncPS(Pushing[SyncPSOptions]):
    _norm: Tensor | None = None
    _pulled = 0  # the step of the last weights received

    @classmethod
    def plan(cls, options: SyncPSOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if shape is None:
            return Placement(seats=workers_and_server(nodes))
        n, size = len(nodes), shape.parameter_bytes
        gradients, weights = bytes_on_the_wire(options, shape)
        worker = Cost(
            parameter_bytes=2 * size,  # the worker's, and the server's
            gradient_bytes=2 * size,  # of the worker, and the average
            optimizer_bytes=shape.optimizer_bytes(size),
            bytes_sent=gradients,
            bytes_received=gradients + weights // options.worker_update_interval,
            messages=3 * max(1, round(size / (options.bucket_mb * 2**20))),
        )
        # The encoded average; with error feedback its parts.
        record = min(n * gradients, 4 * shape.parameters) if chosen_codec(options).feedback else gradients
        server = server_cost(options, shape, workers=n, pushes=n, record_bytes=record)
        return Placement(seats=workers_and_server(nodes), costs=[worker] * n, server=server)

    def step(self, batch: Batch) -> StepReport:
        replica, rate, self._norm = self.replica, self.replica.learning_rate, None

        # Push my gradient.
        with self.contribute(batch) as mine:
            mine.loss = loss = replica.compute(batch)
        replica.drop_gradients()

        # Wait for the average, and for the server's weights when they are due.
        comm = Span(self.context.device)
        due = batch.step if batch.step % self.options.worker_update_interval == 0 else 0
        self.rounds.wait_until(lambda: not self.rounds.flights and self._pulled >= due)
        comm.end()
        return StepReport(
            loss=loss,
            grad_norm=self._norm,
            learning_rate=rate,
            samples=batch.samples,
            tokens=batch.tokens,
            comm=comm,
            stop=self.rounds.stop,
        )

    def apply(self, result: Committed) -> None:
        self.rounds.combination.give(result)
        self._norm = self.replica.apply(scale=1.0)

    def take_weights(self, weights: Mapping[str, Tensor], step: int) -> None:
        alpha, self._pulled = self.options.polyak_alpha, step
        for name, own in self.replica.weights().items():
            if own.is_floating_point():
                server = weights[name].to(own.device, own.dtype)
                own.copy_(server) if alpha == 1.0 else own.mul_(1 - alpha).add_(server, alpha=alpha)

    def rejoined(self) -> None:
        self._pulled = self.replica.updates

    @property
    def collect_timeout(self) -> float:
        return self.options.timeout
