"""Decide which members to evict when some report that they cannot reach others.

A complaint `(accuser, accused)` says that the link between two members is broken. Members of a view exchange chunks with each
other, so no link between two remaining members may be broken: the evicted members must be a vertex cover of the graph of
complaints. The verdict is the smallest one:

    one member is cut off from all others     that member, whatever its rank
    a network partition                       the smaller part
    one member complains about all others     that member
    two members complain about each other     the one with more recent evictions, else the higher rank

Two rules limit the effect of complaints:

    never a majority       at most half of the members are evicted at once; more complaints follow if that was not enough
    a second witness       a member that does not complain itself is evicted only if two others accuse it, where there are two

Members that are silent towards the coordinator too are evicted first. If most members are silent, the coordinator itself is
cut off and evicts none.

The search is exact up to `EXACT` members with complaints, and greedy (most complaints first) beyond.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping

EXACT = 12  # members with complaints: 4096 subsets
FORGET_S = 300.0  # every so often without an eviction, one earlier eviction is forgotten

Complaint = tuple[int, int]  # accuser, accused


def verdict(
    members: Collection[int],
    complaints: Collection[Complaint],
    *,
    silent: Collection[int] = (),
    strikes: Mapping[int, int] | None = None,
) -> set[int]:
    """Return the ranks to evict. `strikes`: recent evictions by rank, which break ties."""
    present = set(members)
    known = {(a, b) for a, b in complaints if a != b and a in present and b in present}
    quiet = set(silent) & present
    if 2 * len(quiet) > len(present):
        return set()
    out = quiet & {rank for complaint in known for rank in complaint}
    left = {complaint for complaint in known if out.isdisjoint(complaint)}
    return out | _cover(left, num_members=len(present), most=len(present) // 2 - len(out), strikes=strikes or {})


def is_lone(members: Collection[int], complaints: Collection[Complaint]) -> bool:
    """Return whether there is only one complaint, and a third member that could confirm it."""
    return len(members) > 2 and len(set(complaints)) == 1


def _cover(complaints: set[Complaint], *, num_members: int, most: int, strikes: Mapping[int, int]) -> set[int]:
    """Return the smallest vertex cover of the complaints, or a part of it if it has more than `most` members."""
    accusers: dict[int, set[int]] = {}
    for accuser, accused in complaints:
        accusers.setdefault(accused, set()).add(accuser)
    complaining = {accuser for accuser, _ in complaints}

    def may_go(rank: int) -> bool:
        return rank in complaining or len(accusers[rank]) > 1 or num_members < 3

    edges = {frozenset(rank for rank in complaint if may_go(rank)) for complaint in complaints}

    def guilt(rank: int) -> tuple[int, int, int]:
        return len(accusers.get(rank, ())), strikes.get(rank, 0), rank

    ranks = sorted({rank for edge in edges for rank in edge})
    if len(ranks) <= EXACT:
        for size in range(most + 1):
            covers = [
                chosen
                for chosen in itertools.combinations(ranks, size)
                if all(not edge.isdisjoint(chosen) for edge in edges)
            ]
            if covers:
                return set(
                    max(covers, key=lambda chosen: [sum(column) for column in zip(*map(guilt, chosen), strict=True)])
                )
    return _greedy(edges, most=most, guilt=guilt)


def _greedy(edges: set[frozenset[int]], *, most: int, guilt: Callable[[int], tuple[int, int, int]]) -> set[int]:
    """Repeatedly take the member with most uncovered complaints."""
    chosen: set[int] = set()
    while edges and len(chosen) < most:
        ranks = {rank for edge in edges for rank in edge}
        worst = max(ranks, key=lambda rank: (sum(rank in edge for edge in edges), guilt(rank)))
        chosen.add(worst)
        edges = {edge for edge in edges if worst not in edge}
    return chosen


class Strikes:
    """Recent evictions of each member. Every `FORGET_S` without another one, one is forgotten."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float]] = {}  # rank -> count, time of the last one

    def count(self, rank: int, *, now: float) -> int:
        times, last = self._last.get(rank, (0, now))
        return max(0, times - int((now - last) / FORGET_S))

    def add(self, rank: int, *, now: float) -> int:
        """Count an eviction. Returns the new count."""
        times = self.count(rank, now=now) + 1
        self._last[rank] = (times, now)
        return times
