"""Who takes part in a run, as its server knows it.

    ASK   -> PLAN                      anyone with the token may ask what is trained here
    JOIN  -> checked, then waiting     `newcomers`, until the strategy welcomes them at a step boundary
    link lost or closed                the member is gone, and its lease comes back
    link silent                        the member is paused: as gone, but its link is kept. Heard again, it is a newcomer

Every change raises the epoch. The server's thread calls `get` and receives only what concerns members: messages and losses.
What is not in order is refused, counted and logged with the peer's name, and nobody else is disturbed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smolcluster.comm.elastic.membership.mailbox import Linked, Mailbox, Received, Unlinked
from smolcluster.comm.elastic.transport.api import Link
from smolcluster.comm.elastic.transport.handshake import MAX_REASON, printable
from smolcluster.comm.elastic.transport.messages import Kind, Message

log = logging.getLogger(__name__)

RANK_JOINS = (60, 0.5)  # at once, and per second from then on
ALL_JOINS = (4096, 20.0)
MOST_REPORT = 64  # fields of a report
MOST_TEXT = 200  # of a field
LOOK_S = 0.1  # between two looks for silent members, where they are many
MOST_NAMES = 1000  # peers name themselves: refusals of further ones are counted together


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    rank: int
    link: Link
    batch_size: int
    automatic: bool = False  # its batch size follows its speed
    address: str = ""  # where it listens for other workers
    returning: bool = False  # it was paused, and not lost
    epoch: int = 0  # of its welcome
    step: int = 0  # the last step that it had begun when it joined; edp keeps count of its steps from there
    speed: float = 0.0  # samples per second of computing, smoothed; 0: not known yet
    fixed_s: float = 0.0  # what a step takes it beside computing, smoothed
    said: Mapping[str, Any] = field(default_factory=dict)  # in its JOIN
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.link.peer.name

    @property
    def host(self) -> str:
        return self.link.peer.host

    @property
    def instance(self) -> str:
        return self.link.peer.instance


@dataclass(frozen=True, slots=True)
class MemberMessage:
    """A message from a member."""

    member: Member
    message: Message


@dataclass(frozen=True, slots=True)
class MemberGone:
    member: Member
    reason: str


class JoinLimit:
    """Token buckets: how often one rank may join, and all of them together. Each join is a line of the run's record."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[int | None, tuple[float, float]] = {}  # tokens left, and when; None: of all ranks together

    def admits(self, rank: int) -> bool:
        """Count a join. False: too many in too short a time."""
        now = self._clock()
        mine, all_together = self._left(rank, RANK_JOINS, now), self._left(None, ALL_JOINS, now)
        if mine < 1 or all_together < 1:
            return False
        if len(self._buckets) > MOST_NAMES:  # those that are full again say nothing
            full = [
                key for key in self._buckets if key is not None and self._left(key, RANK_JOINS, now) >= RANK_JOINS[0]
            ]
            for key in full:
                del self._buckets[key]
        self._buckets[rank], self._buckets[None] = (mine - 1, now), (all_together - 1, now)
        return True

    def _left(self, key: int | None, joins: tuple[int, float], now: float) -> float:
        most, per_s = joins
        left, since = self._buckets.get(key, (most, now))
        return min(most, left + (now - since) * per_s)


class JoinRefused(Exception):
    """Why a peer may not join."""


