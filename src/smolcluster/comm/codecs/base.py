"""The interface of a codec, and helpers that codecs share.

A codec turns one float32 tensor into bytes and back. The number of bytes (for a `bounded` codec its maximum) follows from the
shape alone, so a receiver checks it before it allocates. Numbers are little-endian and may be unaligned.

Lossy codecs carry only finite numbers: `encode` and `decode` raise CodecError for others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from smolcluster.errors import SmolclusterError, UserError, suggest

# Dtypes for the values that a codec keeps.
VALUES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class CodecError(SmolclusterError):
    """A tensor cannot be encoded, or bytes cannot be decoded."""


class Codec(ABC):
    """Encodes float32 tensors as bytes. Stateless: what a sender keeps between steps is in `state`."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    bounded: ClassVar[bool] = False  # a tensor takes at most `nbytes`; how many follows from its bytes
    limit: ClassVar[float] = torch.finfo(torch.float32).max  # the largest magnitude a lossy codec carries

    @property
    def feedback(self) -> bool:
        """True if the codec is biased: training then needs error feedback."""
        return False

    @abstractmethod
    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of an encoded tensor of this shape."""

    def encode(self, tensor: Tensor, out: Tensor, *, key: int = 0, state: dict[str, Tensor] | None = None) -> int:
        """Encode `tensor`, of any float dtype, into `out`, which has `nbytes` of uint8. Returns the bytes used.

        A pure function of tensor, key and state. `key` is the random seed. `state` is the sender's state of this tensor:
        entries are replaced, tensors in it never modified. Raises CodecError for a value that cannot be encoded; `out` is then
        undefined and `state` unchanged.
        """
        if not tensor.is_floating_point():
            raise ValueError(f"codec {self.name} encodes floating point numbers, not {tensor.dtype}")
        if out.dtype != torch.uint8 or out.shape != (self.nbytes(tensor.shape),) or not out.is_contiguous():
            raise ValueError(
                f"codec {self.name} needs {self.nbytes(tensor.shape)} contiguous bytes for a tensor of shape "
                f"{tuple(tensor.shape)}, not {tuple(out.shape)} of {out.dtype}"
            )
        source = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()
        if source.numel() == 0:
            return 0
        if not self.lossless:
            check_magnitude(source, limit=self.limit, name=self.name)
        used = self._encode(source, out, key=key % 2**64, state={} if state is None else state)
        return len(out) if used is None else used

    def decode(self, data: Tensor, out: Tensor) -> int:
        """Decode the tensor at the start of `data` into `out`, which is float32. Returns the bytes it took.

        Raises CodecError for invalid data: another length, invalid indices, values that are not finite.
        """
        if out.dtype != torch.float32:
            raise ValueError(f"codec {self.name} decodes into float32, not {out.dtype}")
        nbytes = self.nbytes(out.shape)
        if data.dtype != torch.uint8 or data.ndim != 1 or (len(data) != nbytes and not self.bounded):
            raise CodecError(
                f"{tuple(data.shape)} of {data.dtype} is not a {self.name} payload of shape {tuple(out.shape)}, which has "
                f"{nbytes} bytes"
            )
        if out.numel() == 0:
            return 0
        target = out.detach() if out.is_contiguous() else torch.empty(out.shape)
        used = self._decode(data[:nbytes].contiguous(), target)
        if not self.lossless:
            check_magnitude(target, limit=torch.finfo(torch.float32).max, name=self.name)
        if not out.is_contiguous():
            out.detach().copy_(target)
        return nbytes if used is None else used

    @abstractmethod
    def _encode(self, source: Tensor, out: Tensor, *, key: int, state: dict[str, Tensor]) -> int | None:
        """Encode. `source` is float32, contiguous, not empty, and within `limit` unless the codec is lossless.

        Returns the bytes used; None: all of `out`.
        """

    @abstractmethod
    def _decode(self, data: Tensor, target: Tensor) -> int | None:
        """Decode. `data` has the right length, or for a bounded codec more; `target` is contiguous and not empty."""


def check_magnitude(tensor: Tensor, *, limit: float, name: str) -> None:
    """Raise CodecError unless every value is finite and within the limit. One pass over the tensor."""
    low, high = torch.aminmax(tensor)
    largest = float(torch.maximum(-low, high))
    if not math.isfinite(largest):
        raise CodecError(
            f"there is a {'NaN' if math.isnan(largest) else 'infinity'} in it; {name} carries finite numbers"
        )
    if largest > limit:
        raise CodecError(f"there is a number of magnitude {largest:g} in it; {name} carries up to {limit:g}")


def numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as numbers of this dtype; copies them if they are not aligned."""
    size = dtype.itemsize
    aligned = data.storage_offset() % size == 0 and data.data_ptr() % size == 0
    return (data if aligned else data.clone()).view(dtype)


def store(values: Tensor, out: Tensor, *, dtype: torch.dtype) -> None:
    """Write float32 values as numbers of this dtype. Raises CodecError if one of them is or becomes infinite."""
    narrow = values.to(dtype).contiguous()
    check_magnitude(narrow, limit=math.inf, name=str(dtype).removeprefix("torch."))
    out.copy_(narrow.view(-1).view(torch.uint8))


def random_words(key: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return random words of 64 bits. NumPy guarantees raw Philox words on every platform and version."""
    return np.random.Philox(key=key).random_raw(count)


def generator(key: int) -> np.random.Generator:
    """Return a generator for draws that only the sender makes."""
    return np.random.Generator(np.random.Philox(key=key))


def check_values(codec: str, values: str) -> None:
    if values not in VALUES:
        raise UserError(f"codec {codec}: values = {values!r}; {suggest(values, VALUES)}")


def check_count(codec: str, option: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"codec {codec}: {option} = {value!r} must be a whole number of at least 1")
