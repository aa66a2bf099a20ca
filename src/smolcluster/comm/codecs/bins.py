"""Numbers as bins of equal width around their mean, for the segments of a list: one segment for each tensor.

Sums are of integers, so they depend neither on the order in which a device adds, nor on the other segments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

SUM_BITS = 62  # of a sum
MAX_BITS = 40  # of a number in it


class Segments:
    """Consecutive elements that belong together. None is empty."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.counts = torch.tensor(counts, device=device)
        self._total = sum(counts)
        bits = [min(MAX_BITS, SUM_BITS - count.bit_length()) for count in counts]
        self._bits = torch.tensor(bits, device=device)

    @cached_property
    def starts(self) -> Tensor:
        return self.counts.cumsum(0) - self.counts

    @cached_property
    def of(self) -> Tensor:
        """The segment of each element."""
        return torch.repeat_interleave(self.counts, output_size=self._total)

    def __len__(self) -> int:
        return len(self.counts)

    def spread(self, of_segments: Tensor) -> Tensor:
        """Return for each element the value of its segment; one value for all where there is one segment."""
        return of_segments if len(self) == 1 else of_segments.index_select(0, self.of)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sums of integers. A running sum may wrap around: differences are still right."""
        if len(self) == 1:
            return values.sum(0, keepdim=True)
        through = values.cumsum(0)[self.starts + self.counts - 1]
        return torch.diff(through, dim=0, prepend=torch.zeros_like(through[:1]))

    def scale(self, peaks: Tensor) -> Tensor:
        """Return the power of two that scales numbers up to these to integers, as fine as their sum allows."""
        exponents = (peaks.double().view(torch.int64) >> 52) - 1022  # peak < 2^exponent
        return power_of_two((self._bits - exponents).clamp(max=1000))


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^n in float64, exactly."""
    return ((exponents + 1023) << 52).view(torch.float64)


def quantized(values: Tensor, segments: Segments, peaks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the bin of each number, and for every segment the mean of each bin.

    `peaks`: the largest magnitude of each segment. 2^bits bins of equal width lie over mean +- 3 standard deviations.
    """
    bins = 2**bits
    wide, scale = values.double(), segments.scale(peaks)
    whole = (wide * segments.spread(scale)).round_().long()
    mean = segments.sums(whole).double() / segments.counts / scale
    square_scale = segments.scale(4 * peaks.double().square())  # a number is at most twice the peak from the mean
    apart = wide.sub_(segments.spread(mean))
    squares = segments.sums((apart.square_() * segments.spread(square_scale)).round_().long())
    width = 6 * (squares.double() / segments.counts / square_scale).sqrt().float() / bins
    spread = (width > 0) & (width < math.inf)
    codes = (
        ((values - segments.spread(mean.float())) / segments.spread(torch.where(spread, width, 1.0)) + bins // 2)
        .floor_()
        .clamp_(0, bins - 1)
    )
    codes = torch.where(segments.spread(spread), codes, 0.0).long()
    place = codes if len(segments) == 1 else segments.of * bins + codes
    sums, counts = torch.zeros(2, len(segments) * bins, dtype=torch.int64, device=values.device)
    sums.index_add_(0, place, whole)
    counts.index_add_(0, place, torch.ones_like(whole))
    means = sums.view(-1, bins).double() / counts.view(-1, bins).clamp(min=1) / scale[:, None]
    return codes, means.float()
