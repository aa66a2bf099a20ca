"""edp (EDP): an asynchronous parameter server. Workers never wait for each other.

    server:
        for each push (gradient g computed at version v, on n samples) from any worker:
            staleness <- version - v
            weight <- n / (1 + staleness)                         or n: `staleness_weighting`
            keep g;  lease the next samples to its worker
        when a global batch of samples has arrived:
            w <- optimizer(w, clip(weighted mean of what has arrived));  version <- version + 1

    after each of its steps, to every worker: the change of w in int4 (AdamW, `worker_update_interval` > 1)

    worker, for each of its own steps:
        g <- gradient on my samples, at my weights
        push g, without waiting
        d <- -s x rate x (1 - beta_1) x clip(g) / sqrt(v);  w <- w + d       with this worker's own v (AdamW without momentum)
        for each change c of the server:  w <- w + c + e - the e before, where e = s x beta_1 x c;  and w <- w - d for each push
            that the server has counted
        every `worker_update_interval` steps: ask for the server's weights, and use them when they arrive, plus e and my d's

A pull overlaps with computing; its weights are copied in at a step boundary, before the next pull at the latest. With interval
1 that is at once, so one worker with interval 1 is `single`.

So a gradient is computed ahead of the server, not behind it: at its newest weights, plus where its momentum leads (e: its last
change, scaled), plus the part of my own gradients in its next steps (d, at most 4). A push that is one version old is harmful:
with momentum 0.9, the steepest direction that stays stable is 38 times less steep than without delay. With s = 1, and gradients
alike on all workers, w + e + d is where the server will be after the next step. s = 2 goes one step further, as Nesterov's
momentum does, which damps it. A worker without others takes steps of AdamW with momentum, as the server does, and e = 0.

With SGD and Muon there are no changes: d is one step of the optimizer, and stays in the copy until the next pull.

The server adds what int4 leaves out to the next change. It leaves out a worker that does not read, which then pulls.

A global batch is as many samples as all live workers read in one step. So an update of the server takes as much data as a step
of a synchronous strategy, but a fast worker may deliver more of it. `server_batch: 1` updates at every push.

Staleness weights are relative: gradients of equal age count in full. Those older than `staleness_bound` are refused.

A worker's death costs its unfinished step. Samples whose gradient was lost or refused are leased again. A run over epochs ends
when as many samples have counted: those on lease at that moment (two leases a worker) have not, and samples of the next epoch
have counted in their place.

Bytes per step and worker, for S bytes of encoded gradients and W of weights:   sent S, received W / interval + W / 8 (AdamW)

Dean et al., "Large scale distributed deep networks", 2012. Staleness weights: Zhang et al., "Staleness-aware Async-SGD",
2016. Buffered updates: Nguyen et al., "Federated learning with buffered asynchronous aggregation", 2022. Changes with error
feedback: Tang et al., "DoubleSqueeze", 2019. Computing where the server's momentum leads: Hakimi et al., "Taming momentum in a
distributed asynchronous environment", 2019; Guan et al., "XPipe: efficient pipeline model parallelism for multi-GPU DNN
training", 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from smolcluster.comm.codecs.levels import Int4
from smolcluster.comm.rounds import Committed
from smolcluster.compute.muon import Muon
from smolcluster.compute.replica import Batch
from smolcluster.compute.timing import Span
from smolcluster.config.options import EDPOptions
from smolcluster.parallel.encoding import bytes_on_the_wire, server_cost
from smolcluster.parallel.placement import Cost, Node, Placement, Shape, workers_and_server
from smolcluster.strategies.base import StepReport
from smolcluster.strategies.base.replicated import Pushing
from smolcluster.tasks.base import Task

UNANSWERED = 2  # pushes that a worker may have in flight, so that a slow server is not flooded
MOST_AHEAD = 4  # steps
LOOKAHEAD = 2.0  # server steps


class EDP(Pushing[EDPOptions]):
    combined = "server, as they arrive"
    _since_pull = 0  # steps
    _workers = 1
    _pulling = False
    _staleness = 0  # of the last acknowledged gradient

    def setup(self, task: Task) -> None:
        super().setup(task)
        self._ahead: dict[int, dict[str, Tensor]] = {}  # by push: my step in the local copy, until the server's has it
        self._lookahead: dict[str, Tensor] = {}  # in the local copy: where the server's momentum leads

    @property
    def announces(self) -> bool:
        """Only with AdamW, whose momentum and second moments are known."""
        optimizer = self.replica.optimizer
        adamw = isinstance(optimizer, torch.optim.AdamW) and not isinstance(optimizer, Muon)
        return adamw and self.options.worker_update_interval > 1

    @classmethod
    def plan(cls, options: EDPOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if shape is None:
            return Placement(seats=workers_and_server(nodes))
        n, size = len(nodes), shape.parameters * shape.bytes_per_parameter
        gradients, weights = bytes_on_the_wire(options, shape)
        interval = options.worker_update_interval
        follows = interval > 1 and shape.optimizer_states == 2  # AdamW
        change = sum(map(Int4().nbytes, shape.tensors or [(shape.parameters,)])) if follows else 0
        messages = max(1, round(size / (options.bucket_mb * 2**20)))
        worker = Cost(
            parameter_bytes=(2 + (MOST_AHEAD + 1 if follows else 0)) * size,  # its own, a pull in flight, steps ahead
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

        # Push my gradient without waiting.
        with self.contribute(batch) as mine:
            mine.loss = loss = replica.compute(batch)

        # Step ahead of the server, unless its weights arrive at once.
        norm = self._step_ahead(batch.step) if interval > 1 else None
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

    def _step_ahead(self, push: int) -> Tensor:
        """Update the local copy with my gradient, if it is finite. Return its norm."""
        replica = self.replica
        norm = get_total_norm([p.grad for p in replica.parameters if p.grad is not None])
        if not bool(torch.isfinite(norm)):
            return norm
        if not self.announces:
            return replica.apply()
        if len(self._ahead) == MOST_AHEAD:
            self._take_back(next(iter(self._ahead)))
        own = {name: p.detach() for name, p in self.trained.items()}
        before = {name: tensor.clone() for name, tensor in own.items()}
        factor = 1.0
        if self._workers > 1:
            factor = LOOKAHEAD
            for state in replica.optimizer.state.values():  # the momentum is the server's
                state["exp_avg"].zero_()
        norm = replica.apply()
        for name, old in before.items():
            step = torch.sub(own[name], old, out=old)
            own[name].add_(step, alpha=factor - 1)
            step.mul_(factor)
        self._ahead[push] = before
        return norm

    def _take_back(self, push: int) -> None:
        step = self._ahead.pop(push)
        for name, p in self.trained.items():
            p.detach().sub_(step[name])

    def apply(self, result: Committed) -> None:
        """Handle the acknowledgement of a push: the server has taken the gradient, or refused it."""
        self._staleness = result.age
        if result.empty:
            self._pull_next()  # the local copy is too old or not finite

    def _pull_next(self) -> None:
        if not self._pulling:
            self._since_pull = self.options.worker_update_interval

    def take_change(self, change: Mapping[str, Tensor] | None, step: int, *, counted: int, workers: int) -> None:
        self._workers = workers
        for push in [push for push in self._ahead if push <= counted]:
            self._take_back(push)
        if change is None:
            self._pull_next()
            return
        scale = LOOKAHEAD * self.replica.optimizer.param_groups[0]["betas"][0] if workers > 1 else 0.0
        for name, p in self.trained.items():
            own, moved = p.detach(), change[name].to(p.device)
            if name in self._lookahead:
                own.sub_(self._lookahead[name])
            own.add_(moved, alpha=1 + scale)
            self._lookahead[name] = moved * scale
        self.replica.updates = step

    def take_weights(self, weights: Mapping[str, Tensor], step: int) -> None:
        for name, own in self.replica.weights().items():
            if own.is_floating_point():
                own.copy_(weights[name])
        for ahead in (*self._ahead.values(), self._lookahead):
            for name, step_ahead in ahead.items():
                self.trained[name].detach().add_(step_ahead)
        self.replica.updates, self._pulling = step, False

    def rejoined(self) -> None:
        self._since_pull, self._pulling = 0, False
        self._ahead.clear()
        self._lookahead.clear()

    @property
    def server_batch(self) -> int | None:
        return self.options.server_batch

    def weight_of(self, age: int) -> float | None:
        bound = self.options.staleness_bound
        if bound is not None and age > bound:
            return None
        return 1 / (1 + age) if self.options.staleness_weighting == "inverse" else 1.0
