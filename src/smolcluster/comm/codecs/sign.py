"""sign: one bit per number and one float32 per block of them. For changes of weights, always with error feedback.

    scale = the mean magnitude of the block
    decoded = scale where x >= 0, else -scale

Bytes for n numbers:   ceil(n / 8) + 4 ceil(n / block)

Of all scales the mean magnitude gives the smallest squared error; it never exceeds that of sending nothing.

Payload: the scales, then the bits, 1 for x >= 0, the first in the highest place of a byte.

Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech DNNs",
2014. With feedback at the server too: Tang et al., "DoubleSqueeze", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from smolcluster.comm.codecs.base import Codec, CodecError, numbers, store


@dataclass(frozen=True)
class Sign(Codec):
    name = "sign"
    block: int = 4096

    @property
    def feedback(self) -> bool:
        return True

    def nbytes(self, shape: Sequence[int]) -> int:
        count = math.prod(shape)
        return -(-count // 8) + 4 * self._num_blocks(count)

    def _encode(self, source: Tensor, out: Tensor, *, key: int, state: dict[str, Tensor]) -> None:
        flat = source.view(-1)
        count, blocks = flat.numel(), self._num_blocks(flat.numel())
        # Divided first: the sum of the largest magnitudes would overflow.
        scales = (
            F.pad(flat.abs(), (0, blocks * self.block - count)).view(blocks, self.block).div_(self.block).sum(dim=1)
        )
        if rest := count % self.block:
            scales[-1] *= self.block / rest
        store(scales, out[: 4 * blocks], dtype=torch.float32)
        out[4 * blocks :] = torch.from_numpy(np.packbits((flat >= 0).numpy()))

    def _decode(self, data: Tensor, target: Tensor) -> None:
        flat = target.view(-1)
        count, blocks = flat.numel(), self._num_blocks(flat.numel())
        scales = numbers(data[: 4 * blocks], torch.float32)
        if not bool((scales >= 0).all()):
            raise CodecError("a scale that is negative or NaN: not made by sign")
        bits = np.unpackbits(data[4 * blocks :].numpy(), count=count)
        flat.copy_(torch.from_numpy(bits)).mul_(2).sub_(1)
        flat.mul_(scales.repeat_interleave(self.block)[:count])

    def _num_blocks(self, count: int) -> int:
        return -(-count // self.block)
