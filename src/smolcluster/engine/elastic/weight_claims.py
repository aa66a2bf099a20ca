"""Check the weights that members claim for their gradients.

Gradients are weighted by the targets that count in their samples (`Task.count`), and each member counts its own. One that
claims too many would outweigh all others. The server has the same data: a claim beyond all it has counted so far is counted
again from the leased samples. That is rare, since few claims are larger than all before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from smolcluster.data.leases import Range

TOLERANCE = 2.0  # with random augmentation, reading the same samples again may give other counts

Count = Callable[[Sequence[Range]], float | None]


class Claims:
    def __init__(self, count: Count) -> None:
        """`count`: returns the number of targets in samples; None: all samples weigh the same."""
        self._count = count
        self._most_per_sample = 0.0

    def rejection_reason(self, ranges: Sequence[Range], claimed: float) -> str | None:
        """Return why a claimed weight is not plausible for these samples; None when it is."""
        samples = sum(part.count for part in ranges)
        if samples == 0:
            return f"it claims that {claimed:g} targets count, and no samples are leased to it" if claimed else None
        if claimed <= self._most_per_sample * samples:
            return None
        counted = self._count(ranges)
        most = max(samples, TOLERANCE * (counted or 0))
        self._most_per_sample = max(self._most_per_sample, most / samples)
        if claimed <= most:
            return None
        return f"it claims that {claimed:g} targets count in {samples} samples, where at most {most:g} can"
