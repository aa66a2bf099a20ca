"""The base of parameter servers: it checks pushed gradients, averages them, records and applies every step.

The server holds the model and its optimizer. `synchronous.py` collects the gradients of a step; `asynchronous.py` takes each as
it arrives.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from smolcluster.comm.codecs import CodecError
from smolcluster.comm.codecs.base import numbers as as_numbers
from smolcluster.comm.elastic.membership.roster import Member, MemberGone, MemberMessage
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.comm.rounds import put_gradients
from smolcluster.compute.buffers import not_finite
from smolcluster.engine.elastic.parameter_server.pushed_rounds import PackedModel
from smolcluster.engine.elastic.server_side import ServerSide, send_state
from smolcluster.engine.elastic.weight_claims import Claims
from smolcluster.strategies.base import Commit, Context, StepReport
from smolcluster.strategies.base.replicated import Pushing

TIMES_KEPT = 64  # steps


@dataclass(slots=True, eq=False)
class Push:
    """One worker's gradient of one step, as it arrives."""

    member: Member
    step: int
    meta: dict[str, Any]
    tensors: dict[str, Tensor]
    missing: set[int]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    encoded: dict[int, Tensor] | None = None  # by channel, as received; kept instead of `tensors` where it is smaller
    norm: float = 0.0
    weight: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return int(self.meta["samples"])

    @property
    def count(self) -> float:
        """Return what its loss is the mean over: its samples, or its targets where the task counts them."""
        return float(self.meta.get("count", self.samples))

    @property
    def loss(self) -> float:
        return float(self.meta["loss"])