class Roster:
    def __init__(
        self,
        mailbox: Mailbox,
        *,
        plan: Mapping[str, Any],
        admit: Callable[[Link, Mapping[str, Any]], Member],
        on_event: Callable[[Member, Mapping[str, Any]], None],
        on_change: Callable[[str, Member, str], None],
        epoch: int = 0,
    ) -> None:
        """`admit` reads a JOIN and makes the member, or raises Refusal. `on_change` receives joined, left, evicted, paused."""
        self.members: dict[int, Member] = {}
        self.newcomers: list[Member] = []
        self._reports: dict[int, dict[str, Any]] = {}  # of members that have left in good order, the last of each rank
        self._joins = JoinLimit()
        self.paused: list[Member] = []
        self.patience_s = 0.0  # pause a silent member no sooner; to wait for about a step costs less than to go on
        self.epoch = epoch
        self.joined = self.lost = 0
        self.refused: Counter[str] = Counter()  # by peer name
        self._mailbox, self._plan, self._admit = mailbox, plan, admit
        self.expect, self.allow, self.release = mailbox.expect, mailbox.allow, mailbox.release
        self._on_event, self._on_change = on_event, on_change
        self._links: set[Link] = set()
        self._answered: set[Link] = set()  # have asked, and know the plan
        self._news: deque[MemberGone] = deque()
        self._unlooked, self._looked = 0, time.monotonic()  # events since the last look for silent members; its time

    @property
    def reports(self) -> list[dict[str, Any]]:
        """Of members that have left in good order."""
        return list(self._reports.values())

    # Receiving

    def get(self, timeout_s: float | None = None) -> MemberMessage | MemberGone | None:
        """The next thing a member said or did; None after `timeout_s`, or when only newcomers changed."""
        if self._news:
            return self._news.popleft()
        self._pause_silent()
        if self._news:
            return self._news.popleft()
        event = self._mailbox.get(timeout_s)
        match event:
            case Linked(link):
                self._links.add(link)
            case Unlinked(link, reason):
                self._unlinked(link, reason)
            case Received(link, message) if link in self._links:
                if (said := self._received(link, message)) is not None:
                    return said
            case _:
                pass
        # A loss is reported before anything else: a member that joins again is welcomed only after it.
        return self._news.popleft() if self._news else None

    def _received(self, link: Link, message: Message) -> MemberMessage | None:
        member = self.members.get(link.peer.rank)
        if member is not None and member.link is not link:
            member = None
        match message.kind:
            case Kind.ASK if link in self._answered:
                self.refuse(link, "it asks again and again")
            case Kind.ASK:
                self._answered.add(link)
                link.send(Message(kind=Kind.PLAN, meta=dict(self._plan)))
            case Kind.JOIN:
                self._join(link, message.meta)
            case Kind.EVENT | Kind.REPORT if member is not None:
                if message.kind is Kind.REPORT:
                    member.report = _scalars(message.meta)
                self._on_event(member, message.meta)
            case _ if member is not None:
                return MemberMessage(member, message)
            case _ if any(other.link is link for other in (*self.newcomers, *self.paused)):
                pass  # it has come back, and still speaks of where it was before
            case _:
                self.refuse(link, f"{message.kind.name} before it has joined")
        return None

    def _join(self, link: Link, meta: Mapping[str, Any]) -> None:
        peer = link.peer
        if not self._joins.admits(peer.rank):  # it dials again, later each time
            self._forget(link)
            link.close("this rank joins too often")
            return
        known = [*self.members.values(), *self.newcomers, *self.paused]
        holder = next((m for m in known if m.rank == peer.rank), None)
        twin = next((m for m in known if m.instance == peer.instance and m.rank != peer.rank), None)
        if twin is not None:  # leases and holdings are kept by instance
            self.refuse(link, f"it calls itself instance {peer.instance}, as {twin.name} does")
            return
        if holder is not None and holder.instance != peer.instance and holder.link.open:
            self.refuse(link, f"rank {peer.rank} is taken by {holder.name}; give this worker another rank")
            return
        try:
            member = self._admit(link, meta)
        except JoinRefused as why:
            self.refuse(link, str(why))
            return
        if holder is not None:
            holder.link.close("the same rank has joined again")
            self._remove(holder, "joined again")
        self.newcomers.append(member)

    def _unlinked(self, link: Link, reason: str) -> None:
        self._forget(link)
        self.newcomers = [m for m in self.newcomers if m.link is not link]
        self._forget_paused(lambda m: m.link is link, reason)
        member = self.members.get(link.peer.rank)
        if member is not None and member.link is link:
            self._remove(member, reason)

    def _forget(self, link: Link) -> None:
        """What still comes from this link is not listened to."""
        self._links.discard(link)
        self._answered.discard(link)

    # Changing the membership; the strategy decides when

    def welcome(self, member: Member) -> None:
        """A newcomer becomes a member."""
        self.newcomers.remove(member)
        self.epoch += 1
        member.epoch = self.epoch
        self.members[member.rank] = member
        self._mailbox.num_senders = len(self.members)
        self.joined += not member.returning
        self._on_change("joined", member, "heard again" if member.returning else "")
        log.info("%s %s", member.name, "is back" if member.returning else "joined")

    def renew(self, member: Member) -> None:
        """It is welcomed again: what it sent before that does not count."""
        self.epoch += 1
        member.epoch = self.epoch

    def evict(self, member: Member, reason: str) -> None:
        """Put a member out: it must join again to take part. `get` tells that it is gone."""
        reason = printable(reason, limit=MAX_REASON)  # it may quote what the member said
        self._remove(member, reason, what="evicted")
        member.link.close(reason)

    def _remove(self, member: Member, reason: str, *, what: str = "left") -> None:
        self._forget(member.link)
        if self.members.get(member.rank) is not member:
            self.newcomers = [m for m in self.newcomers if m is not member]
            self._forget_paused(lambda m: m is member, reason)
            return
        del self.members[member.rank]
        self._mailbox.num_senders = len(self.members)
        self.epoch += 1
        if member.report:  # it said good-bye
            self._reports[member.rank] = member.report
            log.info("%s has left", member.name)
        else:
            self.lost += 1
            log.warning("%s is gone: %s", member.name, reason)
        self._news.append(MemberGone(member, reason))
        self._on_change(what, member, reason)

    # Members that are silent

    def _pause_silent(self) -> None:
        """Go on without members that are silent, and let those in again that are heard.

        If all are silent nobody could go on, and this process may be the one that is cut off. Where members are many, not all
        of them are looked at for each message of one.
        """
        now = time.monotonic()
        self._unlooked += 1
        if self._unlooked <= len(self.members) // 8 and now < self._looked + LOOK_S:
            return
        self._unlooked, self._looked = 0, now
        for member in [m for m in self.paused if not m.link.stalled]:
            self.paused.remove(member)
            self.newcomers.append(member)
        silent = [m for m in self.members.values() if m.link.stalled and m.link.silent_s > self.patience_s]
        for member in silent if len(silent) < len(self.members) else ():
            del self.members[member.rank]
            member.returning = True
            self.paused.append(member)
            self._mailbox.num_senders = len(self.members)
            self.epoch += 1
            reason = f"silent for {member.link.silent_s:.1f} s"
            log.warning("%s is paused: %s", member.name, reason)
            self._news.append(MemberGone(member, reason))
            self._on_change("paused", member, reason)

    def _forget_paused(self, is_meant: Callable[[Member], bool], reason: str) -> None:
        for member in filter(is_meant, list(self.paused)):
            self.paused.remove(member)
            self.lost += 1
            log.warning("%s is gone: %s", member.name, reason)
            self._on_change("left", member, reason)

    def refuse(self, link: Link, reason: str) -> None:
        """End a link whose peer does what it may not."""
        name, reason = link.peer.name, printable(reason, limit=MAX_REASON)  # it may quote what the peer said
        counted = name if name in self.refused or len(self.refused) < MOST_NAMES else "others"
        self.refused[counted] += 1
        count = self.refused[counted]
        if count <= 10 or count & (count - 1) == 0:  # a peer that is refused without end does not fill the log
            log.warning("refused %s: %s%s", name, reason, f" ({count} times by now)" if count > 10 else "")
        self._forget(link)
        link.send(Message(kind=Kind.REFUSE, meta={"reason": reason}))
        link.close(reason)

    # Sending

    def in_order(self) -> list[Member]:
        return [self.members[rank] for rank in sorted(self.members)]

    def send(self, members: Iterable[Member], message: Message) -> None:
        """To each of these. A link that has just ended drops it: `get` reports the loss."""
        for member in members:
            member.link.send(message)

    def wait_for_end(self, *, timeout_s: float) -> None:
        """After STOP: until every member has left, with its report."""
        deadline = time.monotonic() + timeout_s
        while self.members and (left := deadline - time.monotonic()) > 0:
            self.get(left)


def _scalars(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and short texts of a report."""
    return {
        key: value
        for key, value in list(meta.items())[:MOST_REPORT]
        if isinstance(value, int | float | None) or (isinstance(value, str) and len(value) <= MOST_TEXT)
    }
