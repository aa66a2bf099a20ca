"""Divide a batch so that machines of different speed finish at the same time."""

from __future__ import annotations

from collections.abc import Sequence

SMOOTHING = 0.3  # weight of the newest measurement


def share_out(total: int, speeds: Sequence[float], fixed_s: Sequence[float] = (), *, unit: int = 1) -> list[int]:
    """Divide `total` samples so that all finish at the same time: in whole units, at least one each.

    A machine needs `fixed_s` for a step, however few samples it has, and computes `speed` samples per second. Largest
    remainders get what rounding down leaves. `total` is a multiple of `unit` and enough for one unit each.
    """
    units = total // unit
    assert total == units * unit
    assert units >= len(speeds) > 0
    fixed_s = fixed_s or [0.0] * len(speeds)
    finish_s = (total + sum(s * f for s, f in zip(speeds, fixed_s, strict=True))) / sum(speeds)  # until all are done
    free = units - len(speeds)  # beyond one each
    room = [max(0.0, s * (finish_s - f) / unit - 1) for s, f in zip(speeds, fixed_s, strict=True)]
    scale = free / sum(room) if sum(room) else 0.0
    exact = [r * scale for r in room]
    shares = [int(e) for e in exact]
    rest = sorted(range(len(speeds)), key=lambda i: (shares[i] - exact[i], i))
    for i in rest[: free - sum(shares)]:
        shares[i] += 1
    return [(share + 1) * unit for share in shares]


def smoothed(before: float, now: float) -> float:
    """Update a running mean; 0 means no measurement yet."""
    return now if before == 0 else (1 - SMOOTHING) * before + SMOOTHING * now
