"""Derive the traffic of each link from the byte counts of processes: pure functions.

A row of metrics.jsonl counts all bytes of a process. The topology of the strategy gives the links:

    star     a server and its workers: a worker has one link, so its counts are the link's
    ring     all-reduce and similar: a rank sends to the next and receives from the previous
    wheel    on the elastic plane: the ring, and a coordinator in the middle with little traffic
    line     a pipeline: activations forward, gradients backward; links are derived from the first one on
    alone    one process

Numbers are `inferred` if some bytes may have been sent over other links (a broadcast at the start).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from smolcluster.config.strategies import find_record

NetworkShape = Literal["alone", "star", "ring", "wheel", "line"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteCounts:
    """Bytes of one process: total, and current rate."""

    sent: float = 0.0
    received: float = 0.0
    sent_per_s: float = 0.0
    received_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficLink:
    """One direction between two ranks."""

    source: int
    target: int
    bytes: float
    per_s: float
    inferred: bool = False


def shape_of(strategy: str, *, served: bool, num_workers: int) -> NetworkShape:
    """Return the topology of the strategy; a ring if it is not installed on this machine."""
    record = find_record(strategy)
    topology = "ring" if record is None else record.topology
    if served:
        return "star" if topology == "star" or num_workers < 2 else "wheel"
    if num_workers < 2:
        return "alone"
    return "line" if topology == "line" else "ring"


def links_of(
    shape: NetworkShape, counts: Mapping[int, ByteCounts], *, workers: Sequence[int], server: int | None = None
) -> list[TrafficLink]:
    """Return the links between the `workers` that participate now, in order, and the server."""
    match shape:
        case "star" if server is not None:
            return [link for rank in workers for link in _spoke(rank, server, counts.get(rank, ByteCounts()))]
        case "wheel" if server is not None:
            hub = counts.get(server, ByteCounts())
            share = ByteCounts(
                sent=hub.received / max(1, len(workers)),
                received=hub.sent / max(1, len(workers)),
                sent_per_s=hub.received_per_s / max(1, len(workers)),
                received_per_s=hub.sent_per_s / max(1, len(workers)),
            )
            spokes = [link for rank in workers for link in _spoke(rank, server, share, inferred=True)]
            return _ring(workers, counts, less=share) + spokes
        case "ring":
            return _ring(workers, counts, less=ByteCounts())
        case "line":
            return _line(workers, counts)
    return []


def _spoke(rank: int, server: int, count: ByteCounts, *, inferred: bool = False) -> list[TrafficLink]:
    up = TrafficLink(source=rank, target=server, bytes=count.sent, per_s=count.sent_per_s, inferred=inferred)
    down = TrafficLink(source=server, target=rank, bytes=count.received, per_s=count.received_per_s, inferred=inferred)
    return [up, down]


def _ring(workers: Sequence[int], counts: Mapping[int, ByteCounts], *, less: ByteCounts) -> list[TrafficLink]:
    """Return the links of the ring. `less`: the bytes that each worker exchanged outside the ring."""
    if len(workers) < 2:
        return []
    links = []
    for rank, following in zip(workers, [*workers[1:], workers[0]], strict=True):
        count = counts.get(rank, ByteCounts())
        links.append(
            TrafficLink(
                source=rank,
                target=following,
                bytes=max(0.0, count.sent - less.sent),
                per_s=max(0.0, count.sent_per_s - less.sent_per_s),
                inferred=len(workers) > 2 or less.sent > 0,
            )
        )
    return links


def _line(workers: Sequence[int], counts: Mapping[int, ByteCounts]) -> list[TrafficLink]:
    """Return the links of the line: rank 0 has only the first link; rank 1's counts minus these are the second's; and so on."""
    links = []
    up, down, up_s, down_s = 0.0, 0.0, 0.0, 0.0  # of the previous link: towards the first rank, and away from it
    for rank, following in itertools.pairwise(workers):
        count = counts.get(rank, ByteCounts())
        down, up = max(0.0, count.sent - up), max(0.0, count.received - down)
        down_s, up_s = max(0.0, count.sent_per_s - up_s), max(0.0, count.received_per_s - down_s)
        inferred = len(workers) > 2
        links.append(TrafficLink(source=rank, target=following, bytes=down, per_s=down_s, inferred=inferred))
        links.append(TrafficLink(source=following, target=rank, bytes=up, per_s=up_s, inferred=inferred))
    return links
