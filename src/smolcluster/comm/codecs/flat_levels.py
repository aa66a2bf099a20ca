"""int8 and int4 of many tensors together. Format and error bounds: `levels.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from smolcluster.comm.codecs.base import numbers
from smolcluster.comm.codecs.flat import Decoded, FlatEncoding, pieces
from smolcluster.comm.codecs.levels import Int4, Int8


class FlatLevels(FlatEncoding):
    """Tensors begin at block boundaries, and at byte boundaries of two levels: blocks are the rows of one matrix."""

    codec: Int8 | Int4

    def __init__(self, codec: Int8 | Int4, layout: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        if codec.unbiased:
            raise ValueError(f"codec {codec.name} draws numbers for each tensor if it is unbiased")
        self._per_byte = 2 if codec.max_level < 8 else 1
        self.align = math.lcm(codec.block, self._per_byte)
        super().__init__(codec, layout)
        self._num_scales = [-(-count // codec.block) for count in self._counts]
        self._num_bytes = [-(-count // self._per_byte) for count in self._counts]  # of levels
        ends = [*self.offsets[1:], self.length]
        self._extents = [end - offset for offset, end in zip(self.offsets, ends, strict=True)]  # with padding

    def _encode(self, flat: Tensor) -> tuple[Tensor, Iterator[Decoded]]:
        scales = torch.empty(self.length // self.codec.block, device=flat.device)
        levels = torch.empty(self.length // self._per_byte, dtype=torch.uint8, device=flat.device)
        for piece in pieces(flat, multiple=self.align):
            blocks = flat[piece].view(-1, self.codec.block)
            scale = torch.maximum(blocks.amax(dim=1), -blocks.amin(dim=1)).add_(0.0)
            scales[piece.start // self.codec.block : piece.stop // self.codec.block] = scale
            level = (blocks / torch.where(scale > 0, scale, 1.0)[:, None]).mul_(self.codec.max_level).round_().view(-1)
            levels[piece.start // self._per_byte : piece.stop // self._per_byte] = self.codec.pack(level)
        parts = []
        for offset, num_scales, num_bytes in zip(self.offsets, self._num_scales, self._num_bytes, strict=True):
            first, start = offset // self.codec.block, offset // self._per_byte
            parts += [scales[first : first + num_scales].view(torch.uint8), levels[start : start + num_bytes]]
        return torch.cat(parts), self._parts(scales, levels)

    def _decode(self, data: Tensor) -> Iterator[Decoded] | None:
        sizes = [
            size
            for scales, levels in zip(self._num_scales, self._num_bytes, strict=True)
            for size in (4 * scales, levels)
        ]
        parts = torch.split(data, sizes)
        zero = int(self.codec.pack(torch.zeros(self._per_byte))[0])  # the byte of levels that are 0
        scales = self._joined(parts[::2], [4 * (extent // self.codec.block) for extent in self._extents], fill=0)
        scales = numbers(scales, torch.float32)
        levels = self._joined(parts[1::2], [extent // self._per_byte for extent in self._extents], fill=zero)
        low, high = torch.aminmax(scales)
        bad = (low < 0) | ~(high < math.inf) | self._beyond(levels)
        return None if bool(bad) else self._parts(scales, levels)

    def _parts(self, scales: Tensor, levels: Tensor) -> Iterator[Decoded]:
        for piece in pieces(levels, multiple=self.align, per_element=self._per_byte):
            level = self.codec.unpack(levels[piece.start // self._per_byte : piece.stop // self._per_byte])
            blocks = level.float().mul_(1 / self.codec.max_level).view(-1, self.codec.block)
            scale = scales[piece.start // self.codec.block : piece.stop // self.codec.block]
            yield Decoded(blocks.mul_(scale[:, None]).view(-1), piece)

    @staticmethod
    def _joined(parts: Sequence[Tensor], sizes: Sequence[int], *, fill: int) -> Tensor:
        """Join the bytes of all tensors, each filled up to its size."""
        missing = [size - len(part) for part, size in zip(parts, sizes, strict=True)]
        filling = parts[0].new_full((max(missing),), fill)
        padded = [each for part, count in zip(parts, missing, strict=True) for each in (part, filling[:count])]
        return torch.cat(padded)

    def _beyond(self, data: Tensor) -> Tensor:
        """Return whether a level is beyond the highest one: only the lowest number of the type is."""
        lowest = []
        for piece in pieces(data):
            part = data[piece]
            if self._per_byte == 1:
                lowest.append(part.view(torch.int8).amin() == -128)
            else:
                lowest.append(torch.minimum(part & 15, part >> 4).amin() == 0)
        return torch.stack(lowest).any()
