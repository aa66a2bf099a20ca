"""Newcomers that receive the state while the others train.

A state takes long on a slow link. So a newcomer is not a member while it receives one: it follows.

    members          coordinator                                          newcomer
            <-- PULL requests the state of one of them, between two rounds
    STATE   -------> forwards it                         WELCOME, STATE --> loads it
            <-- COMMIT(s), which requests its result
    STATE   -------> keeps round s: each member sends a share of it
                     when its link is free           STATE, COMMIT(s) --> applies round s, as the members did
                     when nothing is left                        VIEW --> becomes a member

The results that the coordinator keeps are bounded. A newcomer catches up as long as a round takes longer than the transfer of
its result. For the last rounds, or when more are kept than the bound, the coordinator holds the next commit until they are
sent: only then do the others wait.

When a member is lost before it has sent its share of a kept round, all followers restart with another state.

A late member (`late_members.py`) follows too. It has the state of the last round that it received; the rounds since are
kept, and sent when it has answered. If they exceed the bound before that, they are dropped, and it gets a state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from smolcluster.comm.elastic.membership.roster import Member
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.engine.elastic.server_side import send_state

log = logging.getLogger(__name__)

NEAR_BYTES = 1 << 20  # a newcomer with no more left to read has caught up
MOST_KEPT = (
    4  # bytes of kept results, in sizes of the weights: a state has three, so a newcomer that catches up needs no more
)


@dataclass(slots=True)
class Round:
    """A committed round whose result is being collected or sent."""

    step: int
    meta: dict[str, Any]  # of its COMMIT
    missing: set[int]  # ranks whose share has not arrived
    shares: list[Message] = field(default_factory=list)
    nbytes: int = 0


class Followers:
    def __init__(self, *, weights_bytes: int, warn: Callable[[str], None]) -> None:
        self._at: dict[Member, int | None] = {}  # the last step sent to each; None: it needs a state
        self._kept: dict[int, Round] = {}  # by their last steps, in order
        self._since = 0  # rounds after this step are kept
        self._round_bytes = weights_bytes  # of the last result, or an upper bound
        self._most_bytes, self._warn = MOST_KEPT * weights_bytes, warn
        self._warned: set[Member] = set()
        self._away: set[Member] = set()  # late members that have not answered: nothing is sent to them

    def __bool__(self) -> bool:
        return bool(self._at)

    def __contains__(self, member: Member) -> bool:
        return member in self._at

    def follow(self, members: Iterable[Member], *, committed: int) -> None:
        """Set the newcomers that follow."""
        before, self._at = self._at, {member: self._at.get(member) for member in members}
        self._warned &= self._at.keys()
        self._away &= self._at.keys()
        if not before or not self._at:
            self._begin(committed)
        for member in self._at.keys() - before.keys():
            log.info("%s receives the state while the others train", member.name)

    def keep_for(self, member: Member, *, committed: int) -> None:
        """Keep the rounds from now on for a late member, which has all earlier ones."""
        if not self._at:
            self._begin(committed)
        self._at[member] = committed
        self._away.add(member)

    def answered(self, member: Member) -> None:
        self._away.discard(member)

    def _begin(self, committed: int) -> None:
        self._kept.clear()
        self._since = committed

    def lost(self, rank: int, *, committed: int) -> None:
        """Restart the followers if a lost member had not sent its share of a result."""
        if any(rank in kept.missing for kept in self._kept.values()):
            log.info("worker %d was lost before it sent its share of a result: newcomers get another state", rank)
            self._begin(committed)
            self._at = {member: None for member in self._at if member not in self._away}

    # Collecting results

    def committed(self, step: int, meta: dict[str, Any], ranks: Iterable[int]) -> None:
        """Keep a committed round, whose result these members send, unless it is empty."""
        if self._at:
            members = list(ranks)
            self._kept[step] = Round(step, {**meta, "members": len(members)}, set(members if meta["weight"] else ()))

    def take(self, member: Member, message: Message) -> str | None:
        """Keep a part of a result. Return why its sender must be evicted, or None."""
        kept = self._kept.get(message.step)
        if kept is None or member.rank not in kept.missing:
            return None  # no longer needed
        if message.payload is not None:
            kept.shares.append(message)
            kept.nbytes += message.payload.nbytes
        if message.meta["share"] == "last":
            kept.missing.discard(member.rank)
            self._round_bytes = self._round_bytes if kept.missing else kept.nbytes
        return f"its share of step {kept.step} has no end" if kept.nbytes > self._most_bytes + NEAR_BYTES else None

    # Sending to newcomers

    @property
    def lack_state(self) -> bool:
        return None in self._at.values()

    def can_start(self, step: int) -> bool:
        """Return whether all rounds after this step are kept."""
        return step >= self._since

    def start(self, tensors: dict[str, Tensor], meta: Mapping[str, Any], *, step: int, epoch: int) -> None:
        """Send a state to all newcomers without one."""
        for member in [member for member, at in self._at.items() if at is None]:
            send_state(member, tensors, step=step, epoch=epoch, meta=dict(meta))
            self._at[member] = step

    def send(self, *, epoch: int) -> None:
        """Send the next rounds on every free link."""
        for member, at in self._at.items():
            if member in self._away:
                continue
            for kept in self._kept.values() if at is not None else ():
                if at is None or kept.step <= at:
                    continue
                if kept.missing or member.link.queued_bytes > NEAR_BYTES:
                    break
                for share in kept.shares:
                    step, channel, payload = kept.step, share.channel, share.payload
                    member.link.send(Message(kind=Kind.STATE, step=step, channel=channel, epoch=epoch, payload=payload))
                member.link.send(Message(kind=Kind.COMMIT, step=kept.step, epoch=epoch, meta=kept.meta))
                self._at[member] = kept.step
        self._prune()

    def _prune(self) -> None:
        """Drop the rounds that all followers have."""
        reached = [at for at in self._at.values() if at is not None]
        if len(reached) == len(self._at) and reached:
            self._since = max(self._since, min(reached))
            self._kept = {step: kept for step, kept in self._kept.items() if step > self._since}

    def is_current(self, member: Member, *, committed: int) -> bool:
        """Return whether everything up to this step is sent, and nearly read."""
        return self._at.get(member) == committed and member.link.queued_bytes <= NEAR_BYTES

    def waits(self) -> bool:
        """Return whether the others wait: for the last bytes of a newcomer, or because it would never catch up."""
        if self._is_full and self._away:
            log.info("the results for members that are late are dropped: too many rounds were committed since")
            self._at = {member: at for member, at in self._at.items() if member not in self._away}
            self._away.clear()
            self._prune()
        if self._at and self._is_full:
            for member in self._at.keys() - self._warned:
                self._warn(f"{member.name} receives the state more slowly than the others train: they wait for it")
            self._warned |= self._at.keys()
            return True
        sent_to = [(member, at) for member, at in self._at.items() if member not in self._away]
        return any(at is not None and self._left_bytes(member, at) <= NEAR_BYTES for member, at in sent_to)

    @property
    def _is_full(self) -> bool:
        return sum(map(self._bytes_of, self._kept.values())) > self._most_bytes

    def _left_bytes(self, member: Member, at: int) -> int:
        left = [kept for kept in self._kept.values() if kept.step > at]
        return member.link.queued_bytes + sum(map(self._bytes_of, left))

    def _bytes_of(self, kept: Round) -> int:
        return max(kept.nbytes, self._round_bytes) if kept.missing else kept.nbytes
