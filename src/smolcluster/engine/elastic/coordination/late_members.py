"""Late members: the others do not wait for them, and their work counts in a later round.

    coordinator                                             a late member
      the deadline of round s has passed, and a quorum of the members has contributed
      WELCOME(late)          ----->                           computing; it reads this when it has ended its round
      VIEW without it: the others combine round s again, and commit it
                             <-----  WAITING(late: s)         its round s is in its error buffer
      STATE, COMMIT(s), ...  ----->                           applies the results since, as a follower
      VIEW with it           ----->                           contributes the error buffer to the current round

The deadline is computed from the time of the last contribution in earlier rounds: their median and their spread. With too few
rounds, or without a quorum, the coordinator waits for all. A member counts for the quorum while its link is open: late members
that are not back yet count as members that have not contributed.

A silent member (a stopped process) is handled in the same way when the roster pauses it, whatever the deadline.

Samples: the lease of a late member is parked, and committed with the round that its work counts in, so each sample counts
once. When its link is lost the lease is released, others read the samples, and the member drops the work.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smolcluster.comm.elastic.membership.roster import Member
from smolcluster.comm.elastic.transport.messages import Kind, Message
from smolcluster.data.leases import Range
from smolcluster.engine.elastic.coordination.followers import Followers
from smolcluster.strategies.base import ServerContext

log = logging.getLogger(__name__)

MIN_ROUNDS = 5
MAX_ROUNDS = 32
NUM_MAD = 6.0  # the deadline is this many median absolute deviations after the median,
MIN_SHARE = 0.5  # at least this share of the median,
VIEW_CHANGE_S = 1.0  # and at least the cost of a view change
STOPPED_S = 1.0  # between two checks: this process was stopped, and has unread messages


def round_deadline(times: Sequence[float]) -> float:
    """Return the seconds after which a contribution is late, from the times of the last contribution in recent rounds."""
    if len(times) < MIN_ROUNDS:
        return math.inf
    median = statistics.median(times)
    spread = statistics.median(abs(t - median) for t in times)
    return median + max(NUM_MAD * spread, MIN_SHARE * median, VIEW_CHANGE_S)


def needed(members: int, *, quorum: float) -> int:
    """Return the number of members that are a quorum: more than this share, at most all."""
    return min(members, math.floor(quorum * members) + 1)


@dataclass(slots=True)
class _Absence:
    epoch: int  # of its WELCOME
    step: int  # of the round that it was late for
    back: bool = False  # it has answered, and may be a member again
    rounds: dict[int, int] = field(default_factory=dict)  # whose work is in its error buffer, and samples of each


class LateMembers:
    def __init__(
        self,
        context: ServerContext,
        followers: Followers,
        *,
        quorum: float,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`quorum`: share of the members; 1: wait for all, and keep nothing of those that are silent."""
        self._context, self._followers, self._quorum, self._warn, self._clock = context, followers, quorum, warn, clock
        self._roster = context.roster
        self._away: dict[Member, _Absence] = {}
        self._times: deque[float] = deque(maxlen=MAX_ROUNDS)
        self._began = self._checked = -math.inf
        self._contributed: dict[str, float] = {}  # to the current round: instance, and when
        self._warned: tuple[int, int] | None = None  # the round and the number of contributions, of the last warning
        self._known: set[int] = set()  # ranks that have been late

    # The clock of a round

    def formed(self, late: Mapping[Member, Sequence[Range]], rounds: Sequence[int]) -> None:
        """Add the samples of members that were late to the first round of a view."""
        for member, ranges in late.items():
            self._context.leases.prepend(member.instance, rounds[0], ranges)
        if self._began == -math.inf:  # else a round that is combined again has begun before
            self._began = self._clock()

    def contributed(self, member: Member) -> None:
        self._contributed.setdefault(member.instance, self._clock())

    def committed(self) -> None:
        """Record the time of a committed round, and begin the next."""
        members = {member.instance for member in self._roster.members.values()}
        times = [when for instance, when in self._contributed.items() if instance in members]
        if times:
            self._times.append(max(times) - self._began)
        self._contributed.clear()
        self._began = self._clock()

    def suspend_late(self, rounds: Sequence[int]) -> None:
        """Take late members out of the view, if the deadline of the first round has passed and a quorum has contributed."""
        now = self._clock()
        passed_s, self._checked = now - self._checked, now
        if STOPPED_S < passed_s < math.inf:
            self._began += passed_s
        deadline_s = round_deadline(self._times)
        if self._quorum >= 1 or not rounds or now - self._began <= deadline_s:
            return
        step = rounds[0]
        members = self._roster.in_order()
        late = [member for member in members if member.instance not in self._contributed]
        done, count = len(members) - len(late), len(members) + len(self._away)
        if not late:
            return
        if done < needed(count, quorum=self._quorum):
            self._warn_of_missing(step, late, done=done, count=count, after_s=now - self._began)
            return
        for member in late:
            text = f"{member.name} is late for the round that ends with step {step}"
            reason = f"no contribution after {now - self._began:.1f} s, deadline {deadline_s:.1f} s"
            (log.info if member.rank in self._known else self._warn)(
                f"{text}: {reason}; the others continue, and its work counts in a later round"
            )
            self._known.add(member.rank)
            self._roster.step_aside(member, f"late: {reason}")

    def _warn_of_missing(self, step: int, late: Sequence[Member], *, done: int, count: int, after_s: float) -> None:
        if self._warned == (step, done):
            return
        self._warned = step, done
        names = ", ".join(member.name for member in late)
        self._warn(
            f"the round that ends with step {step} waits for {names}: {done} of {count} members have contributed after "
            f"{after_s:.1f} s, and a quorum is {needed(count, quorum=self._quorum)} (strategy.quorum {self._quorum:g})"
        )

    # Members outside the view

    def keep(self, member: Member, rounds: Sequence[int], *, committed: int) -> bool:
        """Keep the leases of a member that has left the view with its link open, and the results that it needs to return.

        Return False for others.
        """
        if self._quorum >= 1 or member not in (*self._roster.newcomers, *self._roster.paused):
            return False
        epoch = self._roster.epoch
        self._contributed.pop(member.instance, None)
        self._away[member] = _Absence(epoch, rounds[0] if rounds else committed)
        self._context.leases.park(member.instance)
        self._followers.keep_for(member, committed=committed)
        member.link.send(Message(kind=Kind.WELCOME, step=committed, epoch=epoch, meta={"late": True}))
        return True

    def poll(self, *, committed: int, alone: bool) -> None:
        """Handle the answers of members that are back; release the leases of those that are lost.

        `alone`: no member has the state. Else one that is back waits until the others have committed the round that it was late
        for, which they are combining again.
        """
        connected = {*self._roster.newcomers, *self._roster.paused} if self._away else set()
        for member in [member for member in self._away if member not in connected]:
            del self._away[member]
            self._context.leases.reclaim(member.instance, {})
        for member, absence in self._away.items():
            answer = member.last_waiting
            if absence.back or answer is None or answer.epoch != absence.epoch:
                continue
            absence.rounds = _rounds_of(answer.meta.get("late", []))
            if alone or committed >= absence.step:
                absence.back = True
                self._followers.answered(member)

    def is_away(self, member: Member) -> bool:
        """Return whether the member must stay out of the view for now."""
        return member in self._away and not self._away[member].back

    def enter(self, newcomers: Collection[Member]) -> dict[Member, list[Range]]:
        """Return those whose work counts in this view, with its samples; release the leases of rounds not computed."""
        entered = {}
        for member in [member for member in self._away if member in newcomers]:
            if ranges := self._context.leases.reclaim(member.instance, self._away.pop(member).rounds):
                entered[member] = ranges
        return entered


def _rounds_of(reported: Any) -> dict[int, int]:
    """Parse the rounds and samples that a member reported; drop invalid entries."""
    pairs = (
        [pair for pair in reported if isinstance(pair, list) and len(pair) == 2] if isinstance(reported, list) else []
    )
    return {step: samples for step, samples in pairs if type(step) is int and type(samples) is int and samples > 0}
