"""fp32, fp16, bf16: every number, rounded to a narrower type or not at all.

    fp32    4 bytes per number    exact, NaN and infinity included
    fp16    2 bytes per number    |x - decoded| <= max(2^-11 |x|, 2^-25)     |x| <= 65504
    bf16    2 bytes per number    |x - decoded| <= max(2^-8 |x|, 2^-126)     |x| <= 3.39e38

Rounding is to nearest, ties to even. A number beyond the range is refused, not clipped: clipping changes a gradient's
direction, and the caller can use bf16 or drop the step. Below 2^-126 some processors round to zero.

Mixed precision: Micikevicius et al., "Mixed precision training", 2018; bf16: Kalamkar et al., "A study of BFLOAT16 for deep
learning training", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smolcluster.comm.codecs.base import Codec, numbers


class Cast(Codec):
    dtype: ClassVar[torch.dtype]

    def nbytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def _encode(self, source: Tensor, out: Tensor, *, key: int, state: dict[str, Tensor]) -> None:
        out.copy_(source.to(self.dtype).view(-1).view(torch.uint8))

    def _decode(self, data: Tensor, target: Tensor) -> None:
        target.view(-1).copy_(numbers(data, self.dtype))


@dataclass(frozen=True)
class Fp32(Cast):
    name = "fp32"
    lossless = True
    dtype = torch.float32


@dataclass(frozen=True)
class Fp16(Cast):
    name = "fp16"
    limit = torch.finfo(torch.float16).max
    dtype = torch.float16


@dataclass(frozen=True)
class Bf16(Cast):
    name = "bf16"
    limit = torch.finfo(torch.bfloat16).max
    dtype = torch.bfloat16
