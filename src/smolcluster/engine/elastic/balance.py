"""Divide work so that machines of different speed finish at the same time: the samples of a batch, or the steps of a round."""

from __future__ import annotations

from collections.abc import Sequence

SMOOTHING = 0.3  # weight of the newest step
EQUAL_WITHIN = 1.25  # step times within this factor of the median count as equal: measurements vary
MAX_FACTOR = (
    16  # times the steps of the median machine; with 30 that is 480, about the longest rounds of the DiLoCo paper
)


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


def steps_in_time(steps: int, *, median_s: float, own_s: float) -> int:
    """Return the steps that a machine takes while the median one takes `steps`; `own_s`, `median_s`: seconds per step."""
    if steps == 1 or max(own_s, median_s) <= EQUAL_WITHIN * min(own_s, median_s):
        return steps
    return max(1, min(MAX_FACTOR * steps, round(steps * median_s / own_s)))


def smoothed(before: float, now: float, *, steps: int = 1) -> float:
    """Update a running mean by a measurement over `steps` steps; 0 means no measurement yet."""
    kept = (1 - SMOOTHING) ** steps
    return now if before == 0 else kept * before + (1 - kept) * now
