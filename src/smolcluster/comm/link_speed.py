"""The speed of the network between the ranks of a group, measured in about two seconds or less.

Ranks time all-reduces that grow from 16 KiB to at most 1 MiB, so that a slow link is not kept busy for long. The result is
the rate at which a rank sends in the last of them, in Mbit/s; the slowest link of the ring determines it. Small ones may fit
into a buffer on the path.
"""

from __future__ import annotations

import time

import torch

from smolcluster.comm.group import Group, gather_json

FIRST_BYTES, MAX_BYTES = 16 << 10, 1 << 20
GROWTH = 8  # at most, from one all-reduce to the next: the first may fit into buffers
BUDGET_S = 2.0
TRIES = 4


def next_size(nbytes: int, took_s: float, left_s: float) -> int:
    """Return how many bytes to time next: an estimate of what takes half of the remaining time."""
    return max(FIRST_BYTES, min(MAX_BYTES, GROWTH * nbytes, int(nbytes * left_s / 2 / max(took_s, 1e-6))))


def mbit_per_s(nbytes: float, took_s: float) -> float:
    return nbytes * 8 / 1e6 / max(took_s, 1e-6)


def measure_link(group: Group) -> float:
    """Return the Mbit/s that a rank sends in an all-reduce: the same number on all ranks."""
    nbytes, left_s, speed = FIRST_BYTES, BUDGET_S, 0.0
    for _ in range(TRIES):
        took_s = _time_of(group, nbytes)
        left_s -= took_s
        speed = mbit_per_s(2 * (group.size - 1) / group.size * nbytes, took_s)
        if left_s < BUDGET_S / 2:
            break
        nbytes = next_size(nbytes, took_s, left_s)
    return speed


def _time_of(group: Group, nbytes: int) -> float:
    """Return the seconds of an all-reduce on the slowest rank."""
    tensor = torch.zeros(nbytes // 4, device=group.device)
    group.barrier()
    started = time.perf_counter()
    group.all_reduce(tensor).wait()
    tensor[0].item()  # synchronize a GPU
    return float(max(gather_json(group, time.perf_counter() - started)))
