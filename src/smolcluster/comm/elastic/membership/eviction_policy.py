"""Decide which members to evict when some report that they cannot reach others.

A suspicion `(reporter, suspect)` says that the link between two members is broken. Members of a view exchange chunks with each
other, so no link between two remaining members may be broken: the evicted members must be a vertex cover of the graph of
suspicions. The smallest one is evicted:

    one member is cut off from all others     that member, whatever its rank
    a network partition                       the smaller part
    one member suspects all others            that member
    two members suspect each other            the one with more recent evictions, else the higher rank

Two rules limit the effect of suspicions:

    never a majority       at most half of the members are evicted at once; more suspicions follow if that was not enough
    a second reporter      a member that suspects no other is evicted only if two others suspect it, where there are two

Members that are silent towards the coordinator too are evicted first. If more than half are silent, the coordinator itself is
cut off and evicts none.

The search is exact up to `EXACT` members with suspicions, and greedy (most suspicions first) beyond.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping

EXACT = 12  # members with suspicions: 4096 subsets
FORGET_S = 300.0  # without an eviction; then one earlier eviction is forgotten

Suspicion = tuple[int, int]  # reporter, suspect


def select_evictions(
    members: Collection[int],
    suspicions: Collection[Suspicion],
    *,
    silent: Collection[int] = (),
    recent: Mapping[int, int] | None = None,
) -> set[int]:
    """Return the ranks to evict. `recent`: recent evictions by rank, which break ties."""
    present = set(members)
    known = {(a, b) for a, b in suspicions if a != b and a in present and b in present}
    quiet = set(silent) & present
    if 2 * len(quiet) > len(present):
        return set()
    out = quiet & {rank for suspicion in known for rank in suspicion}
    left = {suspicion for suspicion in known if out.isdisjoint(suspicion)}
    return out | _cover(left, num_members=len(present), limit=len(present) // 2 - len(out), recent=recent or {})


def is_lone(members: Collection[int], suspicions: Collection[Suspicion]) -> bool:
    """Return whether there is only one suspicion, and a third member that could confirm it."""
    return len(members) > 2 and len(set(suspicions)) == 1


def _cover(suspicions: set[Suspicion], *, num_members: int, limit: int, recent: Mapping[int, int]) -> set[int]:
    """Return the smallest vertex cover of the suspicions, or a part of it if it has more than `limit` members."""
    reporters: dict[int, set[int]] = {}
    for reporter, suspect in suspicions:
        reporters.setdefault(suspect, set()).add(reporter)
    reporting = {reporter for reporter, _ in suspicions}

    def evictable(rank: int) -> bool:
        return rank in reporting or len(reporters[rank]) > 1 or num_members < 3

    edges = {frozenset(rank for rank in suspicion if evictable(rank)) for suspicion in suspicions}

    def priority(rank: int) -> tuple[int, int, int]:
        return len(reporters.get(rank, ())), recent.get(rank, 0), rank

    ranks = sorted({rank for edge in edges for rank in edge})
    if len(ranks) <= EXACT:
        for size in range(limit + 1):
            covers = [
                chosen
                for chosen in itertools.combinations(ranks, size)
                if all(not edge.isdisjoint(chosen) for edge in edges)
            ]
            if covers:
                return set(
                    max(covers, key=lambda chosen: [sum(column) for column in zip(*map(priority, chosen), strict=True)])
                )
    return _greedy(edges, limit=limit, priority=priority)


def _greedy(edges: set[frozenset[int]], *, limit: int, priority: Callable[[int], tuple[int, int, int]]) -> set[int]:
    """Repeatedly take the member with the most uncovered suspicions."""
    chosen: set[int] = set()
    while edges and len(chosen) < limit:
        ranks = {rank for edge in edges for rank in edge}
        worst = max(ranks, key=lambda rank: (sum(rank in edge for edge in edges), priority(rank)))
        chosen.add(worst)
        edges = {edge for edge in edges if worst not in edge}
    return chosen


class EvictionCounts:
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
