"""edp (EDP): an asynchronous parameter server. Workers push gradients, and never wait long for the server or for each other.

    server:
        for each push (gradient g of n samples, computed at version v) of any worker:
            staleness <- version - v;   refuse g if that exceeds `staleness_bound`
            weight <- n / (1 + staleness)                         `staleness_weighting: none`: n
            buffer g;   lease the next samples to its worker
        when a global batch of samples is buffered:
            w <- optimizer(w, clip(weighted mean of the buffer));   version <- version + 1
            send the change of w in int4 to every worker          if `worker_update_interval` > 1

    worker, for each of its own steps:
        w <- the predicted weights of the server at the update that will contain this gradient
        g <- gradient on my samples, at w
        push g;   wait for the update that contains g, at most `max_wait` times as long as my step took
        for each change c that has arrived:   the server's weights, as I know them, += c
        every `worker_update_interval` steps:   pull the server's weights, without waiting for them

A global batch is what all live workers together read in one step, so an update uses as many samples as a step of a synchronous
strategy, but a fast worker may contribute more of them. `server_batch` sets another number; 1: update at every push. An update
is also due when every worker has pushed. Weights are normalized: gradients of equal staleness count in full.

A pull overlaps with computing. Its weights are used at a step boundary, before the next pull at the latest. With interval 1
that is at once, so one worker with interval 1 equals `single`.

Staleness is expensive: with momentum 0.9 and gradients one version old, SGD is stable up to a curvature 38 times smaller than
without delay. Three methods reduce it, the last two with an interval above 1:

- Equal time (`balance`): the server leases samples in proportion to measured speed, a global batch in total, so that all
  workers push at about the same time. A share above the batch size is computed in micro-batches.
- A bounded wait (`max_wait`): if the update that contains my gradient arrives soon, my next gradient is not stale at all.
  Waits are limited by a token bucket, in units of my own step: its capacity is four full waits, each step adds 0.1, a wait
  that timed out costs its duration, and one that succeeded what exceeds one step. Without tokens for a full wait the worker
  does not wait.
- Weight prediction (AdamW): gradients are computed where the server will be, from its momentum and from my own pushes in flight
  (`base/weight_prediction.py`).

Changes have error feedback: what int4 leaves out is added to the next one. A worker that does not read them in time is skipped,
and pulls.

A worker's death costs its unfinished step. Samples whose gradient was lost or refused are leased again. A run over epochs ends
when the number of counted samples is that of its epochs. Samples that are leased at that moment (two leases a worker) are not
among them; samples of the next epoch are, in their place.

Bytes per step and worker, for S bytes of encoded gradients and W bytes of weights:
    sent S, received W / interval, and with an interval above 1 W / 8 more for changes

Dean et al., "Large scale distributed deep networks", 2012. Staleness weights: Zhang et al., "Staleness-aware Async-SGD",
2016. Buffered updates: Nguyen et al., "Federated learning with buffered asynchronous aggregation", 2022. Changes with error
feedback: Tang et al., "DoubleSqueeze", 2019.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from smolcluster.comm.codecs.levels import Int4
from smolcluster.comm.rounds import Committed
from smolcluster.compute.replica import Batch
from smolcluster.compute.timing import Span
from smolcluster.config.options import EDPOptions
from smolcluster.parallel.encoding import bytes_on_the_wire, server_cost
from smolcluster.parallel.placement import Cost, Node, Placement, Shape, workers_and_server
from smolcluster.strategies.base import StepReport
from smolcluster.strategies.base.replicated import Announced, Pushing
from smolcluster.strategies.base.weight_prediction import MAX_AHEAD, WeightPrediction

MAX_IN_FLIGHT = 2  # pushes of a worker, before it waits: a slow server is not flooded
# The budget for waiting, in own steps
BUDGET_PER_STEP = 0.1
FREE_WAIT = 1.0  # of a wait that succeeded, this much costs nothing
MAX_TIMEOUTS = 4  # full waits in a full budget


class EDP(Pushing[EDPOptions]):
    combined = "server, as they arrive"
    _since_pull = 0  # steps
    _pulling = False
    _budget = math.inf  # for waiting, in own steps; cut to `MAX_TIMEOUTS` waits by the first step
    _staleness = 0  # of the last acknowledged gradient
    _prediction: WeightPrediction | None = None  # on a worker that has joined, if the server announces changes

    @property
    def announces(self) -> bool:
        return self.options.worker_update_interval > 1

    @classmethod
    def plan(cls, options: EDPOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if shape is None:
            return Placement(seats=workers_and_server(nodes))
        n, size = len(nodes), shape.parameter_bytes
        gradients, weights = bytes_on_the_wire(options, shape)
        interval = options.worker_update_interval
        follows = interval > 1
        ahead = MAX_AHEAD + 1 if follows and shape.optimizer_states == 2 else 0  # AdamW
        change = sum(map(Int4().nbytes, shape.tensors or [(shape.parameters,)])) if follows else 0
        messages = max(1, round(size / (options.bucket_mb * 2**20)))
        worker = Cost(
            # Its own, a pull in flight, the server's, its last change and steps ahead.
            parameter_bytes=(2 + follows + ahead) * size,
            gradient_bytes=size,
            optimizer_bytes=shape.optimizer_bytes(size),
            bytes_sent=gradients,
            bytes_received=weights // interval + change,
            messages=(2 + follows) * messages,
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
        if follows:  # the change of a step, and what its encoding has left out so far
            server = replace(
                server, gradient_bytes=server.gradient_bytes + 3 * size, bytes_sent=n * worker.bytes_received
            )
        return Placement(seats=workers_and_server(nodes), costs=[worker] * n, server=server)

    def step(self, batch: Batch) -> StepReport:
        replica, rate, prediction = self.replica, self.replica.learning_rate, self._prediction

        # Compute my gradient at the weights that the server will have, and push it.
        if prediction is not None:
            prediction.set_weights()
        started = time.perf_counter()
        with self.contribute(batch) as mine:
            mine.loss = loss = replica.compute(batch)
        own_s = time.perf_counter() - started
        norm = None if prediction is None else prediction.add(batch.step)
        replica.drop_gradients()

        # Wait for the update that contains it, within the budget; pull when it is due.
        comm = Span(self.context.device)
        self._wait_for_update(batch.step, own_s)
        self._since_pull += 1
        if self._since_pull >= self.options.worker_update_interval:
            self.rounds.pull()
            self._since_pull, self._pulling = 0, True
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

    def _wait_for_update(self, push: int, own_s: float) -> None:
        """Wait until the server has counted my push, which took `own_s` seconds to compute, if the budget allows it."""
        max_wait = self.options.max_wait
        self._budget = min(MAX_TIMEOUTS * max_wait, self._budget + BUDGET_PER_STEP)
        if not self._in_flight(push) or self._budget < max_wait or max_wait == 0:
            return
        started = time.monotonic()
        counted = self.rounds.wait_until(lambda: not self._in_flight(push), timeout_s=max_wait * own_s)
        waited = (time.monotonic() - started) / own_s
        self._budget -= max(0.0, waited - FREE_WAIT) if counted else waited

    def _in_flight(self, push: int) -> bool:
        return self._prediction is not None and push in self._prediction.in_flight

    def _may_continue(self) -> bool:
        weights_are_due = self._pulling and self._since_pull + 1 >= self.options.worker_update_interval
        return len(self.rounds.flights) <= MAX_IN_FLIGHT and not weights_are_due

    def apply(self, result: Committed) -> None:
        """Handle the acknowledgement of a push: the server has accepted the gradient, or refused it."""
        self._staleness = result.age
        if result.empty:  # my weights are too old, or the gradient is invalid
            if self._prediction is not None:
                self._prediction.drop(result.step)
            self._pull_next()

    def _pull_next(self) -> None:
        if not self._pulling:
            self._since_pull = self.options.worker_update_interval

    def take_change(self, announced: Announced, step: int) -> None:
        assert self._prediction is not None
        if self._prediction.follow(announced):
            self.replica.updates = step
        else:
            self._pull_next()

    def take_weights(self, weights: Mapping[str, Tensor], step: int) -> None:
        server = {} if self._prediction is None else self._prediction.server
        for name, own in self.replica.weights().items():
            if own.is_floating_point():
                server.get(name, own).copy_(weights[name])
        self.replica.updates, self._pulling = step, False

    def rejoined(self) -> None:
        self._since_pull, self._pulling, self._budget = 0, False, math.inf
        self._prediction = WeightPrediction(self.replica, self.trained) if self.announces else None

    @property
    def server_batch(self) -> int | None:
        return self.options.server_batch

    def weight_of(self, age: int) -> float | None:
        bound = self.options.staleness_bound
        if bound is not None and age > bound:
            return None
        return 1 / (1 + age) if self.options.staleness_weighting == "inverse" else 1.0
