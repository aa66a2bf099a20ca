"""int8 and int4: a few bits per number and one float32 per block of them.

    scale = the largest magnitude of the block
    level = round(m x / scale), from -m to m                  m = 127 for int8, 7 for int4
    decoded = level / m scale

Bytes for n numbers:   int8  n + 4 ceil(n / block)      int4  ceil(n / 2) + 4 ceil(n / block)

Rounded to nearest, |x - decoded| <= scale / (2 m), and training needs error feedback. With `unbiased`, a level is rounded up
with the probability of its fraction, so that the expected decoded tensor is the tensor and no feedback is needed; then
|x - decoded| < scale / m. Both bounds up to 1 part in 10^4, which is float32's own rounding. Zeros are exact, and so is
every number whose magnitude is its block's largest: a block of equal numbers decodes to itself.

Payload: the scales, then the levels; of int4 two in a byte, the first in its low half, each plus 8.

Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding", 2017. Blocks: Dettmers et al.,
"8-bit optimizers via block-wise quantization", 2022.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from smolcluster.comm.codecs.base import Codec, CodecError, check_count, numbers, random_words, store


@dataclass(frozen=True)
class _Levels(Codec):
    max_level: ClassVar[int]
    block: int
    unbiased: bool = False

    def __post_init__(self) -> None:
        check_count(self.name, "block", self.block)

    @property
    def feedback(self) -> bool:
        return not self.unbiased

    def _encode(self, source: Tensor, out: Tensor, *, key: int, state: dict[str, Tensor]) -> None:
        flat = source.view(-1)
        scales, levels = torch.empty(self._num_blocks(flat.numel())), torch.empty_like(flat)
        for blocks, scale, level in self._cut(flat, scales, levels):
            torch.maximum(blocks.amax(dim=1, keepdim=True), -blocks.amin(dim=1, keepdim=True), out=scale)
            scale.add_(0.0)  # the sign of zero depends on the processor
            # First the ratio, then m times that: m / scale would overflow for the smallest scales.
            torch.div(blocks, torch.where(scale > 0, scale, 1.0), out=level).mul_(self.max_level)
        if self.unbiased:
            levels.add_(_draws(key, flat.numel())).floor_()
        else:
            levels.round_()
        store(scales, out[: scales.nbytes], dtype=torch.float32)
        out[scales.nbytes :].copy_(self.pack(levels))

    def _decode(self, data: Tensor, target: Tensor) -> None:
        size = 4 * self._num_blocks(target.numel())
        scales, levels = numbers(data[:size], torch.float32), self.unpack(data[size:])[: target.numel()]
        if levels.min() < -self.max_level or levels.max() > self.max_level or not bool((scales >= 0).all()):
            raise CodecError(
                f"a level beyond {self.max_level}, or a scale that is negative or NaN: not made by {self.name}"
            )
        flat = target.view(-1)
        # m times the float32 nearest to 1/m is exactly 1: the largest magnitude of a block comes back as it was.
        flat.copy_(levels).mul_(1 / self.max_level)
        for blocks, scale, _ in self._cut(flat, scales, flat):
            blocks.mul_(scale)

    @abstractmethod
    def pack(self, levels: Tensor) -> Tensor:
        """Return the bytes of levels."""

    @abstractmethod
    def unpack(self, data: Tensor) -> Tensor:
        """Return the levels in these bytes, as int8."""

    def _num_blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _cut(self, flat: Tensor, scales: Tensor, levels: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """All complete blocks as the rows of a matrix, each with its scale, and the shorter last block as another."""
        whole, rest = divmod(flat.numel(), self.block)
        end = whole * self.block
        parts = []
        if whole:
            rows = (whole, self.block)
            parts.append((flat[:end].view(rows), scales[:whole].view(-1, 1), levels[:end].view(rows)))
        if rest:
            parts.append((flat[end:].view(1, -1), scales[whole:].view(-1, 1), levels[end:].view(1, -1)))
        return parts


@dataclass(frozen=True)
class Int8(_Levels):
    name = "int8"
    max_level = 127
    block: int = 1024

    def nbytes(self, shape: Sequence[int]) -> int:
        count = math.prod(shape)
        return count + 4 * self._num_blocks(count)

    def pack(self, levels: Tensor) -> Tensor:
        return levels.to(torch.int8).view(torch.uint8)

    def unpack(self, data: Tensor) -> Tensor:
        return data.view(torch.int8)


@dataclass(frozen=True)
class Int4(_Levels):
    name = "int4"
    max_level = 7
    block: int = 256

    def nbytes(self, shape: Sequence[int]) -> int:
        count = math.prod(shape)
        return -(-count // 2) + 4 * self._num_blocks(count)

    def pack(self, levels: Tensor) -> Tensor:
        codes = (levels + 8).to(torch.uint8)
        pairs = (F.pad(codes, (0, 1), value=8) if len(codes) % 2 else codes).view(-1, 2)
        return pairs[:, 0] | (pairs[:, 1] << 4)

    def unpack(self, data: Tensor) -> Tensor:
        return torch.stack([data & 15, data >> 4], dim=1).view(-1).to(torch.int8) - 8


def _draws(key: int, count: int) -> Tensor:
    """Random numbers between 0 and 1, all of them odd multiples of 2^-17.

    Next to a level of up to 127 float32 holds these exactly, so a level that is an integer stays as it is. The chance to round
    up is off by at most 2^-17: less than the rounding of float32.
    """
    words = torch.from_numpy(random_words(key, -(-count // 4)).view(np.int16)[:count])
    return words.float().mul_(2**-16).add_(0.5 + 2**-17)
