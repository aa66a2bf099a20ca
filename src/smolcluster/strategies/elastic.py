"""What members and servers do on the elastic plane, whatever the strategy: a worker's line to its server, the server's office.

A worker that joins, or comes back, gets the weights, the optimizer state and a lease of samples, and takes part from a step
boundary on.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from smolcluster.comm.elastic.handshake import MAX_REASON, printable
from smolcluster.comm.elastic.line import Lease, Line, Stopped
from smolcluster.comm.elastic.messages import Kind, Message
from smolcluster.comm.elastic.roster import Member, Roster
from smolcluster.compute.balance import share_out, smoothed
from smolcluster.compute.gate import GradientGate
from smolcluster.compute.replica import Replica
from smolcluster.strategies.base import Commit, Context, Office, OptionsT, State
from smolcluster.strategies.replicated import Replicated, replica_state
from smolcluster.tasks.base import Task

MUSTER_S = 60.0  # a start waits so long for the last worker
LEAST_S, MOST_S = 1e-6, 1e6  # what a member may say that a step took it
ALL_TOLD = 100  # refusals of a worker that are all logged; of further ones the 128th, the 256th, ...
RETURN_S = 3.0  # a restarted server waits so long for those it knew


class MemberSide(ABC):
    """What a worker does for its membership: hear the server, take over its state, take leases."""

    context: Context
    replica: Replica

    @abstractmethod
    def load_state(self, state: State) -> None: ...

    def enrol(self) -> None:
        """Once, before the line is used."""
        self._over = False  # the server has said so
        self._epoch = 0  # of my welcome
        self.replica.led = True
        state_bytes = sum(t.nbytes for t in self.replica.weights().values())
        self._line.allow(Kind.STATE, most_bytes=8 * state_bytes + 2**20)

    @property
    def _line(self) -> Line:
        assert self.context.line is not None
        return self.context.line

    def introduction(self) -> dict[str, Any]:
        """What this worker says of itself when it joins, beside its rank and its model."""
        return {}

    def _hear(self, message: Message) -> None:
        """Act on one message of the server. Strategies add their own kinds."""
        if message.kind is Kind.WELCOME:
            self._enter(message)
        elif message.kind is Kind.STOP:
            self._over = True
        self._use_scale(message)

    def _use_scale(self, message: Message) -> None:
        """The loss scale is the server's to change: all members use the one that it sent last."""
        if self.replica.scale is not None and self.replica.led and "scale" in message.meta:
            self.replica.scale.load_state_dict(message.meta["scale"])

    def _enter(self, welcome: Message) -> None:
        """Take part from here on, with the server's state."""
        self._epoch = welcome.epoch
        names = welcome.meta.get("state")
        if names is None:
            return
        tensors = self._line.state(names)
        if tensors is not None:  # or the line was lost again, and another welcome follows
            self.load_state(unpack_state(tensors, welcome.meta["numbers"]))

    def lease(self) -> Lease | None:
        """Return what this worker reads next; None when the run is over."""
        while not self._over:
            self._check_stop()
            message = self._line.get(0)
            if message is None and self._line.leases:
                return self._line.leases.popleft()
            message = message or self._line.get()
            if message is not None:
                self._hear(message)
        return None

    def _check_stop(self) -> None:
        if self.context.stop_requested():
            raise Stopped


