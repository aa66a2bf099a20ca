"""The server's roster: the members of a run.

    ASK   -> PLAN                      any authenticated peer may request the plan; its link may be measured first
    JOIN  -> validated                 joining, until the strategy welcomes it at a step boundary
    link lost or closed                the member is removed, and its lease returns
    link silent                        the member is paused: as removed, but its link is kept; it joins again when it responds

Every change of the members increments the epoch. The server's thread calls `get`, which returns only messages and losses of
members. A peer that breaks the protocol is refused, counted and logged; others are not affected.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smolcluster.comm.addresses import is_loopback, split_address
from smolcluster.comm.elastic.membership.link_probe import LinkProbe
from smolcluster.comm.elastic.membership.mailbox import Linked, Mailbox, Received, Unlinked
from smolcluster.comm.elastic.transport.api import Link
from smolcluster.comm.elastic.transport.handshake import MAX_REASON, printable
from smolcluster.comm.elastic.transport.messages import Kind, Message

log = logging.getLogger(__name__)

RANK_JOINS = (60, 0.5)  # burst, and per second
ALL_JOINS = (4096, 20.0)
MAX_REPORT = 64  # fields of a report
MAX_TEXT = 200  # characters of a field
POLL_S = 0.1  # between two checks for silent members, where there are many
MAX_NAMES = 1000  # refusals are counted by peer name up to this many names, then together


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    rank: int
    link: Link
    batch_size: int
    automatic: bool = False  # its batch size follows its speed
    address: str = ""  # where it listens for other workers
    returning: bool = False  # it was paused, not lost
    epoch: int = 0  # of its welcome
    step: int = 0  # the last step it had begun when it joined; edp counts its steps from there
    speed: float = 0.0  # samples per second of computing, smoothed; 0: not known yet
    fixed_s: float = 0.0  # seconds of a step without computing, smoothed
    said: Mapping[str, Any] = field(default_factory=dict)  # the meta of its JOIN
    report: dict[str, Any] = field(default_factory=dict)
    last_waiting: Message | None = None  # its last WAITING while it was not a member

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
    member: Member
    message: Message


@dataclass(frozen=True, slots=True)
class MemberGone:
    member: Member
    reason: str


class JoinLimit:
    """Rate limits for joins, per rank and in total (token buckets): each join is logged in the run's history."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[int | None, tuple[float, float]] = {}  # tokens left, and when; None: total

    def admits(self, rank: int) -> bool:
        """Count a join. Returns False if it exceeds a limit."""
        now = self._clock()
        mine, all_together = self._left(rank, RANK_JOINS, now), self._left(None, ALL_JOINS, now)
        if mine < 1 or all_together < 1:
            return False
        if len(self._buckets) > MAX_NAMES:  # full buckets need not be kept
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
    """A JOIN is not acceptable; the reason is sent to the peer."""


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
        """`admit` makes a member from a JOIN or raises JoinRefused. `on_change` receives joined, left, evicted or paused."""
        self.members: dict[int, Member] = {}
        self.newcomers: list[Member] = []
        self._reports: dict[int, dict[str, Any]] = {}  # the last report of each rank that has left properly
        self._joins = JoinLimit()
        self.paused: list[Member] = []
        self.patience_s = 0.0  # least silence before a pause: waiting a step is cheaper than a change of members
        self.epoch = epoch
        self.joined = self.lost = 0
        self.refused: Counter[str] = Counter()  # by peer name
        self.clipped: Counter[str] = Counter()  # contributions, by peer name
        self.plan = plan
        self.probe: LinkProbe | None = None  # measures the links of workers before they get the plan
        self.on_speed: Callable[[float], None] = lambda _: None  # receives the Mbit/s, and may change the plan
        self._mailbox, self._admit = mailbox, admit
        self.expect, self.allow, self.release = mailbox.expect, mailbox.allow, mailbox.release
        self._on_event, self._on_change = on_event, on_change
        self._links: set[Link] = set()
        self._requested: set[Link] = set()  # have requested the plan
        self._measured_late: set[Link] = set()  # were requested to send bytes that are no longer needed
        self._news: deque[MemberGone] = deque()
        self._unchecked, self._checked = 0, time.monotonic()  # events since the last check for silent members; its time

    @property
    def reports(self) -> list[dict[str, Any]]:
        """Return the last reports of members that have left properly."""
        return list(self._reports.values())

    # Receiving

    def get(self, timeout_s: float | None = None) -> MemberMessage | MemberGone | None:
        """Return a member's next message or loss; None after `timeout_s`, or when only joining workers changed."""
        if self._news:
            return self._news.popleft()
        self._pause_silent()
        self._end_probe()
        if self._news:
            return self._news.popleft()
        event = self._mailbox.get(timeout_s)
        match event:
            case Linked(link):
                self._links.add(link)
            case Unlinked(link, reason):
                self._unlinked(link, reason)
            case Received(link, message) if link in self._links:
                if (known := self._received(link, message)) is not None:
                    return known
            case _:
                pass
        # Report losses first: a member that rejoins must not be welcomed before its loss was handled.
        return self._news.popleft() if self._news else None

    def _received(self, link: Link, message: Message) -> MemberMessage | None:
        member = self.members.get(link.peer.rank)
        if member is not None and member.link is not link:
            member = None
        match message.kind:
            case Kind.ASK if link in self._requested:
                self.refuse(link, "sent ASK more than once")
            case Kind.ASK:
                self._requested.add(link)
                self._send_plan(link)
            case Kind.STATE if self.probe is not None and self.probe.took(link, message):
                pass
            case Kind.STATE if link in self._measured_late:
                self._measured_late.discard(link)
            case Kind.JOIN:
                self._join(link, message.meta)
            case Kind.EVENT | Kind.REPORT if member is not None:
                if message.kind is Kind.REPORT:
                    member.report = _scalars(message.meta)
                self._on_event(member, message.meta)
            case _ if member is not None:
                return MemberMessage(member, message)
            case _ if (other := self._outside(link)) is not None:
                if message.kind is Kind.WAITING:
                    other.last_waiting = message  # anything else was sent before it was paused or lost
            case _:
                self.refuse(link, f"{message.kind.name} before it has joined")
        return None

    def _outside(self, link: Link) -> Member | None:
        """Return the joining worker or paused member with this link."""
        return next((other for other in (*self.newcomers, *self.paused) if other.link is link), None)

    def _send_plan(self, link: Link) -> None:
        if self.probe is None:
            link.send(Message(kind=Kind.PLAN, meta=dict(self.plan)))
        else:
            self.probe.begin(link)

    def _end_probe(self) -> None:
        """Send the plan to the workers that wait for it, when enough links are measured."""
        if self.probe is not None and (speed := self.probe.speed) is not None:
            waiting, self._measured_late, self.probe = self.probe.links, self.probe.measuring, None
            self.on_speed(speed)
            for link in waiting:
                self._send_plan(link)

    def _join(self, link: Link, meta: Mapping[str, Any]) -> None:
        peer = link.peer
        if not self._joins.admits(peer.rank):  # it dials again, with backoff
            self._forget(link)
            link.close("this rank joins too often; retry later")
            return
        known = [*self.members.values(), *self.newcomers, *self.paused]
        holder = next((m for m in known if m.rank == peer.rank), None)
        twin = next((m for m in known if m.instance == peer.instance and m.rank != peer.rank), None)
        if twin is not None:  # leases are kept by instance
            self.refuse(link, f"instance {peer.instance} is already used by {twin.name}")
            return
        if holder is not None and holder.instance != peer.instance and holder.link.open:
            self.refuse(link, f"rank {peer.rank} is taken by {holder.name}; give this worker another rank")
            return
        try:
            member = self._admit(link, meta)
        except JoinRefused as error:
            self.refuse(link, str(error))
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
        """Ignore further messages of this link."""
        self._links.discard(link)
        self._requested.discard(link)
        self._measured_late.discard(link)
        if self.probe is not None:
            self.probe.forget(link)

    # Changing the members; the strategy decides when

    def welcome(self, member: Member) -> None:
        """Make a joining worker a member."""
        self.newcomers.remove(member)
        self.epoch += 1
        member.epoch = self.epoch
        self.members[member.rank] = member
        self._mailbox.num_senders = len(self.members)
        self.joined += not member.returning
        self._on_change("joined", member, "reconnected" if member.returning else "")
        log.info("%s %s", member.name, "is back" if member.returning else "joined")
        if not member.returning:
            self._warn_of_loopback()

    def _warn_of_loopback(self) -> None:
        """Warn of members that those on other machines cannot reach."""
        local = {m.name: is_loopback(split_address(m.address)[0]) for m in self.members.values() if m.address}
        if any(local.values()) and not all(local.values()):
            names = ", ".join(sorted(name for name, is_local in local.items() if is_local))
            log.warning(
                "%s joined over a loopback address, where workers on other machines cannot reach it; start it with the "
                "--server address that they use",
                names,
            )

    def renew(self, member: Member) -> None:
        """Give a member a new epoch: messages that it sent before are stale."""
        self.epoch += 1
        member.epoch = self.epoch

    def step_aside(self, member: Member, reason: str) -> None:
        """Make a member a joining worker, with its link. `get` returns the loss."""
        member.returning = True
        self.newcomers.append(member)
        self._drop(member, reason, what="paused")

    def evict(self, member: Member, reason: str) -> None:
        """Remove a member, which may join again. `get` returns the loss."""
        reason = printable(reason, limit=MAX_REASON)  # may quote the member
        self._remove(member, reason, what="evicted")
        member.link.close(reason)

    def _remove(self, member: Member, reason: str, *, what: str = "left") -> None:
        self._forget(member.link)
        if self.members.get(member.rank) is not member:
            self.newcomers = [m for m in self.newcomers if m is not member]
            self._forget_paused(lambda m: m is member, reason)
            return
        if member.report:  # it left properly
            self._reports[member.rank] = member.report
            log.info("%s has left", member.name)
        else:
            self.lost += 1
            log.warning("%s is gone: %s", member.name, reason)
        self._drop(member, reason, what=what)

    def _drop(self, member: Member, reason: str, *, what: str) -> None:
        """Take a member off the list. `get` returns the loss."""
        del self.members[member.rank]
        self._mailbox.num_senders = len(self.members)
        self.epoch += 1
        self._news.append(MemberGone(member, reason))
        self._on_change(what, member, reason)

    # Silent members

    def _pause_silent(self) -> None:
        """Pause silent members, and make those that respond again joining workers.

        If all are silent none is paused: this process may be the one that is cut off. With many members the check runs less
        often than once per message.
        """
        now = time.monotonic()
        self._unchecked += 1
        if self._unchecked <= len(self.members) // 8 and now < self._checked + POLL_S:
            return
        self._unchecked, self._checked = 0, now
        for member in [m for m in self.paused if not m.link.stalled]:
            self.paused.remove(member)
            self.newcomers.append(member)
        silent = [m for m in self.members.values() if m.link.stalled and m.link.silent_s > self.patience_s]
        for member in silent if len(silent) < len(self.members) else ():
            member.returning = True
            self.paused.append(member)
            reason = f"silent for {member.link.silent_s:.1f} s"
            log.warning("%s is paused: %s", member.name, reason)
            self._drop(member, reason, what="paused")

    def _forget_paused(self, is_meant: Callable[[Member], bool], reason: str) -> None:
        for member in filter(is_meant, list(self.paused)):
            self.paused.remove(member)
            self.lost += 1
            log.warning("%s is gone: %s", member.name, reason)
            self._on_change("left", member, reason)

    def refuse(self, link: Link, reason: str) -> None:
        """Send REFUSE and end the link of a peer that breaks the protocol."""
        name, reason = link.peer.name, printable(reason, limit=MAX_REASON)  # may quote the peer
        counted = name if name in self.refused or len(self.refused) < MAX_NAMES else "others"
        self.refused[counted] += 1
        count = self.refused[counted]
        if count <= 10 or count & (count - 1) == 0:  # do not flood the log
            log.warning("refused %s: %s%s", name, reason, f" ({count} times by now)" if count > 10 else "")
        self._forget(link)
        link.send(Message(kind=Kind.REFUSE, meta={"reason": reason}))
        link.close(reason)

    # Sending

    def in_order(self) -> list[Member]:
        return [self.members[rank] for rank in sorted(self.members)]

    def send(self, members: Iterable[Member], message: Message) -> None:
        """Send to each of these. A link that has ended drops the message; `get` returns the loss."""
        for member in members:
            member.link.send(message)

    def wait_for_end(self, *, timeout_s: float) -> None:
        """Wait after STOP until every member has left and reported."""
        deadline = time.monotonic() + timeout_s
        while self.members and (left := deadline - time.monotonic()) > 0:
            self.get(left)


def _scalars(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the numbers and short texts of a report."""
    return {
        key: value
        for key, value in list(meta.items())[:MAX_REPORT]
        if isinstance(value, int | float | None) or (isinstance(value, str) and len(value) <= MAX_TEXT)
    }
