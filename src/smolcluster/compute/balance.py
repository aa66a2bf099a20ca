"""How a batch is shared out so that unlike machines finish together."""

from __future__ import annotations

from collections.abc import Sequence

SMOOTHING = 0.3  # weight of the newest measurement


def share_out(total: int, speeds: Sequence[float], *, unit: int = 1) -> list[int]:
    """`total` samples in proportion to speeds (samples per second): whole units, at least one each, nothing left over.

    Largest remainders get what rounding down leaves. `total` is a multiple of `unit` and enough for one unit each.
    """
    units = total // unit
    assert total == units * unit
    assert units >= len(speeds) > 0
    free = units - len(speeds)  # beyond the one that everybody gets
    wanted = [units * speed / sum(speeds) - 1 for speed in speeds]
    room = [max(0.0, w) for w in wanted]
    scale = free / sum(room) if sum(room) else 0.0
    exact = [r * scale for r in room]
    shares = [int(e) for e in exact]
    rest = sorted(range(len(speeds)), key=lambda i: (shares[i] - exact[i], i))
    for i in rest[: free - sum(shares)]:
        shares[i] += 1
    return [(share + 1) * unit for share in shares]


def smoothed(before: float, now: float) -> float:
    """A running mean of a speed; 0 means that none was measured yet."""
    return now if before == 0 else (1 - SMOOTHING) * before + SMOOTHING * now
