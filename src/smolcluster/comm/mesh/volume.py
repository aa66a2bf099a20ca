"""Bytes that one rank sends and receives in a collective, by its backend's algorithm. Pure arithmetic.

For N ranks, S bytes of the full tensor and s bytes of one rank's chunk, sent and received each:

                     ring: nccl, mpi     gloo
    all_reduce       2 (N-1)/N S         the same
    reduce_scatter   (N-1)/N S           2 (N-1)/N S     torch all-reduces and keeps a chunk
    all_gather       (N-1) s             the same
    all_to_all       (N-1)/N S           the same
    broadcast        S once              S to each child of a binomial tree, S from the parent
    scatter, gather  (N-1) s at the root, s at the others

So over gloo `reduce_scatter.py` implements reduce_scatter as an all_to_all and a sum, with half the bytes. Tests compare the
table with the kernel's counters.
"""

from __future__ import annotations

from typing import Literal

Exchange = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "scatter", "gather"]
Moved = tuple[int, int]  # sent, received


def moved(kind: Exchange, full_bytes: int, *, rank: int, size: int, backend: str, root: int = 0) -> Moved:
    """Return bytes sent and received. `full_bytes` is S: the gathered tensor for gathers, else one rank's input."""
    others = (size - 1) * full_bytes // size
    match kind:
        case "all_reduce":
            return 2 * others, 2 * others
        case "reduce_scatter":
            return (2 * others, 2 * others) if backend == "gloo" else (others, others)
        case "all_gather" | "all_to_all":
            return others, others
        case "broadcast":
            copies = num_children((rank - root) % size, size) if backend == "gloo" else int(rank == root)
            return copies * full_bytes, 0 if rank == root else full_bytes
        case "scatter":
            return (others, 0) if rank == root else (0, full_bytes // size)
        case "gather":
            return (0, others) if rank == root else (full_bytes // size, 0)


def num_children(place: int, size: int) -> int:
    """Return the children of a place in a binomial tree: the places at distance 1, 2, 4, ... that it sends to."""
    return sum(1 for bit in range(size.bit_length()) if place < 2**bit and place + 2**bit < size)
