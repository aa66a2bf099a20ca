"""The synchronous parameter server: a step averages the gradients of all members, or of those that arrive before its timeout.

Stragglers: see `strategies/syncps.py`. A newcomer gets the state, and the averages since, while the others train; it starts a
step when it has read them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from smolcluster.comm.codecs import CodecError, Feedback
from smolcluster.comm.codecs.feedback import under
from smolcluster.comm.elastic.membership.roster import Member, MemberGone, MemberMessage
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.engine.elastic.parameter_server.base import ParameterServer, Push, send_buckets, sound
from smolcluster.strategies.base import Context
from smolcluster.strategies.base.replicated import Pushing

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Late:
    """A gradient that missed its step and has not arrived yet."""

    step: int
    due: float  # the deadline of its step, on the clock of time.monotonic
    samples: int  # of its lease
    sent: float | None  # when its lease was sent, on the clock of time.perf_counter
    compute_s: float = 0.0


class SynchronousServer(ParameterServer):
    def __init__(self, context: Context, strategy: Pushing[Any], *, tokens_per_sample: int = 1) -> None:
        super().__init__(context, strategy, tokens_per_sample=tokens_per_sample)
        self._average_feedback = Feedback() if self._gradients.codec.feedback else None
        self._codec_prefix = f"codec/{self._gradients.codec.name}/"
        self._lagging: set[Member] = set()  # with unread data; they get no more
        self._late: dict[Member, Late] = {}  # still compute a step that is over
        self._idle: set[Member] = set()  # wait for the next step
        self._joining: set[Member] = set()  # newcomers that have not read the state yet
        self._stragglers: set[Member] = set()  # not waited for
        self._sent: dict[Member, float] = {}  # receivers of the last average, and when it was sent

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return the error feedback of the averages."""
        if self._average_feedback is None:
            return {}
        feedback = self._average_feedback.state_dict()
        return {f"{self._codec_prefix}{name}": tensor for name, tensor in feedback.items()}

    def load_shared(self, tensors: Mapping[str, Tensor]) -> None:
        if self._average_feedback is not None:
            self._average_feedback.load_state_dict(under(self._codec_prefix, tensors))

    def serve(self) -> None:
        self.wait_for_workers()
        while self.replica.updates < self.context.total_steps and not self.context.stop_requested():
            step = self.replica.updates + 1
            self._welcome()
            pushes = self._collect(step)
            if not pushes:
                continue  # no member is left, or a stop was requested
            average = self._average(pushes)
            try:
                encoded, sent = self._encode_average(average)
            except CodecError as error:
                if self._average_feedback is not None:
                    self._average_feedback.undo()
                self._retry_step(step, f"the average cannot be encoded: {error}")
                continue
            rate = self.replica.learning_rate
            # With error feedback record the average itself: a replay must restore the feedback too.
            self._record(pushes, average, encoded=encoded if self._average_feedback is None else None)
            reached = self._send_average(step, encoded, counted=[push.member.rank for push in pushes])
            norm = self._take_step(pushes, sent)  # while workers receive the average
            self._send_weights(step, reached)
            self._resync()
            self.server_context.committed(self._report(pushes, norm=norm, rate=rate))

    def _collect(self, step: int) -> list[Push]:
        """Return the gradients of this step in rank order: of all members, or of those in time; [] on a stop request."""
        arrived: dict[int, Push] = {}
        done: set[Member] = set()  # have pushed, also a gradient that was refused
        deadline: float | None = None
        key: tuple[int, ...] = ()
        while not self.context.stop_requested():
            if key != (key := self._membership_key()):  # rarely
                present = self._present()
                awaited = present - self._stragglers or present
            if arrived and (done >= awaited or (deadline and time.monotonic() >= deadline)):
                break
            if not present:  # no member holds a lease of this step
                self._resync((self._idle | self._joining) - self._lagging)
                self._welcome()
            elif not arrived and done >= present:  # all were refused
                done.clear()
                self._retry_step(step, "")
                self._welcome()
            wait_s = 0.1 if deadline is None else max(0.0, min(0.1, deadline - time.monotonic()))
            event = self._roster.get(wait_s or 0.001)
            if isinstance(event, MemberGone):
                self._gone(event)
                done.discard(event.member)
                arrived = {rank: push for rank, push in arrived.items() if push.member is not event.member}
                deadline = deadline if arrived else None
            elif isinstance(event, MemberMessage) and event.message.kind is Kind.PUSH:
                if (known := arrived.get(event.member.rank)) is not None and known.member is event.member:
                    self._reject_duplicate_push(event, step)
                    continue
                push = self._take_push(step, event, done)
                if push is not None:
                    arrived[push.member.rank] = push
                    deadline = deadline or time.monotonic() + self.strategy.collect_timeout
        else:
            return []  # a stop was requested
        assert deadline is not None
        missing = self._present() - done
        for member in filter(missing.__contains__, self._roster.in_order()):
            self._mark_straggler(member, step, due=deadline)
        return [arrived[rank] for rank in sorted(arrived)]

    def _membership_key(self) -> tuple[int, ...]:
        """Return numbers that change whenever the set of present or awaited members changes."""
        return self._roster.epoch, *map(len, (self._lagging, self._joining, self._idle, self._late, self._stragglers))

    def _present(self) -> set[Member]:
        """Return the members that hold a lease of the current step, or have pushed its gradient."""
        out = self._lagging | self._joining | self._idle | self._late.keys()
        return {member for member in self._roster.members.values() if member not in out}

    def _gone(self, gone: MemberGone) -> None:
        super()._gone(gone)
        self._reset_member(gone.member)
        self._lagging.discard(gone.member)
        self._stragglers.discard(gone.member)

    def _first_waits(self) -> bool:
        """Return True while others train: they need not wait for newcomers."""
        waits = bool(self._present())
        self._joining.update(self._roster.newcomers if waits else ())
        return waits

    def _reset_member(self, member: Member) -> None:
        """Clear the late, idle and joining states of a member."""
        self._joining.discard(member)
        self._late.pop(member, None)
        self._idle.discard(member)

    # Stragglers

    def _mark_straggler(self, member: Member, step: int, *, due: float) -> None:
        samples = sum(r.count for r in self.server_context.leases.release(member.instance, step))
        self._late[member] = late = Late(step=step, due=due, samples=samples, sent=self._sent.get(member))
        if member not in self._stragglers:
            self._stragglers.add(member)
            self.context.warn(
                f"{member.name} is late with step {step}: the server waits for it again once it delivers in time"
            )
        partial = self._pushes.pop((member.rank, step), None)
        if partial is not None:  # the rest arrives too late
            late.compute_s = float(partial.meta.get("compute_s", 0.0))
            self._reject_late(member, step)

    def _take_late(self, member: Member, message: Message) -> None:
        """Handle a bucket of a step that is over."""
        if message.channel == 0 and "skip" not in message.meta:
            self._reject_late(member, message.step)
        late = self._late.get(member)
        if late is None or late.step != message.step:
            return
        if message.channel == 0 and sound(message.meta) and message.meta["samples"] == late.samples:
            late.compute_s = float(message.meta.get("compute_s", 0.0))
        if "skip" not in message.meta and message.channel < len(self._gradients) + len(self._buffers) - 1:
            return  # not the last bucket
        del self._late[member]
        self._idle.add(member)
        fixed_s = time.perf_counter() - late.sent - late.compute_s if late.sent is not None else None
        self.note_speed(member, samples=late.samples, compute_s=late.compute_s, fixed_s=fixed_s)
        if time.monotonic() <= late.due:
            self._clear_straggler(member)

    def _clear_straggler(self, member: Member) -> None:
        if member in self._stragglers:
            self._stragglers.discard(member)
            log.info("%s delivers in time again", member.name)

    def _reject_duplicate_push(self, event: MemberMessage, step: int) -> None:
        """Release a further push of a member whose gradient is complete; evict it for a second one of this step."""
        if event.message.payload is not None:
            self._roster.release(event.message.payload)
        if event.message.step == step and event.message.epoch == event.member.epoch:
            self._roster.evict(event.member, f"it pushed step {step} twice")

    def _take_push(self, step: int, event: MemberMessage, done: set[Member]) -> Push | None:
        member, message = event.member, event.message
        if message.step != step:
            if message.payload is not None:
                self._roster.release(message.payload)
            if message.epoch == member.epoch:
                self._take_late(member, message)
            return None
        refused = self.stale_rejected
        push = self._arrived(event)
        if push is not None or self.stale_rejected > refused:
            done.add(member)
            self._clear_straggler(member)
        if push is not None:
            compute_s = float(push.meta.get("compute_s", 0.0))
            sent = self._sent.get(member)
            fixed_s = time.perf_counter() - sent - compute_s if sent is not None else None
            self.note_speed(member, samples=push.samples, compute_s=compute_s, fixed_s=fixed_s)
        return push

    def _reject_late(self, member: Member, step: int) -> None:
        self.stale_rejected += 1
        member.link.send(Message(kind=Kind.ACK, step=step, meta={"refused": "late"}))

    def _retry_step(self, step: int, why: str) -> None:
        """Restart a step in which no gradient counted: send all members the state and a new lease."""
        members = [member for member in self._roster.in_order() if member not in self._lagging]
        if members:
            self.gate.count_failed_attempt(step)
        self._sent.clear()
        state, numbers = self.copied_state()
        for member in members:
            if step in self.server_context.leases.held(member.instance):
                self.refuse(member, step, why)
            self._renew(member)
        for member in members:
            self._send_state(member, state, numbers, leases=[self.grant_lease(member, step)])

    def _renew(self, member: Member) -> None:
        """Discard what a member has pushed of this step, and what is still in transit."""
        self._reset_member(member)
        self._roster.renew(member)
        self._pushes.pop((member.rank, self.replica.updates + 1), None)

    def _encode_average(self, average: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the payloads for the workers, and the tensors that they will decode."""
        key = self.replica.updates + 1
        encoded = [p for _, p in self._gradients.encode(average, key=key, feedback=self._average_feedback)]
        if self._average_feedback is not None:
            self._average_feedback.commit()
        if self._gradients.codec.lossless:
            return encoded, average
        sent = self._scratch or self._new_tensors()
        for channel, payload in enumerate(encoded):
            self._gradients.decode(channel, payload, sent)
        return encoded, sent

    def _as_sent(self, average: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._encode_average(average)[1]

    def _send_average(self, step: int, encoded: Sequence[Tensor], *, counted: Sequence[int]) -> list[Member]:
        """Send the average and the next lease to all members that do not lag."""
        reached = [member for member in self._roster.in_order() if self._can_send(member)]
        for member in reached:
            meta: dict[str, object] = {"counted": counted, "scale": self.server_context.scale.state_dict()}
            if member.link.queued_bytes <= self._gradients.nbytes:  # it has read all but the last average
                self._joining.discard(member)
            if step < self.context.total_steps and member not in self._late and member not in self._joining:
                meta["leases"] = [self.grant_lease(member, step + 1)]
                self._idle.discard(member)
            send_buckets(member, Kind.AVERAGE, step, encoded, codec=self._gradients.codec.name, meta=meta)
        self._sent = dict.fromkeys(reached, time.perf_counter())
        return reached

    def _send_weights(self, step: int, members: Sequence[Member]) -> None:
        if step % self.strategy.options.worker_update_interval == 0:
            weights = [payload for _, payload in self._weights.encode(self.replica.weights())]
            for member in members:
                send_buckets(member, Kind.WEIGHTS, step, weights)

    def _can_send(self, member: Member) -> bool:
        """Return whether a member can be sent more data: not with several steps unread."""
        if member in self._lagging:
            return False
        if member.link.queued_bytes > 4 * (self._gradients.nbytes + self._weights.nbytes):
            self._lagging.add(member)
            return False
        return True

    def _resync(self, others: Iterable[Member] = ()) -> None:
        """Send the state and a lease to members that lagged and have read everything, and to `others`."""
        for member in [*(member for member in self._lagging if member.link.queued_bytes == 0), *others]:
            self._lagging.discard(member)
            self._renew(member)
            state, numbers = self.copied_state()
            self._send_state(member, state, numbers, leases=[self.grant_lease(member, self.replica.updates + 1)])
