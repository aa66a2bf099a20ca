"""topk and randk: a few of a tensor's numbers, and their positions.

Both keep k = max(1, ceil(fraction n)) of n numbers; the others decode to zero, and error feedback sends them later.

topk keeps those of largest magnitude (among equals, the first):   |x - decoded|^2 <= (1 - k/n) |x|^2.
randk keeps one of each of k stretches as equal as can be, drawn from the key:   E|x - decoded|^2 <= (1 - 1/ceil(n/k)) |x|^2.
    Each number is kept with the same probability as if any k of n were drawn, but drawing takes time k and not n.
    With `unbiased`, a kept number is multiplied by the length of its stretch: the expected decoded tensor is the tensor,
    no feedback is needed, and noise is about (n/k - 1) |x|^2. The receiver draws the same places from the same key.

Both bounds hold for kept numbers stored as fp32. bf16 and fp16 add their rounding, which feedback also corrects later: topk,
which always has it, stores bf16 by default; randk may be unbiased, which rounding would undo, and stores fp32.

Payload of topk: the kept numbers in order of place, then the places. A place is written as its low bytes, and the rest as a
row of bits: for the i-th place with rest h, bit h + i is set (Elias and Fano). With m low bytes that takes
k m + ceil((k + floor((n-1) / 256^m)) / 8) bytes, whatever the places are, and m is chosen for the fewest. At 1 % it is 1.17
bytes per place, where 4-byte indices take 4.
Payload of randk: the key in 8 bytes, then the kept numbers.
When k = n, both are the numbers alone.

Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", 2018. Lin et al., "Deep gradient compression", 2018. Wangni et al.,
"Gradient sparsification for communication-efficient distributed optimization", 2018. Vigna, "Quasi-succinct indices", 2013.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from smolcluster.comm.codecs.base import VALUES, Codec, CodecError, check_values, numbers, random_words, store
from smolcluster.errors import UserError

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Sparse(Codec):
    fraction: float = 0.01
    values: str = "bf16"

    def __post_init__(self) -> None:
        if not isinstance(self.fraction, int | float) or not 0 < self.fraction <= 1:
            raise UserError(f"codec {self.name}: fraction = {self.fraction!r} must be a number above 0 and at most 1")
        check_values(self.name, self.values)

    @property
    def _dtype(self) -> torch.dtype:
        return VALUES[self.values]

    def _num_kept(self, count: int) -> int:
        return min(count, max(1, math.ceil(self.fraction * count)))

    def _put(self, values: Tensor, places: Places, target: Tensor) -> None:
        target.zero_().view(-1)[torch.from_numpy(places)] = values.float()


@dataclass(frozen=True)
class TopK(_Sparse):
    name = "topk"
    feedback = True

    def nbytes(self, shape: Sequence[int]) -> int:
        count = math.prod(shape)
        kept = self._num_kept(count)
        return kept * self._dtype.itemsize + places_nbytes(kept, count)

    def _encode(self, source: Tensor, out: Tensor, *, key: int, state: dict[str, Tensor]) -> None:
        flat = source.view(-1)
        places = largest(flat, self._num_kept(flat.numel()))
        size = len(places) * self._dtype.itemsize
        store(flat[torch.from_numpy(places)], out[:size], dtype=self._dtype)
        out[size:].copy_(torch.from_numpy(pack_places(places, flat.numel())))

    def _decode(self, data: Tensor, target: Tensor) -> None:
        kept = self._num_kept(target.numel())
        size = kept * self._dtype.itemsize
        places = unpack_places(data[size:].numpy(), kept, target.numel())
        self._put(numbers(data[:size], self._dtype), places, target)


@dataclass(frozen=True)
class RandK(_Sparse):
    name = "randk"
    values: str = "fp32"
    unbiased: bool = False

    @property
    def feedback(self) -> bool:
        return not self.unbiased

    def nbytes(self, shape: Sequence[int]) -> int:
        count = math.prod(shape)
        kept = self._num_kept(count)
        return kept * self._dtype.itemsize + (8 if kept < count else 0)

    def _encode(self, source: Tensor, out: Tensor, *, key: int, state: dict[str, Tensor]) -> None:
        flat = source.view(-1)
        places, lengths = draw_places(key, self._num_kept(flat.numel()), flat.numel())
        kept = flat[torch.from_numpy(places)]
        if self.unbiased:
            kept *= torch.from_numpy(lengths)
        size = out.numel() - kept.numel() * self._dtype.itemsize
        out[:size].copy_(torch.frombuffer(bytearray(key.to_bytes(8, "little")), dtype=torch.uint8)[:size])
        store(kept, out[size:], dtype=self._dtype)

    def _decode(self, data: Tensor, target: Tensor) -> None:
        kept = self._num_kept(target.numel())
        size = data.numel() - kept * self._dtype.itemsize
        places, _ = draw_places(int.from_bytes(data[:size].numpy().tobytes(), "little"), kept, target.numel())
        self._put(numbers(data[size:], self._dtype), places, target)


def largest(flat: Tensor, kept: int) -> Places:
    """Return the indices of the `kept` values of largest magnitude, ascending; among equals, the first."""
    magnitudes = flat.abs().numpy()
    threshold = np.partition(magnitudes, len(magnitudes) - kept)[len(magnitudes) - kept]
    places = np.flatnonzero(magnitudes >= threshold)
    surplus = len(places) - kept
    if surplus:
        equal = np.flatnonzero(magnitudes[places] == threshold)
        places = np.delete(places, equal[len(equal) - surplus :])
    return places


def draw_places(key: int, kept: int, count: int) -> tuple[Places, Places]:
    """Draw one index from each of `kept` stretches of nearly equal length. Returns indices and lengths."""
    bounds = np.arange(kept + 1, dtype=np.int64) * count // kept
    lengths = np.diff(bounds)
    return bounds[:-1] + (random_words(key, kept) % lengths.astype(np.uint64)).astype(np.int64), lengths


def places_nbytes(kept: int, count: int) -> int:
    return 0 if kept == count else _cheapest(kept, count)[0]


def pack_places(places: Places, count: int) -> npt.NDArray[np.uint8]:
    """Encode ascending indices below `count`. The size depends only on `len(places)` and `count`."""
    if len(places) == count:
        return np.empty(0, dtype=np.uint8)
    nbytes, low_bytes = _cheapest(len(places), count)
    low = places.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :low_bytes]
    bits = np.zeros((nbytes - low.size) * 8, dtype=np.uint8)
    bits[(places >> 8 * low_bytes) + np.arange(len(places), dtype=np.int64)] = 1
    return np.concatenate([low.ravel(), np.packbits(bits, bitorder="little")])


def unpack_places(data: npt.NDArray[np.uint8], kept: int, count: int) -> Places:
    """Undo `pack_places`. Raises CodecError unless the result is `kept` ascending indices below `count`."""
    if kept == count:
        return np.arange(count, dtype=np.int64)
    _, low_bytes = _cheapest(kept, count)
    split = kept * low_bytes
    ones = np.flatnonzero(np.unpackbits(data[split:], bitorder="little"))
    if len(ones) != kept:
        raise CodecError(f"it has {len(ones)} positions, expected {kept}")
    low = np.zeros((kept, 8), dtype=np.uint8)
    low[:, :low_bytes] = data[:split].reshape(kept, low_bytes)
    places: Places = low.view("<i8").ravel() + ((ones - np.arange(kept, dtype=np.int64)) << 8 * low_bytes)
    if places[-1] >= count or bool((np.diff(places) <= 0).any()):
        raise CodecError(f"its positions are not increasing, or not below {count}")
    return places


def _cheapest(kept: int, count: int) -> tuple[int, int]:
    """Return the smallest size for `kept` of `count` indices, and the number of low bytes per index for it."""
    return min((kept * low + -(-(kept + (count - 1 >> 8 * low)) // 8), low) for low in range(5))
