"""edp (EDP): an asynchronous parameter server. Workers do not wait for each other, or not long.

    server:
        for each push (gradient g computed at version v, on n samples) from any worker:
            staleness <- version - v
            weight <- n / (1 + staleness)                         or n: `staleness_weighting`
            keep g;  lease the next samples to its worker
        when a global batch of samples has arrived:
            w <- optimizer(w, clip(weighted mean of what has arrived));  version <- version + 1

    after each of its steps, to every worker: the change of w in int4 (`worker_update_interval` > 1)

    worker, for each of its own steps:
        w <- where the server will be when this gradient counts
        g <- gradient on my samples, at w
        push g;  wait for the change with g, at most twice as long as my step took (`max_wait`)
        for each change c of the server:  follow it
        every `worker_update_interval` steps: ask for the server's weights, and follow them when they arrive

A pull overlaps with computing; its weights are used at a step boundary, before the next pull at the latest. With interval 1
that is at once, so one worker with interval 1 is `single`.

A gradient that is one version old is harmful: with momentum 0.9, the steepest direction that stays stable is 38 times less
steep than without delay. Three things keep gradients fresh:

- Equal time: the server leases samples by speed, all together a global batch, so that all workers push at about the same time
  (`balance`). A share above the batch size is computed in several micro-batches. An update is due when a global batch has
  arrived, or a push of every worker.
- A short wait: so an update, and its change, come soon after my push, and my next gradient is not old at all. When it does not
  come, because a machine or a link is slow for once, I go on. If that happens often I wait less often. I begin with credit for
  four waits, and each of my steps earns credit for waiting a tenth as long. A wait in vain costs its time, another what is
  beyond the time of a step.
- Then I compute ahead of the server, not behind it (AdamW). Let j of my pushes, g_1 to g_j, oldest first, wait for a step of
  the server, and c be its last change. If all workers had gradients like mine, the next j steps would lead to

    w + (b + .. + b^j) c + d_1 (1 + b + .. + b^(j-1)) + .. + d_j          where d = -rate x (1 - b) x clip(g) / sqrt(v)

  with b the decay of AdamW's momentum. A worker's own v, of gradients of fewer samples, is up to the number of workers too
  large. In each tensor it has the right proportions: so the server tells the mean of its sqrt(v), and the norm by which it
  clips.

The server adds what int4 leaves out to the next change. It leaves out a worker that does not read, which then pulls.

A global batch is as many samples as all live workers read in one step. So an update of the server takes as much data as a step
of a synchronous strategy, but a fast worker may deliver more of it. `server_batch: 1` updates at every push.

Staleness weights are relative: gradients of equal age count in full. Those older than `staleness_bound` are refused.

A worker's death costs its unfinished step. Samples whose gradient was lost or refused are leased again. A run over epochs ends
when as many samples have counted: those on lease at that moment (two leases a worker) have not, and samples of the next epoch
have counted in their place.

Bytes per step and worker, for S bytes of encoded gradients and W of weights:   sent S, received W / interval, and W / 8 for
changes if the interval is above 1

Dean et al., "Large scale distributed deep networks", 2012. Staleness weights: Zhang et al., "Staleness-aware Async-SGD",
2016. Buffered updates: Nguyen et al., "Federated learning with buffered asynchronous aggregation", 2022. Changes with error
feedback: Tang et al., "DoubleSqueeze", 2019. Computing where the server's momentum leads: Hakimi et al., "Taming momentum in a
distributed asynchronous environment", 2019; Guan et al., "XPipe: efficient pipeline model parallelism for multi-GPU DNN
training", 2019.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from smolcluster.comm.codecs.levels import Int4
from smolcluster.comm.rounds import Committed
from smolcluster.compute.optim import is_adamw, named_groups, second_moment_of
from smolcluster.compute.replica import Batch
from smolcluster.compute.timing import Span
from smolcluster.config.options import EDPOptions
from smolcluster.parallel.encoding import bytes_on_the_wire, server_cost
from smolcluster.parallel.placement import Cost, Node, Placement, Shape, workers_and_server
from smolcluster.strategies.base import StepReport
from smolcluster.strategies.base.replicated import Announced, Pushing
from smolcluster.tasks.base import Task

UNANSWERED = 2  # pushes that a worker may have in flight, so that a slow server is not flooded
MOST_AHEAD = 4  # own steps
EARNED = 0.1  # own steps: credit for waiting that each step earns
FREE = 1.0  # own steps: what a wait that was not in vain does not cost
IN_VAIN = 4  # waits in a row that credit allows
UNUSUAL = 2.0  # times the number of workers: the norm of a gradient, relative to the server's, from which on it is scaled down


class EDP(Pushing[EDPOptions]):
    combined = "server, as they arrive"
    _since_pull = 0  # steps
    _pulling = False
    _credit = math.inf  # for waiting, in own steps; at first for `IN_VAIN` waits
    _staleness = 0  # of the last acknowledged gradient

    def setup(self, task: Task) -> None:
        super().setup(task)
        self._server: dict[str, Tensor] = {}  # its weights as far as known, where it announces changes
        self._said = Announced()  # with its last change
        self._change: dict[str, Tensor] = {}
        self._ahead: dict[int, dict[str, Tensor]] = {}  # by push: my part in a step of the server, until it has counted

    @property
    def announces(self) -> bool:
        return self.options.worker_update_interval > 1

    @classmethod
    def plan(cls, options: EDPOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if shape is None:
            return Placement(seats=workers_and_server(nodes))
        n, size = len(nodes), shape.parameters * shape.bytes_per_parameter
        gradients, weights = bytes_on_the_wire(options, shape)
        interval = options.worker_update_interval
        follows = interval > 1
        ahead = MOST_AHEAD + 1 if follows and shape.optimizer_states == 2 else 0  # AdamW
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
        replica, rate, interval = self.replica, self.replica.learning_rate, self.options.worker_update_interval

        # Push my gradient, at the weights that the server will have.
        self._go_ahead()
        started = time.perf_counter()
        with self.contribute(batch) as mine:
            mine.loss = loss = replica.compute(batch)
        own_s = time.perf_counter() - started

        norm = self._step_ahead(batch.step) if self.announces else None  # else the server's weights arrive at once
        replica.drop_gradients()

        comm = Span(self.context.device)
        self._wait_for_change(batch.step, own_s)
        self._since_pull += 1
        if self._since_pull >= interval:
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

    def _may_continue(self) -> bool:
        weights_are_due = self._pulling and self._since_pull + 1 >= self.options.worker_update_interval
        return len(self.rounds.flights) <= UNANSWERED and not weights_are_due

    def _wait_for_change(self, push: int, own_s: float) -> None:
        """Wait until the server has counted my push, which took `own_s` seconds to compute; not long, and not often in vain."""
        most = self.options.max_wait
        self._credit = min(IN_VAIN * most, self._credit + EARNED)
        if push not in self._ahead or self._credit < most or most == 0:
            return
        started = time.monotonic()
        counted = self.rounds.wait_until(lambda: push not in self._ahead, within_s=most * own_s)
        waited = (time.monotonic() - started) / own_s
        self._credit -= max(0.0, waited - FREE) if counted else waited

    def _go_ahead(self) -> None:
        """Set the weights to where the server will be when it counts the next push."""
        if not self._server:
            return
        decay = self.replica.optimizer.param_groups[0].get("betas", (0.0,))[0]
        carried = [0.0]  # by momentum, of a change: after 0, 1, 2 .. further steps
        for power in range(1, len(self._ahead) + 1):
            carried.append(carried[-1] + decay**power)
        for name, p in self.trained.items():
            own = p.detach().copy_(self._server[name])
            if name in self._change:
                own.add_(self._change[name], alpha=carried[-1])
            for number, step in enumerate(reversed(self._ahead.values())):  # the newest first
                if name in step:
                    own.add_(step[name], alpha=1 + carried[number])

    def _step_ahead(self, push: int) -> Tensor:
        """Note my part in a step of the server, if my gradient is finite. Return the gradient's norm."""
        replica, said = self.replica, self._said
        norm = get_total_norm([p.grad for p in replica.parameters if p.grad is not None])
        if not bool(torch.isfinite(norm)):
            return norm
        norm = norm / replica.loss_scale
        self._ahead[push] = step = {}
        if len(self._ahead) > MOST_AHEAD:
            del self._ahead[next(iter(self._ahead))]
        if not is_adamw(replica.optimizer):
            return norm
        usual = UNUSUAL * said.workers * said.norm or float(norm)
        unscale = min(1.0, usual / float(norm)) / replica.loss_scale if norm > 0 else 1.0
        most = self.context.config.training.grad_clip_norm
        clip = min(1.0, most / (said.norm or float(norm))) if most and norm > 0 else 1.0
        sizes = dict(zip(self.trained, said.denominators, strict=False))
        for name, p, group in named_groups(self.trained, replica.optimizer):
            if p.grad is None:
                continue
            gradient = p.grad * unscale
            denominator = second_moment_of(replica.optimizer, p, group, gradient)
            size = denominator.mean() / sizes[name] if sizes.get(name) else 1.0
            decay = group["betas"][0]
            rate = replica.rate_of(replica.updates, group) * (1 - decay) / (1 - decay ** (replica.updates + 1))
            step[name] = gradient.div_(denominator).mul_(-rate * clip * size)
        return norm

    def apply(self, result: Committed) -> None:
        """Handle the acknowledgement of a push: the server has taken the gradient, or refused it."""
        self._staleness = result.age
        if result.empty:  # the local copy is too old, or my gradient absurd
            self._ahead.pop(result.step, None)
            self._pull_next()

    def _pull_next(self) -> None:
        if not self._pulling:
            self._since_pull = self.options.worker_update_interval

    def take_change(self, said: Announced, step: int) -> None:
        self._ahead = {push: ahead for push, ahead in self._ahead.items() if push > said.counted}
        if said.change is None:
            self._pull_next()
            return
        predicts = is_adamw(self.replica.optimizer)
        for name, own in self._server.items():
            change = said.change[name].to(own.device, own.dtype, copy=predicts)
            own.add_(change)
            if predicts:
                self._change[name] = change
        self._said, self.replica.updates = replace(said, change=None), step

    def take_weights(self, weights: Mapping[str, Tensor], step: int) -> None:
        for name, own in self.replica.weights().items():
            if own.is_floating_point():
                self._server.get(name, own).copy_(weights[name])
        self.replica.updates, self._pulling = step, False

    def rejoined(self) -> None:
        self._since_pull, self._pulling = 0, False
        self._credit = math.inf
        self._ahead.clear()
        self._change.clear()
        self._said = Announced()
        self._server = {name: p.detach().clone() for name, p in self.trained.items()} if self.announces else {}

    @property
    def server_batch(self) -> int | None:
        return self.options.server_batch

    def weight_of(self, age: int) -> float | None:
        bound = self.options.staleness_bound
        if bound is not None and age > bound:
            return None
        return 1 / (1 + age) if self.options.staleness_weighting == "inverse" else 1.0