class ParameterServer(ServerSide):
    leases_ahead: ClassVar[int] = 1

    def __init__(self, context: Context, strategy: Pushing[Any], *, tokens_per_sample: int = 1) -> None:
        super().__init__(context, strategy.replica, tokens_per_sample=tokens_per_sample)
        self.strategy = strategy
        packed = PackedModel(self.replica, strategy.options)
        self._shapes, self._buffer_shapes = packed.shapes, packed.buffer_shapes
        self._gradients, self._weights, self._buffers = packed.gradients, packed.weights, packed.buffers
        self._dense_bytes = packed.dense_bytes
        self._trained = {n: p for n, p in self.replica.model.named_parameters() if p.requires_grad}
        self._pushes: dict[tuple[int, int], Push] = {}
        self._claims = Claims(self.server_context.count)
        self._step_times: deque[float] = deque(maxlen=TIMES_KEPT)
        self._recorded_at: float | None = None
        self._keep_encoded = self._gradients.nbytes < self._dense_bytes
        self._scratch = self._new_tensors() if self._keep_encoded else {}  # to decode pushes into, one at a time
        self._roster.expect(Kind.PUSH, [*self._gradients.payloads(), *self._buffers.payloads()])

    def _first_step(self, member: Member) -> int:
        """Return the first step of a member that is welcomed now."""
        return self.replica.updates + 1

    def _first_waits(self) -> bool:
        """Return whether newcomers start only after they have read the state."""
        return False

    def _welcome(self) -> None:
        """Welcome all newcomers: send them the state and leases."""
        if self._roster.newcomers:
            waits = self._first_waits()
            state, numbers = self.copied_state()
            newcomers = sorted(self._roster.newcomers, key=lambda m: m.rank)
            for member in newcomers:
                self._roster.welcome(member)
            for member in newcomers:
                first = self._first_step(member)
                leases = [] if waits else [self.grant_lease(member, first + i) for i in range(self.leases_ahead)]
                self._send_state(member, state, numbers, leases=leases)

    def _send_state(
        self, member: Member, tensors: dict[str, Tensor], numbers: dict[str, Any], *, leases: list[dict[str, Any]]
    ) -> None:
        meta: dict[str, Any] = {"numbers": numbers, "leases": leases, "scale": self.server_context.scale.state_dict()}
        meta["counted"] = self.server_context.counted.get(str(member.rank), 0)
        send_state(member, tensors, step=self.replica.updates, epoch=member.epoch, meta=meta)

    def _arrived(self, event: MemberMessage) -> Push | None:
        """Take one bucket of a gradient; return the push once it is whole and accepted."""
        member, message = event.member, event.message
        key = (member.rank, message.step)
        if message.epoch != member.epoch:  # sent before the member was welcomed again
            if message.payload is not None:
                self._roster.release(message.payload)
            return None
        if message.step not in self.server_context.leases.held(member.instance):
            self._roster.evict(member, f"it pushed step {message.step} without holding a lease for it")
            return None
        if "skip" in message.meta:
            self._pushes.pop(key, None)
            self.refuse(member, message.step, str(message.meta["skip"]), scale=message.meta.get("scale"))
            return None
        is_buffer = message.channel >= len(self._gradients)
        if message.payload is None or message.codec != ("fp32" if is_buffer else self._gradients.codec.name):
            self._roster.evict(member, "it pushed a payload that is not a gradient of this run")
            return None
        push = self._pushes.get(key)
        if push is None:
            if message.channel != 0 or not sound(message.meta):
                self._roster.evict(member, "its push does not start with bucket 0 and well-formed metadata")
                return None
            push = self._pushes[key] = self._new_push(member, message)
        try:
            self._take_bucket(push, message.channel, message.payload)
        except CodecError as why:
            del self._pushes[key]
            self._roster.evict(member, f"its push cannot be decoded: {why}")
            return None
        if push.encoded is None or is_buffer:
            self._roster.release(message.payload)
        if push.missing:
            return None
        del self._pushes[key]
        return push if self._accepts(push) else None

    def _new_push(self, member: Member, message: Message) -> Push:
        tensors = {} if self._keep_encoded else self._new_tensors()
        missing = set(range(len(self._gradients) + len(self._buffers)))
        push = Push(member, message.step, message.meta, tensors, missing)
        push.buffers = {n: torch.empty(s) for n, s in self._buffer_shapes.items()}
        push.encoded = {} if self._keep_encoded else None
        return push

    def _take_bucket(self, push: Push, channel: int, payload: Tensor) -> None:
        """Decode or keep one bucket. Raises CodecError."""
        push.missing.discard(channel)
        if channel >= len(self._gradients):
            self._buffers.decode(channel - len(self._gradients), payload, push.buffers)
        elif push.encoded is not None:
            push.encoded[channel] = payload
        else:
            self._gradients.decode(channel, payload, push.tensors)
        if not push.missing:
            push.norm = float(get_total_norm(list(self._decoded(push, self._scratch).values())))

    def _accepts(self, push: Push) -> bool:
        """Check a complete push against its lease and the gate; evict or refuse its member otherwise."""
        member, ranges = push.member, self.server_context.leases.held(push.member.instance).get(push.step, [])
        leased = sum(count for _, count in ranges)
        if leased != push.samples:
            self._roster.evict(
                member, f"it pushed {push.samples} samples of step {push.step}, and its lease has {leased}"
            )
            return False
        if (overclaim := self._claims.rejection_reason(ranges, push.count)) is not None:
            self._roster.evict(member, overclaim)
            return False
        reason = self.gate.rejection_reason(push.norm)
        if reason is None and (broken := not_finite(push.buffers)):
            reason = f"its buffer {broken} has NaN or infinite values"
        if reason is not None:
            self.refuse(member, push.step, reason)
        return reason is None

    def _decoded(self, push: Push, out: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return its gradient, decoded into `out` where it was kept encoded."""
        if push.encoded is None:
            return push.tensors
        for channel, payload in push.encoded.items():
            self._gradients.decode(channel, payload, out)
        return out

    def _new_tensors(self) -> dict[str, Tensor]:
        return {n: torch.empty(s) for n, s in self._shapes.items()}

    def _gone(self, gone: MemberGone) -> None:
        """Take back the leases of a lost member and drop what it pushed: a step counts current members only."""
        self.server_context.leases.release(gone.member.instance)
        for key in [key for key, push in self._pushes.items() if push.member is gone.member]:
            del self._pushes[key]

    def _average(self, pushes: Sequence[Push]) -> dict[str, Tensor]:
        """Average by count and weight, in the order given."""
        average: dict[str, Tensor] = {}
        for push, share in zip(pushes, _shares(pushes), strict=True):
            out = self._scratch if average or not self._keep_encoded else self._new_tensors()
            average = _add(average, self._decoded(push, out), share=share)
        return average

    def _record(
        self, pushes: Sequence[Push], average: dict[str, Tensor], *, encoded: Sequence[Tensor] | None = None
    ) -> None:
        """Record the next step: from here on it counts. `encoded`: record the average as the workers receive it."""
        step = self.replica.updates + 1
        contributors = []
        for push in pushes:
            if push.count:
                self.gate.accept(push.norm, instance=push.member.instance)
            ranges = self.server_context.leases.commit(push.member.instance, push.step)
            contributors.append(
                {
                    "rank": push.member.rank,
                    "instance": push.member.instance,
                    "seq": push.step,
                    "samples": push.samples,
                    "ranges": [list(r) for r in ranges],
                }
            )
        # Buffers are those of the lowest rank, as on the mesh plane.
        buffers = min(pushes, key=lambda push: push.member.rank).buffers
        self.server_context.scale.committed(push.member.instance for push in pushes)
        numbers, parts = self._smallest_form(pushes, average, encoded)
        numbers["counted"] = {**self.server_context.counted, **{str(push.member.rank): step for push in pushes}}
        parts += [buffers[n] for n in self._buffers.names]
        self.server_context.record(Commit(step=step, contributors=contributors, gradient=parts, numbers=numbers))
        self._note_step_time(time.monotonic())

    def _note_step_time(self, now: float) -> None:
        """Keep the median step time as patience: a member paused earlier would lose its gradient and reload the state."""
        if self._recorded_at is not None:
            self._step_times.append(now - self._recorded_at)
            self._roster.patience_s = statistics.median(self._step_times)
        self._recorded_at = now

    def _smallest_form(
        self, pushes: Sequence[Push], average: dict[str, Tensor], encoded: Sequence[Tensor] | None
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the smallest payload at hand from which `replay` reproduces exactly this average, and its metadata."""
        if encoded is not None:
            return {"form": "encoded", "shares": None}, list(encoded)
        kept = [push.encoded for push in pushes if push.encoded is not None]
        if len(kept) == len(pushes) and len(pushes) * self._gradients.nbytes < self._dense_bytes:
            payloads = [channels[channel] for channels in kept for channel in sorted(channels)]
            return {"form": "encoded", "shares": _shares(pushes)}, payloads
        return {"form": "dense"}, [average[n] for n in self._gradients.names]

    def _take_step(self, pushes: Sequence[Push], average: dict[str, Tensor]) -> Tensor:
        """Apply the average; return its norm."""
        self._set_buffers(min(pushes, key=lambda push: push.member.rank).buffers)
        return self._apply(average)

    def _set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        weights = self.replica.weights() if buffers else {}  # once: it walks the whole model
        for name, buffer in buffers.items():
            weights[name].copy_(buffer)

    def _apply(self, gradients: dict[str, Tensor]) -> Tensor:
        put_gradients(self._trained, gradients)
        return self.replica.apply(scale=1.0)

    def _report(self, pushes: Sequence[Push], *, norm: Tensor, rate: float, staleness: int = 0) -> StepReport:
        samples = sum(push.samples for push in pushes)
        return StepReport(
            loss=mean_loss(pushes),
            grad_norm=norm,
            learning_rate=rate,
            samples=samples,
            tokens=samples * self.tokens_per_sample,
            staleness=staleness,
        )

    def replay(self, commit: Commit) -> None:
        assert isinstance(commit.gradient, Tensor)
        row, shapes, shares = commit.gradient.view(torch.uint8), self._shapes, commit.numbers.get("shares")
        if commit.numbers.get("form", "dense") == "dense":
            size = self._dense_bytes
            average = self._as_sent(_split(row[:size], {n: shapes[n] for n in self._gradients.names}))
        else:
            size = self._gradients.nbytes * len(shares or [1.0])
            average = self._decode_all(row[:size], shares)
            average = average if shares is None else self._as_sent(average)
        self._set_buffers(_split(row[size:], {n: self._buffer_shapes[n] for n in self._buffers.names}))
        self._apply(average)

    def _as_sent(self, average: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the average that is applied: as workers decode it, where it is sent to them."""
        return average

    def _decode_all(self, row: Tensor, shares: Sequence[float] | None) -> dict[str, Tensor]:
        """Decode a recorded average; with `shares`, average the recorded pushes."""
        average: dict[str, Tensor] = {}
        offset = 0
        for number in range(len(shares or [1.0])):
            tensors = self._new_tensors()
            for channel, payload in enumerate(self._gradients.payloads()):
                end = offset + payload.shape[0]
                self._gradients.decode(channel, row[offset:end], tensors)
                offset = end
            average = tensors if shares is None else _add(average, tensors, share=shares[number])
        return average


def send_buckets(
    member: Member,
    kind: Kind,
    step: int,
    payloads: Sequence[Tensor],
    *,
    codec: str = "fp32",
    meta: dict[str, Any] | None = None,
) -> None:
    """Send all buckets, `meta` with the last."""
    for channel, payload in enumerate(payloads):
        message = Message(kind=kind, step=step, channel=channel, epoch=member.epoch, codec=codec, payload=payload)
        if channel == len(payloads) - 1:
            message.meta = meta or {}
        member.link.send(message)


def mean_loss(pushes: Sequence[Push]) -> Tensor:
    return torch.tensor(sum(p.loss * p.count for p in pushes) / (sum(p.count for p in pushes) or 1.0))


def _shares(pushes: Sequence[Push]) -> list[float]:
    total = sum(p.count * p.weight for p in pushes) or 1.0  # 1 where nothing counts: all gradients are zero
    return [p.count * p.weight / total for p in pushes]


def _add(average: dict[str, Tensor], tensors: dict[str, Tensor], *, share: float) -> dict[str, Tensor]:
    """Add in place, into the first: a replay in the same order gives the same bits."""
    if not average:
        return {n: t.mul_(share) for n, t in tensors.items()}
    for name, tensor in average.items():
        tensor.add_(tensors[name], alpha=share)
    return average


def _split(row: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Split a row of float32 bytes into tensors of these shapes."""
    flat, ends = as_numbers(row, torch.float32), accumulate(shape.numel() for shape in shapes.values())
    return {
        name: flat[end - shape.numel() : end].view(shape)
        for (name, shape), end in zip(shapes.items(), ends, strict=True)
    }


def sound(meta: dict[str, Any]) -> bool:
    """Return whether the first message of a push has all its numbers."""
    try:
        float(meta["loss"]), float(meta.get("compute_s", 0.0))
        count = float(meta.get("count", 0.0))
        return isinstance(meta["samples"], int) and 0 < meta["samples"] < 2**31 and 0 <= count < 2**53
    except (KeyError, TypeError, ValueError):
        return False
