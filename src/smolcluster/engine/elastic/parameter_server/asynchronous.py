"""The asynchronous parameter server: it takes each push as it arrives and weighs it by its staleness."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.codecs import CodecError, Feedback
from smolcluster.comm.elastic.membership.roster import Member, MemberGone, MemberMessage
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.compute.optim import adamw_denominator_means, is_adamw
from smolcluster.engine.elastic.balance import EQUAL_WITHIN, MAX_FACTOR, share_out
from smolcluster.engine.elastic.parameter_server.base import ParameterServer, Push, send_buckets
from smolcluster.engine.elastic.parameter_server.pushed_rounds import PackedModel
from smolcluster.strategies.base import Context
from smolcluster.strategies.base.replicated import Pushing

LEASES_AHEAD = 2  # the step that a worker computes, and the next
MAX_UNREAD = 8  # times the weights: unread bytes of a worker that pulls, before it is evicted


class AsynchronousServer(ParameterServer):
    leases_ahead = LEASES_AHEAD

    def __init__(self, context: Context, strategy: Pushing[Any], *, tokens_per_sample: int = 1) -> None:
        super().__init__(context, strategy, tokens_per_sample=tokens_per_sample)
        self._waiting: dict[tuple[Member, int], Push] = {}  # by member and its step
        self._samples = 0  # in self._waiting
        self._wanted: tuple[int, int] = (-1, 0)  # the roster's epoch, and the samples that make an update in it
        self._rejected: set[Member] = set()  # refused since the last gradient was accepted
        self._changes, self._feedback = PackedModel(self.replica, strategy.options).changes, Feedback()
        self._counted: dict[Member, int] = {}  # the last of its own steps that is in the weights

    def _first_step(self, member: Member) -> int:
        """Return the next of its own steps, also for one that was paused."""
        return member.step + 1

    def serve(self) -> None:
        self.wait_for_workers()
        while self.replica.updates < self.context.total_steps and not self.context.stop_requested():
            self._welcome()
            event = self._roster.get(0.1)
            if isinstance(event, MemberGone):
                self._gone(event)
                self._counted.pop(event.member, None)
                self._waiting = {key: push for key, push in self._waiting.items() if push.member is not event.member}
                self._samples = sum(push.samples for push in self._waiting.values())
            elif isinstance(event, MemberMessage) and event.message.kind is Kind.PULL:
                self._send_weights(event.member)
            elif isinstance(event, MemberMessage) and event.message.kind is Kind.PUSH:
                self._answer(event)
            if self._update_is_due():
                self._update(list(self._waiting.values()))
                self._waiting, self._samples = {}, 0

    def _answer(self, event: MemberMessage) -> None:
        """Take or refuse a push; either way send its worker the next lease."""
        member, step, refused = event.member, event.message.step, self.stale_rejected
        if (member, step) in self._waiting:
            self._roster.evict(member, f"it pushed its step {step} twice")
            return
        push = self._arrived(event)
        answer: dict[str, object] = {}
        if push is not None:
            version = push.meta.get("version")
            if not isinstance(version, int) or not 0 <= version <= self.replica.updates:
                self._roster.evict(member, f"it pushed a gradient of the unknown version {version!r}")
                return
            staleness = self.replica.updates - version
            weight = self.strategy.weight_of(staleness)
            if weight is None:
                self.refuse(
                    member, step, f"it is {staleness} versions old, which exceeds the staleness bound", again=True
                )
            else:
                push.weight = weight
                push.extra["staleness"] = answer["staleness"] = staleness
                self._waiting[member, step] = push
                if member.step:  # the first step warms up
                    compute_s = float(push.meta.get("compute_s", 0.0))
                    self.note_speed(member, samples=push.samples, compute_s=compute_s, fixed_s=None)
                self._samples += push.samples
                self._rejected.clear()
        if self.stale_rejected > refused:
            answer["refused"] = True
            if push is None:
                self._count_rejection(member)
        elif push is None:
            return  # incomplete
        member.step = max(member.step, step)
        answer["scale"] = self.server_context.scale.state_dict()
        answer["leases"] = [self.grant_lease(member, step + LEASES_AHEAD)]
        member.link.send(Message(kind=Kind.ACK, step=step, epoch=member.epoch, meta=answer))

    def _share_out(self) -> dict[Member, int]:
        """Share out by speed, within bounds; machines of similar speed take equal shares, since measurements vary.

        At least two samples each, which batch normalization needs, and no more than `MAX_FACTOR` batches.
        """
        automatic = [member for member in self._roster.in_order() if member.automatic]
        known = [member.speed for member in automatic if member.speed > 0]
        unit = self.context.config.training.grad_accumulation
        total = sum(member.batch_size for member in automatic)
        if not (self.strategy.options.balanced and known) or total % unit or total < unit * len(automatic):
            return {}
        median = statistics.median(known)
        speeds = [min(max(member.speed or median, median / MAX_FACTOR), median * MAX_FACTOR) for member in automatic]
        if max(speeds) <= EQUAL_WITHIN * min(speeds):
            return {}
        shares = zip(automatic, share_out(total, speeds, unit=unit), strict=True)
        return {
            m: min(max(share, 2 * unit), MAX_FACTOR * m.batch_size) for m, share in shares if m.batch_size >= 2 * unit
        }

    def _count_rejection(self, member: Member) -> None:
        """Count a failed attempt at the next step when every worker was refused and nothing was accepted between."""
        self._rejected.add(member)
        if self._rejected.issuperset(self._roster.members.values()):
            self._rejected.clear()
            self.gate.count_failed_attempt(self.replica.updates + 1)

    def _update_is_due(self) -> bool:
        """Return whether an update is due: with a global batch, or a push of every worker, as shares may have changed."""
        if self._wanted[0] != self._roster.epoch:
            members = self._roster.members.values()
            self._wanted = self._roster.epoch, self.strategy.server_batch or sum(m.batch_size for m in members)
        if not self._waiting:
            return False
        everyone = {member for member, _ in self._waiting}.issuperset(self._roster.members.values())
        return self._samples >= self._wanted[1] or (everyone and self.strategy.server_batch is None)

    def _update(self, pushes: Sequence[Push]) -> None:
        rate = self.replica.learning_rate
        average = self._average(pushes)
        self._record(pushes, average)
        before = {n: p.detach().clone() for n, p in self._trained.items()} if self.strategy.announces else {}
        norm = self._take_step(pushes, average)
        if before:
            self._counted |= {p.member: max(p.step, self._counted.get(p.member, 0)) for p in pushes}
            change = {n: torch.sub(self._trained[n].detach(), old, out=old) for n, old in before.items()}
            self._announce(change, norm=float(norm))
        staleness = round(sum(p.extra["staleness"] for p in pushes) / len(pushes))
        self.server_context.committed(self._report(pushes, norm=norm, rate=rate, staleness=staleness))

    def _announce(self, change: Mapping[str, Tensor], *, norm: float) -> None:
        """Send all members the change of the weights in this step, except to those that do not keep up: they pull."""
        step = self.replica.updates
        try:
            payloads = [payload for _, payload in self._changes.encode(change, key=step, feedback=self._feedback)]
        except CodecError:  # not finite: nothing to follow
            self._feedback = Feedback()
            return
        optimizer = self.replica.optimizer
        denominators = adamw_denominator_means(self._trained, optimizer) if is_adamw(optimizer) else []
        update: dict[str, object] = {"workers": len(self._roster.members), "norm": norm if math.isfinite(norm) else 0.0}
        update |= {"denominators": [float(f"{mean:.4g}") for mean in denominators]}
        for member in self._roster.members.values():
            if member.link.queued_bytes <= self._weights.nbytes + 2**20:
                meta = {"counted": self._counted.get(member, 0), **update}
                send_buckets(member, Kind.AVERAGE, step, payloads, codec=self._changes.codec.name, meta=meta)

    def _send_weights(self, member: Member) -> None:
        if member.link.queued_bytes > MAX_UNREAD * self._weights.nbytes + 2**20:
            self._roster.evict(member, "it requests the weights repeatedly without reading them")
            return
        step, epoch = self.replica.updates, member.epoch
        for channel, payload in self._weights.encode(self.replica.weights()):  # sent while the next is encoded
            member.link.send(Message(kind=Kind.WEIGHTS, step=step, channel=channel, epoch=epoch, payload=payload))
