"""What a server or coordinator does for its members under every strategy: wait for them, grant leases, refuse gradients."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from smolcluster.comm.elastic.membership.received_state import slice_messages
from smolcluster.comm.elastic.membership.roster import Member, Roster
from smolcluster.comm.elastic.transport.handshake import MAX_REASON, printable
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.compute.replica import Replica
from smolcluster.engine.elastic.balance import share_out, smoothed
from smolcluster.engine.elastic.gradient_gate import GradientGate
from smolcluster.strategies.base import Commit, Context, ServerContext
from smolcluster.strategies.base.replicated import replica_state

START_WAIT_S = 60.0  # for the remaining workers, after the first has joined
LEAST_S, MOST_S = 1e-6, 1e6  # step times beyond these are ignored
MAX_LOGGED_REFUSALS = 100  # per worker; of further refusals only the 128th, the 256th, ... are logged
RECONNECT_S = 3.0  # how long a restarted server waits for its workers to reconnect


class ServerSide(ABC):
    def __init__(self, context: Context, replica: Replica, *, tokens_per_sample: int = 1) -> None:
        self.context, self.replica, self.tokens_per_sample = context, replica, tokens_per_sample
        self.gate = GradientGate()
        self.stale_rejected = 0
        self._shares: tuple[int, dict[Member, int]] | None = None  # the roster's epoch, and the batch sizes in it
        self.replica.led = True
        if self.replica.scale is not None:
            self.replica.scale = self.server_context.scale  # it is saved, and sent to newcomers

    @abstractmethod
    def serve(self) -> None:
        """Return when the run is over."""

    @abstractmethod
    def replay(self, commit: Commit) -> None:
        """Apply a recorded step again, after a restart."""

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return the tensors of `State.shared` that this process holds."""
        return {}

    def load_shared(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Restore what `shared_state` returned."""

    @property
    def server_context(self) -> ServerContext:
        assert self.context.server_context is not None
        return self.context.server_context

    @property
    def _roster(self) -> Roster:
        return self.server_context.roster

    def wait_for_workers(self) -> None:
        """Wait for the expected workers; after a timeout start with those that joined."""
        timeout_s = START_WAIT_S if self.server_context.fresh else RECONNECT_S
        deadline: float | None = None
        while len(self._roster.newcomers) < self.server_context.expected and not self.context.stop_requested():
            if self._roster.newcomers and deadline is None:
                deadline = time.monotonic() + timeout_s
            if deadline is not None and time.monotonic() > deadline:
                break
            self._roster.get(0.1)

    def copied_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return a copy of the state on the host, to be sent while training continues."""
        state = replica_state(self.replica)
        return {n: t.to("cpu", copy=True).contiguous() for n, t in state.packed().items()}, state.numbers

    def grant_lease(self, member: Member, step: int, *, steps: int = 1) -> dict[str, Any]:
        """Lease samples for the round of `steps` steps that ends with `step`."""
        ranges = self.server_context.leases.grant(member.instance, step, self._batch_size(member) * steps)
        return {"step": step, "steps": steps, "ranges": [list(r) for r in ranges]}

    def send_leases(self, members: Sequence[Member], rounds: Sequence[tuple[int, int]], *, committed: int) -> None:
        """Lease these rounds, each with its number of steps, to all of the members."""
        leases: dict[Member, list[dict[str, Any]]] = {member: [] for member in members}
        for step, steps in rounds:
            for member, granted in leases.items():
                granted.append(self.grant_lease(member, step, steps=steps))
        for member, granted in leases.items():
            meta = {"leases": granted}
            member.link.send(Message(kind=Kind.LEASE, step=committed, epoch=self._roster.epoch, meta=meta))

    def _batch_size(self, member: Member) -> int:
        """Return the member's fixed batch size, or its share by speed of the total of all automatic members."""
        if not member.automatic:
            return member.batch_size
        if self._shares is None or self._shares[0] != self._roster.epoch:
            self._shares = self._roster.epoch, self._share_out()
        return self._shares[1].get(member, member.batch_size)

    def _share_out(self) -> dict[Member, int]:
        """Share out the total batch of the automatic members by their speeds; {} while a speed is unknown."""
        automatic = [m for m in self._roster.in_order() if m.automatic]
        total, unit = sum(m.batch_size for m in automatic), self.context.config.training.grad_accumulation
        if any(m.speed == 0 for m in automatic) or total % unit:
            return {}
        speeds, fixed_s = [m.speed for m in automatic], [m.fixed_s for m in automatic]
        return dict(zip(automatic, share_out(total, speeds, fixed_s, unit=unit), strict=True))

    def note_speed(
        self, member: Member, *, samples: int, compute_s: float, fixed_s: float | None, steps: int = 1
    ) -> None:
        """Update the measured speed. `fixed_s`: time of these steps other than computing; None: unknown."""
        if samples > 0 and LEAST_S < compute_s < MOST_S:
            self._shares = None
            member.speed = smoothed(member.speed, samples / compute_s, steps=steps)
            if fixed_s is not None and fixed_s < MOST_S:
                member.fixed_s = smoothed(member.fixed_s, max(0.0, fixed_s) / steps, steps=steps)

    def refuse(self, member: Member, step: int, reason: str, *, again: bool = False, scale: object = None) -> None:
        """Refuse a gradient. Its samples are quarantined, since another worker might fail on them too.

        They are released where they are not the cause: with `again`, when only this member is refused repeatedly, or when
        the loss scale was too high, which is then lowered for all. `scale`: what the worker reports for an overflowed gradient.
        """
        before = self.server_context.scale.value
        if self.server_context.scale.overflowed(member.instance, scale):
            reason, again = f"it overflowed in fp16 at loss scale {scale:g}", True
        if self.server_context.scale.value < before:
            self.gate.reset_failed_attempts()
        again = again or self.gate.count_rejection(member.instance)
        reason = printable(reason, limit=MAX_REASON)  # may quote the worker
        self.stale_rejected += 1
        self._roster.refused[member.name] += 1
        count = self._roster.refused[member.name]
        if is_logged(count):
            times = f" ({count} refusals so far)" if count > MAX_LOGGED_REFUSALS else ""
            self.context.warn(f"the gradient of {member.name} for step {step} is refused: {reason}{times}")
        self.gate.last_rejection = f"the last, of {member.name}: {reason}"
        leases = self.server_context.leases
        (leases.release if again else leases.quarantine)(member.instance, step)


def is_logged(count: int) -> bool:
    """Return whether to log the refusal with this number: do not let one worker fill the log."""
    return count <= MAX_LOGGED_REFUSALS or count & (count - 1) == 0


def send_state(member: Member, tensors: dict[str, Tensor], *, step: int, epoch: int, meta: dict[str, Any]) -> None:
    """Send WELCOME and the state that it announces."""
    meta = {"state": len(tensors), **meta}
    member.link.send(Message(kind=Kind.WELCOME, step=step, epoch=epoch, meta=meta))
    for message in slice_messages(tensors, step=step, epoch=epoch):
        member.link.send(message)
