"""Newcomers that get the state while the others train.

A state takes long on a slow link. So a newcomer is no member yet while it gets one: it follows.

    members          coordinator                                          newcomer
            <-- PULL asks one of them for its state, between two rounds
    STATE   -------> passes it on                        WELCOME, STATE --> loads it
            <-- COMMIT(s), which asks for its result
    STATE   -------> keeps round s: each member sends a share of it
                     when its link is free           STATE, COMMIT(s) --> applies round s, as the members did
                     when nothing is left                        VIEW --> takes part

What the coordinator keeps is bounded. A newcomer comes nearer as long as a round takes longer than its result takes to
get there. When only the last rounds are left, or when there are so many that it never comes nearer, the coordinator commits
nothing until they are through: only then do the others wait.

When a member is lost whose share of a kept round has not come, everybody who follows begins again with another state.
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

NEAR_BYTES = 1 << 20  # what the others may wait for at any time
MOST_KEPT = 4  # times the weights, in results that are kept: a state has three, so one that comes nearer needs no more


@dataclass(slots=True)
class Round:
    """A committed round whose result is on its way."""

    step: int
    meta: dict[str, Any]  # of its COMMIT
    missing: set[int]  # ranks whose share has not come
    shares: list[Message] = field(default_factory=list)
    nbytes: int = 0


class Followers:
    def __init__(self, *, weights_bytes: int, warn: Callable[[str], None]) -> None:
        self._at: dict[Member, int | None] = {}  # the last step of each that has left for it; None: it needs a state
        self._kept: dict[int, Round] = {}  # by their last steps, in order
        self._since = 0  # rounds after this step are kept
        self._round_bytes = weights_bytes  # of a result: of the last that came, or at most
        self._most_bytes, self._warn = MOST_KEPT * weights_bytes, warn
        self._waited_for: set[Member] = set()

    def __bool__(self) -> bool:
        return bool(self._at)

    def __contains__(self, member: Member) -> bool:
        return member in self._at

    def follow(self, members: Iterable[Member], *, committed: int) -> None:
        """These follow from now on, and no others."""
        before, self._at = self._at, {member: self._at.get(member) for member in members}
        self._waited_for &= self._at.keys()
        if not before or not self._at:
            self._begin(committed)
        for member in self._at.keys() - before.keys():
            log.info("%s gets the state while the others train", member.name)

    def _begin(self, committed: int) -> None:
        self._kept.clear()
        self._since = committed

    def lost(self, rank: int, *, committed: int) -> None:
        """A member is gone, perhaps with its share of a result."""
        if any(rank in kept.missing for kept in self._kept.values()):
            log.info("worker %d was lost with a part of a result: who follows gets another state", rank)
            self._begin(committed)
            self._at = dict.fromkeys(self._at)

    # What comes

    def committed(self, step: int, meta: dict[str, Any], ranks: Iterable[int]) -> None:
        """A round counts. These members send its result, unless there is none."""
        if self._at:
            members = list(ranks)
            self._kept[step] = Round(step, {**meta, "members": len(members)}, set(members if meta["weight"] else ()))

    def take(self, member: Member, message: Message) -> str | None:
        """Keep a part of a result; return what is wrong with it."""
        kept = self._kept.get(message.step)
        if kept is None or member.rank not in kept.missing:
            return None  # nobody needs it any more
        if message.payload is not None:
            kept.shares.append(message)
            kept.nbytes += message.payload.nbytes
        if message.meta["share"] == "last":
            kept.missing.discard(member.rank)
            self._round_bytes = self._round_bytes if kept.missing else kept.nbytes
        return f"its share of step {kept.step} has no end" if kept.nbytes > self._most_bytes + NEAR_BYTES else None

    # What leaves

    @property
    def lack_state(self) -> bool:
        return None in self._at.values()

    def can_start(self, step: int) -> bool:
        """Whether all rounds after this step are kept."""
        return step >= self._since

    def start(self, tensors: dict[str, Tensor], meta: Mapping[str, Any], *, step: int, epoch: int) -> None:
        """Send a state to all that have none."""
        for member in [member for member, at in self._at.items() if at is None]:
            send_state(member, tensors, step=step, epoch=epoch, meta=dict(meta))
            self._at[member] = step

    def send(self, *, epoch: int) -> None:
        """Give each link that is free the next rounds."""
        for member, at in self._at.items():
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
        reached = [at for at in self._at.values() if at is not None]
        if len(reached) == len(self._at) and reached:
            self._since = max(self._since, min(reached))
            self._kept = {step: kept for step, kept in self._kept.items() if step > self._since}

    def is_current(self, member: Member, *, committed: int) -> bool:
        """Whether everything up to this step has left for it."""
        return self._at.get(member) == committed and member.link.queued_bytes <= NEAR_BYTES

    def waits(self) -> bool:
        """Whether the others wait now: for little, or because more would follow for ever."""
        if sum(map(self._bytes_of, self._kept.values())) > self._most_bytes:
            for member in self._at.keys() - self._waited_for:
                self._warn(f"{member.name} gets the state more slowly than the others train: they wait for it")
            self._waited_for |= self._at.keys()
            return True
        return any(at is not None and self._left_bytes(member, at) <= NEAR_BYTES for member, at in self._at.items())

    def _left_bytes(self, member: Member, at: int) -> int:
        left = [kept for kept in self._kept.values() if kept.step > at]
        return member.link.queued_bytes + sum(map(self._bytes_of, left))

    def _bytes_of(self, kept: Round) -> int:
        return max(kept.nbytes, self._round_bytes) if kept.missing else kept.nbytes
