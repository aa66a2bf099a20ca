"""The rounds of a worker with a parameter server: it pushes gradients and applies what the server sends.

PUSH     buckets of the encoded gradient of one step, then the buffers (running means)
AVERAGE  synchronous: the mean of a step, which all workers apply in order, also those that contributed nothing;
         asynchronous: the change of the server's weights in a step, in int4
ACK      asynchronous: the push was taken or refused; synchronous: it was too late
WEIGHTS  the server's weights, requested with PULL or sent every few steps
WELCOME  join with the server's state: pushes in flight are discarded
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from smolcluster.comm.codecs import CodecError, Feedback, chosen_codec, make_codec
from smolcluster.comm.codecs.feedback import under
from smolcluster.comm.codecs.levels import Int4
from smolcluster.comm.elastic.collectives.packed_tensors import PackedTensors
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.rounds import AtServer, Committed, Contribution, ServerRounds
from smolcluster.compute.replica import Replica
from smolcluster.config.options import ServedOptions
from smolcluster.engine.elastic.member.member_side import MemberSide
from smolcluster.strategies.base.replicated import Announced, Pushing

SLOTS = 1  # memory for one mean


class PackedModel:
    """The packing of a model's gradients, weights and buffers into buckets, identical on both sides."""

    def __init__(self, replica: Replica, options: ServedOptions) -> None:
        self.codec = chosen_codec(options)
        bucket_bytes, plain = int(options.bucket_mb * 2**20), make_codec("fp32")
        weights, model = replica.weights(), replica.model
        self.shapes = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
        parameters = dict(model.named_parameters(remove_duplicate=False))  # with tied parameters under each name
        self.buffer_shapes = {n: t.shape for n, t in weights.items() if n not in parameters}
        floats = {n: t.shape for n, t in weights.items() if t.is_floating_point()}
        self.dense_bytes = 4 * sum(map(math.prod, self.shapes.values()))
        self.gradients = PackedTensors(_layout(self.shapes), codec=self.codec, bucket_bytes=bucket_bytes)
        self.changes = PackedTensors(_layout(self.shapes), codec=Int4(), bucket_bytes=bucket_bytes)
        self.weights = PackedTensors(_layout(floats), codec=plain, bucket_bytes=bucket_bytes)
        self.buffers = PackedTensors(_layout(self.buffer_shapes), codec=plain, bucket_bytes=bucket_bytes)


def _layout(shapes: dict[str, torch.Size]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(shape)) for name, shape in shapes.items()]


