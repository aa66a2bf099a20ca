"""Which members the coordinator evicts because others cannot reach them, and how long each stays out."""

from __future__ import annotations

import time

from smolcluster.comm.elastic.membership.eviction_policy import EvictionCounts, Suspicion, is_lone, select_evictions
from smolcluster.comm.elastic.membership.roster import Member, Roster
from smolcluster.comm.elastic.transport.messages import Message

SUSPICION_S = 0.5  # after the last suspicion: by then both ends of every broken link have reported it
MOST_SUSPICION_S = 2.0  # after the first suspicion, however many follow
WITNESS_S = 1.0  # after the connect timeout: the other end of a broken link reports it as well
SILENT_S = 1.0  # a member without a message for this long cannot reach the coordinator either
QUARANTINE_S = (0.0, 10.0, 30.0, 60.0)  # before an evicted member may rejoin, by how often it was evicted lately


class Evictions:
    def __init__(self, roster: Roster, *, connect_s: float) -> None:
        self._roster, self._connect_s = roster, connect_s
        self.suspicions: dict[Suspicion, float] = {}  # of the current view, each with its first time
        self._leased: dict[Suspicion, int] = {}  # the last step that was leased when it was reported
        self._counts = EvictionCounts()
        self.quarantined_until: dict[int, float] = {}  # by rank, on the clock of time.monotonic

    def take_suspicion(self, member: Member, message: Message, *, leased: int) -> None:
        """`leased`: the last step that members hold leases of."""
        other = message.meta.get("rank")
        if isinstance(other, int) and other in self._roster.members and other != member.rank:
            self.suspicions.setdefault((member.rank, other), time.monotonic())
            self._leased.setdefault((member.rank, other), leased)

    def committed(self, step: int) -> None:
        """Drop the suspicions from before this step was leased: all members have exchanged its round since."""
        for suspicion in [suspicion for suspicion, leased in self._leased.items() if leased < step]:
            del self.suspicions[suspicion], self._leased[suspicion]

    def clear(self) -> None:
        """Drop all suspicions: there is a new view."""
        self.suspicions.clear()
        self._leased.clear()

    def unreachable(self) -> dict[Member, str]:
        """Return the fewest members to evict so that all others reach each other, with reasons; empty until it is time."""
        now, members = time.monotonic(), self._roster.members
        suspicions = {(a, b): since for (a, b), since in self.suspicions.items() if a in members and b in members}
        if not suspicions:
            return {}
        first, last = min(suspicions.values()), max(suspicions.values())
        wait_s = min(last - first + SUSPICION_S, MOST_SUSPICION_S)
        if is_lone(members, suspicions):
            wait_s = self._connect_s + WITNESS_S
        if now < first + wait_s:
            return {}
        self.clear()
        silent = [rank for rank, member in members.items() if member.link.silent_s > SILENT_S]
        recent = {rank: self._counts.count(rank, now=now) for rank in members}
        evicted = {}
        for rank in sorted(select_evictions(members, suspicions, silent=silent, recent=recent)):
            pairs = sorted({(min(pair), max(pair)) for pair in suspicions if rank in pair})
            named = ", ".join(f"{a} and {b}" for a, b in pairs)
            evicted[members[rank]] = f"workers cannot reach each other: {named}"
        return evicted

    def evict(self, member: Member, reason: str) -> None:
        """Evict a member; it may rejoin after its quarantine."""
        now = time.monotonic()
        times = self._counts.add(member.rank, now=now)
        self.quarantined_until[member.rank] = now + QUARANTINE_S[min(times, len(QUARANTINE_S)) - 1]
        self._roster.evict(member, reason)

    def may_join(self, newcomer: Member) -> bool:
        return time.monotonic() >= self.quarantined_until.get(newcomer.rank, 0.0)
