"""How a batch is shared out so that unlike machines finish together."""

from __future__ import annotations

from collections.abc import Sequence

SMOOTHING = 0.3  # weight of the newest measurement


def share_out(total: int, speeds: Sequence[float], fixed_s: Sequence[float] = (), *, unit: int = 1) -> list[int]:
    """`total` samples so that all are done at one time: whole units, at least one each, nothing left over.

    A machine needs `fixed_s` for a step, however few samples it has, and computes `speed` samples per second. Largest
    remainders get what rounding down leaves. `total` is a multiple of `unit` and enough for one unit each.
    """
    units = total // unit
    assert total == units * unit
    assert units >= len(speeds) > 0
    fixed_s = fixed_s or [0.0] * len(speeds)
    together_s = (total + sum(s * f for s, f in zip(speeds, fixed_s, strict=True))) / sum(speeds)  # when all are done
    free = units - len(speeds)  # beyond the one that everybody gets
    room = [max(0.0, s * (together_s - f) / unit - 1) for s, f in zip(speeds, fixed_s, strict=True)]
    scale = free / sum(room) if sum(room) else 0.0
    exact = [r * scale for r in room]
    shares = [int(e) for e in exact]
    rest = sorted(range(len(speeds)), key=lambda i: (shares[i] - exact[i], i))
    for i in rest[: free - sum(shares)]:
        shares[i] += 1
    return [(share + 1) * unit for share in shares]


def smoothed(before: float, now: float) -> float:
    """A running mean; 0 means that nothing was measured yet."""
    return now if before == 0 else (1 - SMOOTHING) * before + SMOOTHING * now
