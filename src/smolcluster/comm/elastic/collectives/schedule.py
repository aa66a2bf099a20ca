"""Plans of collectives: data made by pure functions. `operations.py` runs them.

A plan is what one rank does. It has a `Chain` for each span of the tensor: the acts of this rank on that span, in order. Chains
are independent of each other, and so are the pieces into which a span is cut: a piece is forwarded as soon as it was added,
while the next one is being received.

    ring        n = 4, the acts of rank 1 on each quarter of the tensor (< receive, > send, + add)
      quarter 0     > 2 to be added                                  < 0 copied    > 2
      quarter 1     < 0 +                                                          > 2
      quarter 2     < 0 +    > 2 to be added                         < 0 copied
      quarter 3     < 0 +    > 2 to be added                         < 0 copied    > 2

Quarter q starts at rank q + 1, is complete at rank q and goes round once more. Every rank sends and receives 2 (n-1)/n of the
tensor, which is optimal, in 2 (n-1) hops. The tree moves more bytes in fewer hops and messages: for small tensors.

Each span is summed along one path and then copied, so the result is bit-identical on every rank and in every run.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

# The cost model: latency of a hop between two processes, handling of a message, and a bandwidth of 300 Mbit/s. That lies
# between slow home networks, where a tree's extra bytes cost most, and fast ones, where a ring's extra hops do.
HOP_S = 250e-6
MESSAGE_S = 50e-6
LINE_S_PER_BYTE = 8 / 300e6

# Pieces: small enough to pipeline a span, large enough that handling one costs little compared with sending it.
PIECES_PER_SPAN = 4
MIN_PIECE_BYTES = 128 << 10
MAX_PIECE_BYTES = 512 << 10


class Verb(enum.Enum):
    ADD = "add"  # receive and add
    COPY = "copy"  # receive and overwrite
    SEND_PART = "send part"  # the peer adds it
    SEND = "send"  # the peer copies it

    @property
    def receives(self) -> bool:
        return self in (Verb.ADD, Verb.COPY)


@dataclass(frozen=True, slots=True)
class Act:
    verb: Verb
    peer: int


@dataclass(frozen=True, slots=True)
class Chain:
    """The acts of one rank on elements `start .. stop-1`, in order."""

    start: int
    stop: int
    acts: tuple[Act, ...]


Plan = tuple[Chain, ...]


# Sums


def ring_plan(n: int, rank: int, elements: int) -> Plan:
    """All-reduce: reduce-scatter, then all-gather, on the same ring."""
    return tuple(
        Chain(start, stop, _reduce_to(n, rank, span) + _gather_from(n, rank, span))
        for span, start, stop in spans(elements, n)
    )


def tree_plan(n: int, rank: int, elements: int) -> Plan:
    """All-reduce: up a binomial tree to rank 0 and down again. 2 log2(n) hops of the full tensor."""
    parent, children = _binomial(n, rank)
    up = [Act(Verb.ADD, child) for child in children]
    down = [Act(Verb.SEND, child) for child in reversed(children)]
    if parent is not None:
        up.append(Act(Verb.SEND_PART, parent))
        down.insert(0, Act(Verb.COPY, parent))
    return _whole(elements, (*up, *down))


def reduce_scatter_plan(n: int, rank: int, elements: int) -> Plan:
    """Span r is summed at rank r. `elements` is a multiple of n."""
    return tuple(Chain(start, stop, _reduce_to(n, rank, span)) for span, start, stop in spans(elements, n))


# Copies


def all_gather_plan(n: int, rank: int, elements: int) -> Plan:
    """Span r is copied from rank r to all ranks. `elements` is a multiple of n."""
    return tuple(Chain(start, stop, _gather_from(n, rank, span)) for span, start, stop in spans(elements, n))


def line_broadcast_plan(n: int, rank: int, elements: int, *, source: int) -> Plan:
    """From the source along the ring: every rank sends the tensor at most once."""
    return _whole(elements, _gather_from(n, rank, source))


def tree_broadcast_plan(n: int, rank: int, elements: int, *, source: int) -> Plan:
    """Down a binomial tree whose root is the source."""
    parent, children = _binomial(n, (rank - source) % n)
    acts = [Act(Verb.SEND, (child + source) % n) for child in reversed(children)]
    if parent is not None:
        acts.insert(0, Act(Verb.COPY, (parent + source) % n))
    return _whole(elements, tuple(acts))


def send_plan(elements: int, *, to: int) -> Plan:
    return _whole(elements, (Act(Verb.SEND, to),))


def receive_plan(elements: int, *, source: int) -> Plan:
    return _whole(elements, (Act(Verb.COPY, source),))


# Choice of the algorithm


def choose(n: int, rank: int, elements: int, *, itemsize: int) -> Plan:
    """Return the all-reduce that is faster by the cost model, whose inputs are the same on every rank."""
    nbytes = elements * itemsize
    make = tree_plan if tree_seconds(n, nbytes) < ring_seconds(n, nbytes) else ring_plan
    return make(n, rank, elements)


def choose_broadcast(n: int, rank: int, elements: int, *, itemsize: int, source: int) -> Plan:
    """Like `choose`, for a broadcast."""
    nbytes = elements * itemsize
    piece = min(nbytes, piece_elements(nbytes, itemsize=itemsize) * itemsize)
    line = (n - 1) * (HOP_S + piece * LINE_S_PER_BYTE) + (nbytes - piece) * LINE_S_PER_BYTE
    make = tree_broadcast_plan if tree_seconds(n, nbytes) / 2 < line else line_broadcast_plan
    return make(n, rank, elements, source=source)


def ring_seconds(n: int, nbytes: int) -> float:
    return 2 * (n - 1) * (HOP_S + 2 * MESSAGE_S + nbytes / n * LINE_S_PER_BYTE)


def tree_seconds(n: int, nbytes: int) -> float:
    """Return the root's time; it serves its children one after the other."""
    return 2 * (n - 1).bit_length() * (HOP_S + MESSAGE_S + nbytes * LINE_S_PER_BYTE)


