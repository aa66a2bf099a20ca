"""edp (EDP): an asynchronous parameter server. Workers never wait for each other.

    server:
        for each push (gradient g computed at version v, on n samples) from any worker:
            staleness <- version - v
            weight <- n / (1 + staleness)                         or n: `staleness_weighting`
            keep it;  lend its worker the next samples
        when a global batch of samples has arrived:
            w <- optimizer(w, clip(weighted mean of what has arrived));  version <- version + 1

    worker, for each of its own steps:
        g <- gradient on my samples, at my weights
        push g, and go on
        w <- optimizer(w, clip(g))                                my own copy keeps training
        every `worker_update_interval` steps: ask for the server's weights, and take them over when they come

A pull travels while the worker computes; it is installed at a step boundary, and at the latest before the next pull is due.
With interval 1 that is at once, so one worker with interval 1 is `single`.

A global batch is as many samples as all live workers read in one step. So a step of the server is as much data as a step of any
synchronous strategy, whoever delivers it: a fast worker fills in for a slow one. `server_batch: 1` steps at every push.

Staleness weights are relative: if all that has arrived is equally old, it counts in full. `staleness_bound` refuses what is
older.

A worker's death costs its unfinished step. Samples whose gradient came to nothing, by that or by its age, are lent again.
A run over epochs ends when as many samples have counted: what workers still hold then (LEASES_AHEAD leases each) has not, and
samples of the next epoch have counted in its place.

Bytes per step and worker, for S bytes of encoded gradients and W bytes of weights:   sent S, received W / interval

Dean et al., "Large scale distributed deep networks", 2012. Staleness weights: Zhang et al., "Staleness-aware Async-SGD",
2016. A buffer before each step: Nguyen et al., "Federated learning with buffered asynchronous aggregation", 2022.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from smolcluster.comm.codecs import Feedback
from smolcluster.comm.elastic.messages import Kind, Message
from smolcluster.comm.elastic.roster import Gone, Member, Said
from smolcluster.compute.replica import Batch
from smolcluster.compute.timing import Span
from smolcluster.config.options import EDPOptions
from smolcluster.parallel.placement import Cost, Node, Placement, Shape, workers_and_server
from smolcluster.strategies.base import StepReport
from smolcluster.strategies.served import Push, Served, bytes_on_the_wire, mean_loss, server_cost
from smolcluster.tasks.base import Task

LEASES_AHEAD = 2  # what a worker computes, and what it computes next
MOST_UNREAD = 8  # times the weights that may wait for a worker that pulls: its state and one pull, with room to spare
UNANSWERED = 2  # pushes a worker sends before it waits for an answer: a slow server is not flooded


class EDP(Served[EDPOptions]):
    @classmethod
    def plan(cls, options: EDPOptions, nodes: Sequence[Node], shape: Shape | None) -> Placement:
        if shape is None:
            return Placement(seats=workers_and_server(nodes))
        n, size = len(nodes), shape.parameters * shape.bytes_per_parameter
        gradients, weights = bytes_on_the_wire(options, shape)
        worker = Cost(
            parameter_bytes=2 * size,  # its own, and the pull on its way
            gradient_bytes=size,
            optimizer_bytes=size * shape.optimizer_states,
            bytes_sent=gradients,
            bytes_received=weights // options.worker_update_interval,
            messages=2 * max(1, round(size / (options.bucket_mb * 2**20))),
        )
        smallest = max(1, min(node.batch_size for node in nodes))
        counted = n if options.server_batch is None else -(-options.server_batch // smallest)  # pushes of a step
        wanted = options.server_batch or sum(node.batch_size for node in nodes)
        server = server_cost(
            options,
            shape,
            workers=n,
            pushes=n + -(-wanted // smallest) - 1,  # all push at once, and what came before is one short of a step
            record_bytes=min(counted * gradients, 4 * shape.parameters),  # as they came, or their average
        )
        return Placement(seats=workers_and_server(nodes), costs=[worker] * n, server=server)

    def setup(self, task: Task) -> None:
        super().setup(task)
        if self.context.line is not None:
            self._incoming = {n: torch.empty(t.shape) for n, t in self.replica.weights().items()}
            self._version = 0  # of the server's weights that mine descend from
            self._since_pull = 0
            self._pulling = False
            self._unanswered = 0
            self._staleness = 0
        if self.context.office is not None:
            self._waiting: list[Push] = []
            self._unfit: set[Member] = set()  # refused, for what their gradients are, since one was taken

    # The worker

    def step(self, batch: Batch) -> StepReport:
        replica, rate, interval = self.replica, self.replica.learning_rate, self.options.worker_update_interval

        # My gradient, to the server, and on.
        loss = replica.compute(batch)
        self._push(batch, loss, version=self._version)
        self._unanswered += 1
        if self._feedback is not None:
            self._feedback.commit()  # several pushes are on their way: what is refused is lost

        # My own copy keeps training, unless the server's weights replace it right away.
        norm = self._train_alone() if interval > 1 else None
        replica.drop_gradients()
        self._since_pull += 1
        if self._since_pull >= interval:
            self._line.send(Kind.PULL, epoch=self._epoch)
            self._since_pull, self._pulling = 0, True

        comm = Span(self.context.device)
        while not self._over and (
            self._unanswered > UNANSWERED or (self._pulling and self._since_pull + 1 >= interval)
        ):
            message = self._line.get()
            assert message is not None
            self._hear(message)
        comm.end()
        return StepReport(
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            samples=batch.samples,
            tokens=batch.tokens,
            staleness=self._staleness,
            comm=comm,
            stop=self._over,
        )

    def _train_alone(self) -> Tensor:
        """A step of my own copy; not with a gradient that would spoil it, and my optimizer, for good."""
        replica = self.replica
        norm = get_total_norm([p.grad for p in replica.parameters if p.grad is not None])
        if bool(torch.isfinite(norm)):
            return replica.apply()
        return norm

    def _hear(self, message: Message) -> None:
        super()._hear(message)
        if message.kind is Kind.WELCOME:
            self._version = self.replica.updates
            self._since_pull = self._unanswered = 0
            self._pulling = False
        elif message.kind is Kind.ACK:
            self._unanswered -= 1
            self._staleness = int(message.meta.get("staleness", 0))
            if "refused" in message.meta:
                self.context.stale_rejected += 1
                if not self._pulling:
                    self._since_pull = self.options.worker_update_interval  # my copy is too old, or went astray: pull
                if self._feedback is not None:
                    self._feedback = Feedback()  # what it left out goes with it
        elif message.kind is Kind.WEIGHTS and message.payload is not None:
            self._weights.decode(message.channel, message.payload, self._incoming)
            self._line.release(message.payload)
            if message.channel == len(self._weights) - 1:
                self._install(version=message.step)

    def _install(self, *, version: int) -> None:
        for name, own in self.replica.weights().items():
            if own.is_floating_point():
                own.copy_(self._incoming[name])
        self.replica.updates = self._version = version
        self._pulling = False

    # The server

    leases_ahead = LEASES_AHEAD

    def _first_step(self, member: Member) -> int:
        """A worker counts its own steps; also one that was paused goes on with its next."""
        return member.step + 1

    def serve(self) -> None:
        self.muster()
        while self.replica.updates < self.context.total_steps and not self.context.stop_requested():
            self._welcome()
            event = self._roster.get(0.1)
            if isinstance(event, Gone):
                self._gone(event)
                self._waiting = [push for push in self._waiting if push.member is not event.member]
            elif isinstance(event, Said) and event.message.kind is Kind.PULL:
                self._send_weights(event.member)
            elif isinstance(event, Said) and event.message.kind is Kind.PUSH:
                self._answer(event)
            if self._waiting and sum(push.samples for push in self._waiting) >= self._wanted():
                self._update(self._waiting)
                self._waiting = []

    def _answer(self, said: Said) -> None:
        """Take a push or refuse it; either way its worker gets the next lease."""
        member, step, refused = said.member, said.message.step, self.stale_rejected
        if any(push.member is member and push.step == step for push in self._waiting):
            self._roster.evict(member, f"it pushed its step {step} twice")
            return
        push = self._arrived(said)
        answer: dict[str, object] = {}
        if push is not None:
            version, bound = push.meta.get("version"), self.options.staleness_bound
            if not isinstance(version, int) or not 0 <= version <= self.replica.updates:
                self._roster.evict(member, f"it pushed a gradient of version {version!r}")
                return
            staleness = self.replica.updates - version
            if bound is not None and staleness > bound:
                self.refuse(member, step, f"it is {staleness} versions old, more than {bound}", again=True)
            else:
                push.weight = 1 / (1 + staleness) if self.options.staleness_weighting == "inverse" else 1.0
                push.extra["staleness"] = answer["staleness"] = staleness
                self._waiting.append(push)
                self._unfit.clear()
        if self.stale_rejected > refused:
            answer["refused"] = True
            if push is None:
                self._note_unfit(member)
        elif push is None:
            return  # not whole yet
        member.step = max(member.step, step)
        answer["scale"] = self.office.scale.state_dict()
        answer["leases"] = [self.lend(member, step + LEASES_AHEAD)]
        member.link.send(Message(kind=Kind.ACK, step=step, epoch=member.epoch, meta=answer))

    def _note_unfit(self, member: Member) -> None:
        """When every worker was refused in turn, and nothing was taken meanwhile, an attempt at the next step has failed."""
        self._unfit.add(member)
        if self._unfit.issuperset(self._roster.members.values()):
            self._unfit.clear()
            self.gate.nothing_counted(self.replica.updates + 1)

    def _wanted(self) -> int:
        return self.options.server_batch or sum(m.batch_size for m in self._roster.members.values())

    def _update(self, pushes: Sequence[Push]) -> None:
        rate = self.replica.learning_rate
        average = self._average(pushes)
        self._record(pushes, average)
        norm = self._take_step(pushes, average)
        samples = sum(push.samples for push in pushes)
        self.office.committed(
            StepReport(
                loss=mean_loss(pushes),
                grad_norm=norm,
                learning_rate=rate,
                samples=samples,
                tokens=samples * self.tokens_per_sample,
                staleness=round(sum(p.extra["staleness"] for p in pushes) / len(pushes)),
            )
        )

    def _send_weights(self, member: Member) -> None:
        if member.link.queued_bytes > MOST_UNREAD * self._weights.nbytes + 2**20:
            self._roster.evict(member, "it asks for the weights again and again, and does not read them")
            return
        for channel, payload in self._weights.encode(self.replica.weights()):
            member.link.send(
                Message(
                    kind=Kind.WEIGHTS, step=self.replica.updates, channel=channel, epoch=member.epoch, payload=payload
                )
            )