class ServerSide(ABC):
    """What a server or coordinator does for its members: muster, lend samples, refuse gradients."""

    context: Context
    replica: Replica
    stale_rejected: int
    tokens_per_sample: int

    def open_office(self) -> None:
        """Once, before anybody joins."""
        self.gate = GradientGate()
        self.stale_rejected = 0
        self.replica.led = True
        if self.replica.scale is not None:
            self.replica.scale = self.office.scale  # what is saved, and handed to newcomers

    @abstractmethod
    def serve(self) -> None:
        """Return when the run is over."""

    @abstractmethod
    def replay(self, commit: Commit) -> None:
        """Do a committed step again, after a restart."""

    @property
    def office(self) -> Office:
        assert self.context.office is not None
        return self.context.office

    @property
    def _roster(self) -> Roster:
        return self.office.roster

    def muster(self) -> None:
        """Wait for the workers that are expected; after a while go on with those that came."""
        patience_s = MUSTER_S if self.office.fresh else RETURN_S
        deadline: float | None = None
        while len(self._roster.newcomers) < self.office.expected and not self.context.stop_requested():
            if self._roster.newcomers and deadline is None:
                deadline = time.monotonic() + patience_s
            if deadline is not None and time.monotonic() > deadline:
                break
            self._roster.get(0.1)

    def copied_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies: they are on their way while training goes on."""
        state = replica_state(self.replica)
        return {n: t.to("cpu", copy=True).contiguous() for n, t in pack_state(state).items()}, state.numbers

    def lend(self, member: Member, step: int, *, steps: int = 1) -> dict[str, Any]:
        """Grant the samples of a round of so many steps, which ends with `step`."""
        ranges = self.office.leases.grant(member.instance, step, self._batch_size(member) * steps)
        return {"step": step, "steps": steps, "ranges": [list(r) for r in ranges]}

    def _batch_size(self, member: Member) -> int:
        """What the member said, or its share by speed of what all automatic members have together."""
        automatic = [m for m in self._roster.in_order() if m.automatic]
        total, unit = sum(m.batch_size for m in automatic), self.context.config.training.grad_accumulation
        if member not in automatic or any(m.speed == 0 for m in automatic) or total % unit:
            return member.batch_size
        speeds, fixed_s = [m.speed for m in automatic], [m.fixed_s for m in automatic]
        return share_out(total, speeds, fixed_s, unit=unit)[automatic.index(member)]

    def note_speed(self, member: Member, *, samples: int, compute_s: float, fixed_s: float | None) -> None:
        """`fixed_s`: what its step took beside computing, up to its gradient; None: not known this time."""
        if samples > 0 and LEAST_S < compute_s < MOST_S:
            member.speed = smoothed(member.speed, samples / compute_s)
            if fixed_s is not None and fixed_s < MOST_S:
                member.fixed_s = smoothed(member.fixed_s, max(0.0, fixed_s))

    def refuse(self, member: Member, step: int, reason: str, *, again: bool = False, scale: object = None) -> None:
        """Refuse a gradient. Its samples are set aside: the next worker that tried them might fail in the same way.

        They are leased again where they are not the cause: with `again`, when this member alone is refused again and again,
        or when the loss scale was too high, which is then lowered for all. `scale` is the one that the worker reports for a
        gradient that is not finite.
        """
        before = self.office.scale.value
        if self.office.scale.overflowed(member.instance, scale):
            reason, again = f"it overflowed in fp16 at loss scale {scale:g}", True
        if self.office.scale.value < before:
            self.gate.start_over()
        again = again or self.gate.refused(member.instance)
        reason = printable(reason, limit=MAX_REASON)  # it may quote what the worker sent
        self.stale_rejected += 1
        self._roster.refused[member.name] += 1
        count = self._roster.refused[member.name]
        if count <= ALL_TOLD or count & (count - 1) == 0:  # a worker that is refused without end does not fill the log
            times = f" ({count} times by now)" if count > ALL_TOLD else ""
            self.context.warn(f"the gradient of {member.name} for step {step} is refused: {reason}{times}")
        self.gate.last_refusal = f"the last, of {member.name}: {reason}"
        put = self.office.leases.give_back if again else self.office.leases.set_aside
        put(member.instance, step)


class Elastic(Replicated[OptionsT], MemberSide, ServerSide):
    """A strategy with a parameter server: the worker's part and the server's in one class."""

    leases_ahead: ClassVar[int] = 1

    def setup(self, task: Task) -> None:
        super().setup(task)
        self.tokens_per_sample = task.tokens_per_sample
        if self.context.office is not None:
            self.open_office()
        else:
            self.enrol()


def send_state(member: Member, tensors: dict[str, Tensor], *, step: int, epoch: int, meta: dict[str, Any]) -> None:
    """A welcome, and the state that it announces."""
    meta = {"state": list(tensors), **meta}
    member.link.send(Message(kind=Kind.WELCOME, step=step, epoch=epoch, meta=meta))
    for channel, tensor in enumerate(tensors.values()):
        member.link.send(Message(kind=Kind.STATE, step=step, channel=channel, epoch=epoch, payload=tensor))


def pack_state(state: State) -> dict[str, Tensor]:
    """Weights, optimizer state and what all ranks share: `w/<name>`, `o/<name>`, `s/<name>`."""
    kinds = {"w": state.weights, "o": state.optimizer, "s": state.shared}
    return {f"{kind}/{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}


def unpack_state(tensors: dict[str, Tensor], numbers: dict[str, Any]) -> State:
    return State(
        weights={n[2:]: t for n, t in tensors.items() if n.startswith("w/")},
        optimizer={n[2:]: t for n, t in tensors.items() if n.startswith("o/")},
        shared={n[2:]: t for n, t in tensors.items() if n.startswith("s/")},
        numbers=numbers,
    )