class PushedRounds(ServerRounds, MemberSide):
    combination: AtServer
    _strategy: Pushing[Any]

    def __init__(self, strategy: Pushing[Any], combination: AtServer) -> None:
        super().__init__(combination, num_slots=SLOTS)
        self.init_member(strategy)
        self._one_by_one = strategy.combined == "server, as they arrive"
        self._packed = packed = PackedModel(self.replica, strategy.options)
        self._link.expect(Kind.WEIGHTS, packed.weights.payloads())
        self._link.expect(Kind.AVERAGE, (packed.changes if self._one_by_one else packed.gradients).payloads())
        self._feedback = Feedback() if packed.codec.feedback else None
        self._server_weights = {n: torch.empty(t.shape) for n, t in self.replica.weights().items()}
        self._version = 0  # of the server's weights that this worker's derive from
        self._counted = False  # weights count targets
        self._rejoined = False  # since the last step began

    def ends(self, step: int) -> bool:
        return True

    def pull(self) -> None:
        self._link.send(Kind.PULL, epoch=self._epoch)

    def wait_until(self, done: Callable[[], bool], *, timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (self._over or self._rejoined or done()):
            message = self._link.get(None if deadline is None else deadline - time.monotonic())
            if message is None:
                return False
            self._handle(message)
        return True

    def own_state(self) -> dict[str, Tensor]:
        if self._feedback is None:
            return {}
        own = self._feedback.state_dict()
        return {f"{self._packed.codec.name}/{name}": tensor for name, tensor in own.items()}

    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        if self._feedback is not None:
            self._feedback.load_state_dict(under(f"{self._packed.codec.name}/", tensors))

    # Pushing a gradient

    def _starter(self, mine: Contribution, *, counted: bool) -> Callable[[], None]:
        self._counted, self._rejoined = counted, False
        return lambda: None

    def _contributed(self, mine: Contribution, started: float) -> None:
        """Push the gradients; each bucket is sent while the next is encoded."""
        assert mine.loss is not None
        mine.host_loss = float(mine.loss)  # waits for the GPU
        fields: dict[str, Any] = {"samples": mine.samples, "loss": repr(mine.host_loss)}  # as text: JSON has no NaN
        fields |= {"compute_s": time.perf_counter() - started, "version": self._version}
        if self._counted:
            fields["count"] = mine.weight

        def send(channel: int, payload: Tensor, codec: str) -> None:
            meta = fields if channel == 0 else {}
            step, epoch = mine.step, self._epoch
            self._link.send(Kind.PUSH, step=step, channel=channel, epoch=epoch, codec=codec, meta=meta, payload=payload)

        packed, gradients = self._packed, self._take_gradients()
        self.replica.buffers.settle()
        try:
            if gradients is None:
                fields["scale"] = self.replica.loss_scale
                raise CodecError("the gradient overflowed in fp16")
            for channel, payload in packed.gradients.encode(gradients, key=mine.step, feedback=self._feedback):
                send(channel, payload, packed.codec.name)
            for channel, payload in packed.buffers.encode(self.replica.weights()):
                send(len(packed.gradients) + channel, payload, "fp32")
        except CodecError as why:
            if self._feedback is not None:
                self._feedback.undo()
            self._link.send(Kind.PUSH, step=mine.step, epoch=self._epoch, meta={"skip": str(why), **fields})
        if self._one_by_one and self._feedback is not None:
            self._feedback.commit()  # several pushes are in flight: what a refused one carried is lost

    def _take_gradients(self) -> dict[str, Tensor] | None:
        """Return the unscaled gradients by name, zeros where there is none; None when they overflowed in fp16."""
        replica = self.replica
        named = {n: p for n, p in replica.model.named_parameters() if p.requires_grad}
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
        if replica.scale is not None:
            norm = get_total_norm(list(gradients.values()))
            if not bool(torch.isfinite(norm)):
                return None
            gradients = {n: g / replica.loss_scale for n, g in gradients.items()}
        return gradients

    # Messages of the server

    def _handle(self, message: Message) -> None:
        super()._handle(message)
        self.stop = self._over
        match message.kind:
            case Kind.WELCOME:
                self._rejoin(counted=int(message.meta.get("counted", 0)))
            case Kind.AVERAGE if message.payload is not None and self._one_by_one:
                self._take_change(message, message.payload)
            case Kind.AVERAGE if message.payload is not None:
                self._take_average(message, message.payload)
            case Kind.WEIGHTS if message.payload is not None:
                self._take_weights(message, message.payload)
            case Kind.ACK:
                self._take_answer(message)
            case _:
                pass

    def _rejoin(self, *, counted: int) -> None:
        """Discard what is in flight. `counted`: the last step that counted a gradient of this worker."""
        if self._feedback is not None:
            taken = self.flights and self.flights[0].step == counted
            self._feedback.commit() if taken else self._feedback.undo()
        self.flights.clear()
        self._version, self._rejoined = self.replica.updates, True
        self._strategy.rejoined()

    def _take_average(self, message: Message, payload: Tensor) -> None:
        self._packed.gradients.decode(message.channel, payload, self.combination.mean)
        self._link.release(payload)
        if message.channel < len(self._packed.gradients) - 1:
            return
        self._drop_leases_before(message.step + 1)
        self._strategy.apply(Committed(message.step, slot=0))
        if self.flights and self.flights[0].step == message.step:
            self.flights.popleft()
            if self._feedback is not None:
                counted = self.context.seat.rank in message.meta.get("counted", ())
                self._feedback.commit() if counted else self._feedback.undo()

    def _drop_leases_before(self, step: int) -> None:
        """Return leases of steps that were committed without this worker, so that the server does not wait for them."""
        while self._link.leases and self._link.leases[0].step < step:
            dropped = self._link.leases.popleft().step
            self._link.send(Kind.PUSH, step=dropped, epoch=self._epoch, meta={"skip": "late"})

    def _take_weights(self, message: Message, payload: Tensor) -> None:
        self._packed.weights.decode(message.channel, payload, self._server_weights)
        self._link.release(payload)
        if message.channel == len(self._packed.weights) - 1:
            self._version = message.step
            self._strategy.take_weights(self._server_weights, message.step)

    def _take_change(self, message: Message, payload: Tensor) -> None:
        """Follow the server by one step. A change that does not follow this worker's version is dropped: one is missing."""
        self._packed.changes.decode(message.channel, payload, self._server_weights)  # the memory of what is in transit
        self._link.release(payload)
        if message.channel == len(self._packed.changes) - 1:
            follows = message.step == self._version + 1
            self._version = message.step if follows else self._version
            update = announced(message.meta, self._server_weights if follows else None)
            self._strategy.take_change(update, message.step)

    def _take_answer(self, message: Message) -> None:
        refused = "refused" in message.meta
        if refused:
            self.context.stale_rejected += 1
        if self._one_by_one and self.flights:
            mine = self.flights.popleft()
            age = int(message.meta.get("staleness", 0))
            self._strategy.apply(Committed(mine.step, slot=0, age=age, empty=refused))
            if refused and self._feedback is not None:
                self._feedback = Feedback()  # it belongs to the refused gradient


def announced(meta: Mapping[str, Any], change: Mapping[str, Tensor] | None) -> Announced:
    """Parse what the server announces of a step; missing fields get their defaults."""
    return Announced(
        change=change,
        counted=int(meta.get("counted", 0)),
        workers=max(1, int(meta.get("workers", 1))),
        norm=abs(float(meta.get("norm", 0.0))),
        denominators=[abs(float(mean)) for mean in meta.get("denominators", ())],
    )