# Pieces


def piece_elements(span_bytes: int, *, itemsize: int) -> int:
    """Return the elements per piece for a span of this size."""
    nbytes = min(max(span_bytes // PIECES_PER_SPAN, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    return max(1, nbytes // itemsize)


def spans(elements: int, n: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and stop of n spans of nearly equal size. Empty spans are left out."""
    for span in range(n):
        start, stop = span * elements // n, (span + 1) * elements // n
        if start < stop:
            yield span, start, stop


def _reduce_to(n: int, rank: int, owner: int) -> tuple[Act, ...]:
    """Reduce a span along the ring, from the rank after its owner to its owner."""
    travelled = (rank - owner - 1) % n
    acts = []
    if travelled > 0:
        acts.append(Act(Verb.ADD, (rank - 1) % n))
    if rank != owner:
        acts.append(Act(Verb.SEND_PART, (rank + 1) % n))
    return tuple(acts)


def _gather_from(n: int, rank: int, owner: int) -> tuple[Act, ...]:
    """Copy a span along the ring, from its owner to the rank before it."""
    travelled = (rank - owner) % n
    acts = []
    if travelled > 0:
        acts.append(Act(Verb.COPY, (rank - 1) % n))
    if travelled < n - 1:
        acts.append(Act(Verb.SEND, (rank + 1) % n))
    return tuple(acts)


def _binomial(n: int, rank: int) -> tuple[int | None, list[int]]:
    """Return parent and children in the binomial tree with root 0, the child with the smallest subtree first."""
    children: list[int] = []
    bit = 1
    while bit < n:
        if rank & bit:
            return rank - bit, children
        if rank + bit < n:
            children.append(rank + bit)
        bit <<= 1
    return None, children


def _whole(elements: int, acts: tuple[Act, ...]) -> Plan:
    return (Chain(0, elements, acts),) if elements else ()
