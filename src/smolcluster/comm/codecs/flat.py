"""Many tensors encoded together, on the device where they are: the same payloads as one tensor at a time (`Packer`).

    encoding = flat_encoding(codec, [("weight", (512, 128)), ("bias", (512,))])       the same at both ends
    flat = encoding.empty(device)                                                     float32, all tensors in one buffer
    torch._foreach_copy_(encoding.views(flat), gradients)
    payload, parts = encoding.encode(flat)                                            uint8, `nbytes`, on that device
    for part in parts:                                                                error feedback, if the codec needs it
        part.add_to(flat, -1.0)

    for part in encoding.decode(payload.to(device)):                                  the receiver
        part.add_to(mean, 0.25)

Each tensor has `nbytes` of its shape in the payload, of which a bounded codec may leave the last ones zero. A GPU gets a few
hundred operations for a whole model, where one tensor at a time takes tens of thousands, and only the payload crosses to the
host. Decoding gives the same numbers on every device; one that finds the payload invalid decodes it again one tensor at a
time, which raises the CodecError that names the tensor and the reason.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from smolcluster.comm.codecs.base import Codec, CodecError, check_magnitude, numbers
from smolcluster.comm.codecs.casts import Cast

# Numbers per operation: on a CPU they fit its cache, elsewhere they bound the scratch memory.
CPU_PIECE, PIECE = 2**18, 2**24


class Decoded(NamedTuple):
    """Some of the decoded numbers; all others of the buffer are 0."""

    values: Tensor
    places: slice | Tensor  # distinct positions in the flat buffer

    def add_to(self, flat: Tensor, share: float) -> None:
        """Add `share` times the values. Multiplied first: a fused operation would round differently on other devices."""
        scaled = self.values * share
        if isinstance(self.places, slice):
            flat[self.places].add_(scaled)
        else:
            flat.scatter_(0, self.places, flat.index_select(0, self.places).add_(scaled))

    @property
    def sent(self) -> Decoded:
        """Return 1 for every number that is not 0."""
        return Decoded((self.values != 0).float(), self.places)


class FlatEncoding(ABC):
    align = 1  # every tensor begins at a multiple of it in the flat buffer

    def __init__(self, codec: Codec, layout: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        self.codec = codec
        self.names = [name for name, _ in layout]
        self.shapes = [torch.Size(shape) for _, shape in layout]
        self.sizes = [codec.nbytes(shape) for shape in self.shapes]  # bytes of each tensor in the payload
        self.nbytes = sum(self.sizes)
        self._counts = [shape.numel() for shape in self.shapes]
        self.padding: list[slice] = []  # between the tensors in the flat buffer
        self.offsets, self.length = self._place()

    def _place(self) -> tuple[list[int], int]:
        """Return where each tensor begins in the flat buffer, and its length."""
        padded = [-(-count // self.align) * self.align for count in self._counts]
        *offsets, length = itertools.accumulate(padded, initial=0)
        for offset, count, size in zip(offsets, self._counts, padded, strict=True):
            if size > count:
                self.padding.append(slice(offset + count, offset + size))
        return offsets, length

    def empty(self, device: torch.device) -> Tensor:
        """Return a flat buffer to copy all tensors into."""
        flat = torch.empty(self.length, device=device)
        if self.padding:
            torch._foreach_zero_([flat[padding] for padding in self.padding])
        return flat

    def zeros(self, device: torch.device) -> Tensor:
        """Return a flat buffer of zeros."""
        return torch.zeros(self.length, device=device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors in a flat buffer."""
        ends = zip(self.offsets, self._counts, self.shapes, strict=True)
        return [flat[offset : offset + count].view(shape) for offset, count, shape in ends]

    def encode(self, flat: Tensor) -> tuple[Tensor, Iterator[Decoded]]:
        """Return the payload, on the same device, and what it decodes to. Raises CodecError for a value that is not finite."""
        if self.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=flat.device), iter(())
        if not self.codec.lossless:
            check_magnitude(flat, limit=self.codec.limit, name=self.codec.name)
        return self._encode(flat)

    def decode(self, data: Tensor) -> Iterator[Decoded]:
        """Decode a payload on its device, in parts. Raises CodecError for an invalid one, before the first part."""
        if data.dtype != torch.uint8 or data.shape != (self.nbytes,):
            raise CodecError(f"{tuple(data.shape)} of {data.dtype} is not a payload of {self.nbytes} bytes")
        if self.nbytes == 0:
            return iter(())
        found = self._decode(data.contiguous())
        return iter([self._one_by_one(data)]) if found is None else found

    def _one_by_one(self, data: Tensor) -> Decoded:
        """Decode each tensor separately."""
        flat, parts = torch.zeros(self.length), torch.split(data.cpu(), self.sizes)
        for name, part, out in zip(self.names, parts, self.views(flat), strict=True):
            try:
                self.codec.decode(part, out)
            except CodecError as error:
                raise CodecError(f"{name}: {error}") from error
        return Decoded(flat.to(data.device), slice(None))

    @abstractmethod
    def _encode(self, flat: Tensor) -> tuple[Tensor, Iterator[Decoded]]:
        """Encode numbers within the codec's limit. The buffer may be changed before the parts are taken."""

    @abstractmethod
    def _decode(self, data: Tensor) -> Iterator[Decoded] | None:
        """Decode contiguous bytes of the right number; None if they may be invalid."""


class FlatCasts(FlatEncoding):
    """fp32, fp16, bf16: the payload is the buffer in another dtype."""

    codec: Cast

    def _encode(self, flat: Tensor) -> tuple[Tensor, Iterator[Decoded]]:
        narrow = flat.to(self.codec.dtype)
        return narrow.view(torch.uint8), self._parts(narrow)

    def _decode(self, data: Tensor) -> Iterator[Decoded] | None:
        narrow = numbers(data, self.codec.dtype)
        if not self.codec.lossless and not bool(torch.stack(torch.aminmax(narrow)).isfinite().all()):
            return None
        return self._parts(narrow)

    def _parts(self, narrow: Tensor) -> Iterator[Decoded]:
        return (Decoded(narrow[piece].float(), piece) for piece in pieces(narrow))


def piece_of(device: torch.device) -> int:
    return CPU_PIECE if device.type == "cpu" else PIECE


def pieces(flat: Tensor, *, multiple: int = 1, per_element: int = 1) -> Iterator[slice]:
    """Cut a buffer into pieces whose lengths are multiples of this number, except the last one.

    `per_element`: how many numbers an element of the buffer has.
    """
    length = len(flat) * per_element
    step = math.ceil(piece_of(flat.device) / multiple) * multiple
    return (slice(start, min(length, start + step)) for start in range(0, length, step))
