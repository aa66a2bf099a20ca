"""blocktopk: the largest numbers of each block, in a few bits, and the gaps between them.

    for each block of 4096 numbers (64 x 64 tiles of a matrix, runs of a vector or of a narrow matrix):
        keep the k of largest magnitude                                 of a smaller block the same fraction
    codes    <- the bin of each kept number, 2^bits bins of equal width over mean +- 3 standard deviations
    codebook <- the mean of the kept numbers in each bin                of the tensor
    gaps     <- from each kept position to the next one of its block, minus one, Rice-coded

Error feedback sends later what was not kept; `decay` multiplies the residual before each use. The published setting is k = 32
to 128, 2 bits, decay 0.95.

Payload, in this order: the Rice parameter r in one byte; the codebook in bf16; the codes; the low r bits of every gap; for
every gap its other bits in unary, zeros and a one. r is the one that takes the fewest bits. For K kept numbers of B blocks of
n numbers that is

    1 + 2^(bits+1) + ceil(K bits / 8) + ceil(K r / 8) + ceil((K + sum over gaps of gap >> r) / 8)      bytes

and the last sum is at most B (n >> r). `nbytes` is that bound for the best r: 8.0 bits per position at k = 64, where random
positions take 7.5 and their entropy is 7.4. With `bits` 0 the kept numbers are sent in bf16, without a codebook.

Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", 2025. Rice and Plaunt, "Adaptive variable-length
coding for efficient compression of spacecraft television data", 1971.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from smolcluster.comm.codecs import bins
from smolcluster.comm.codecs.base import Codec, CodecError, numbers, store
from smolcluster.errors import UserError

BLOCK, TILE = 4096, 64
MAX_BITS = 8
MAX_RICE = 12  # 4096 numbers have positions of 12 bits
Bits = npt.NDArray[np.uint8]
Whole = npt.NDArray[Any]


@dataclass(frozen=True)
class BlockTopK(Codec):
    name = "blocktopk"
    feedback = True
    bounded = True
    k: int = 64
    bits: int = 2

    def __post_init__(self) -> None:
        for option, value, least, most in (("k", self.k, 1, BLOCK), ("bits", self.bits, 0, MAX_BITS)):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise UserError(
                    f"codec {self.name}: {option} = {value!r} must be a whole number from {least} to {most}"
                )

    def nbytes(self, shape: Sequence[int]) -> int:
        if (blocks := Blocks.of(shape)).count == 0:
            return 0
        total = blocks.count * self.kept(blocks)
        r = min(range(MAX_RICE + 1), key=lambda r: total * r + blocks.count * (blocks.size >> r))
        return self.head_bytes(total) + -(-total * r // 8) + -(-(total + blocks.count * (blocks.size >> r)) // 8)

    def kept(self, blocks: Blocks) -> int:
        """Return how many numbers of each block are sent."""
        return min(blocks.size, math.ceil(self.k * blocks.size / BLOCK))

    def head_bytes(self, total: int) -> int:
        """Return the bytes before the gaps, for this many kept numbers."""
        return 1 + (2 * 2**self.bits + -(-total * self.bits // 8) if self.bits else 2 * total)

    def _encode(self, source: Tensor, out: Tensor, *, key: int, state: dict[str, Tensor]) -> int:
        blocks = Blocks.of(source.shape)
        rows = blocks.cut(source)
        places = rows.abs().topk(self.kept(blocks), dim=1, sorted=False).indices.sort(dim=1).values
        kept = rows.gather(1, places).view(-1)
        gaps = np.diff(places.numpy(), axis=1, prepend=-1).reshape(-1) - 1
        coded, r = rice(gaps, most_bytes=len(out) - self.head_bytes(len(kept)))
        out[0] = r
        end = 1
        if self.bits:
            codes, codebook = quantized(kept, self.bits)
            store(codebook, out[1 : 1 + 2 * len(codebook)], dtype=torch.bfloat16)
            end = 1 + 2 * len(codebook)
            packed = pack(codes.numpy(), self.bits)
            out[end : end + len(packed)] = torch.from_numpy(packed)
            end += len(packed)
        else:
            store(kept, out[1 : 1 + 2 * len(kept)], dtype=torch.bfloat16)
            end = 1 + 2 * len(kept)
        out[end : end + len(coded)] = torch.from_numpy(coded)
        return end + len(coded)

    def _decode(self, data: Tensor, target: Tensor) -> int:
        blocks = Blocks.of(target.shape)
        kept, total = self.kept(blocks), blocks.count * self.kept(blocks)
        if len(data) < self.head_bytes(total):
            raise CodecError(f"it has {len(data)} bytes where there are at least {self.head_bytes(total)}")
        end = self.head_bytes(total)
        if self.bits:
            codebook = numbers(data[1 : 1 + 2 * 2**self.bits], torch.bfloat16).float()
            codes = unpack(data[1 + 2 * 2**self.bits : end].numpy(), self.bits, total)
            values = codebook[torch.from_numpy(codes)]
        else:
            values = numbers(data[1:end], torch.bfloat16).float()
        gaps, used = unrice(data[end:].numpy(), int(data[0]), total, most=blocks.count * blocks.size)
        places = np.cumsum(gaps.reshape(blocks.count, kept) + 1, axis=1) - 1
        if places[:, -1].max() >= blocks.size:
            raise CodecError(f"one of its positions is beyond its block of {blocks.size}")
        rows = torch.zeros(blocks.count, blocks.size)
        rows.scatter_(1, torch.from_numpy(places), values.view(blocks.count, kept))
        target.copy_(blocks.joined(rows))
        return end + used


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a tensor is divided: into tiles if both sides of a matrix have at least one, else into runs; zero-padded."""

    shape: tuple[int, ...]
    tiled: bool
    count: int
    size: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> Blocks:
        numel = math.prod(shape)
        if len(shape) == 2 and min(shape) >= TILE:
            return cls(tuple(shape), True, -(-shape[0] // TILE) * -(-shape[1] // TILE), BLOCK)
        size = min(numel, BLOCK)
        return cls(tuple(shape), False, -(-numel // BLOCK), size)

    @property
    def tiles_across(self) -> int:
        """Return how many tiles are in a row."""
        return -(-self.shape[1] // TILE) if self.tiled else 1

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the blocks as rows."""
        if not self.tiled:
            flat = tensor.reshape(-1)
            missing = self.count * self.size - len(flat)
            return (F.pad(flat, (0, missing)) if missing else flat).view(self.count, self.size)
        rows, columns = self.shape
        missing_tiles = (0, -columns % TILE, 0, -rows % TILE)
        padded = F.pad(tensor, missing_tiles) if any(missing_tiles) else tensor
        return padded.view(-(-rows // TILE), TILE, -1, TILE).transpose(1, 2).reshape(self.count, self.size)

    def joined(self, blocks: Tensor) -> Tensor:
        """Undo `cut`."""
        if not self.tiled:
            return blocks.view(-1)[: math.prod(self.shape)].view(self.shape)
        rows, columns = self.shape
        tiles = blocks.view(-(-rows // TILE), -(-columns // TILE), TILE, TILE).transpose(1, 2)
        return tiles.reshape(-(-rows // TILE) * TILE, -1)[:rows, :columns]


def quantized(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the bin of each number, and the mean of each bin as it is stored."""
    codes, books = bins.quantized(values, bins.Segments([len(values)], values.device), values.abs().amax(0, True), bits)
    return codes, books[0]


def pack(codes: Whole, bits: int) -> Bits:
    """Pack the low bits of each code."""
    spread = codes.astype("<u2")[:, None].view(np.uint8)
    return np.packbits(np.unpackbits(spread, axis=1, bitorder="little")[:, :bits].reshape(-1), bitorder="little")


def unpack(data: Bits, bits: int, count: int) -> Whole:
    """Undo `pack`."""
    if bits == 0:
        return np.zeros(count, dtype=np.int64)
    rows = np.unpackbits(data, count=count * bits, bitorder="little").reshape(count, bits)
    return rows.astype(np.int64) @ (1 << np.arange(bits, dtype=np.int64))


def rice(gaps: Whole, *, most_bytes: int) -> tuple[Bits, int]:
    """Rice-code the gaps in the fewest bytes. Returns the bytes and the parameter."""
    n = len(gaps)
    r = min(range(MAX_RICE + 1), key=lambda r: (-(-n * r // 8) + -(-(n + int((gaps >> r).sum())) // 8), r))
    high = gaps >> r
    unary = np.zeros(len(gaps) + int(high.sum()), dtype=np.uint8)
    unary[np.cumsum(high + 1) - 1] = 1
    coded = np.concatenate([pack(gaps & ((1 << r) - 1), r), np.packbits(unary, bitorder="little")])
    assert len(coded) <= most_bytes, "the bound holds for the best parameter"
    return coded, r


def unrice(data: Bits, r: int, count: int, *, most: int) -> tuple[Whole, int]:
    """Decode `count` gaps. Returns them and the bytes they took. Raises CodecError for invalid bytes."""
    low_bytes = -(-count * r // 8)
    if r > MAX_RICE or len(data) < low_bytes:
        raise CodecError(f"Rice parameter {r} does not fit {len(data)} bytes of positions")
    unary = np.unpackbits(data[low_bytes : low_bytes + -(-(count + (most >> r)) // 8)], bitorder="little")
    ones = np.flatnonzero(unary)[:count]
    if len(ones) < count:
        raise CodecError(f"it has {len(ones)} positions, expected {count}")
    high = np.diff(ones, prepend=-1) - 1
    return (high << r) | unpack(data[:low_bytes], r, count), low_bytes + -(-(int(ones[-1]) + 1) // 8)
