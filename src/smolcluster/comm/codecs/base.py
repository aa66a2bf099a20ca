"""The interface of a codec, and what all of them share: the checks, and numbers laid down as bytes.

A codec turns one float32 tensor into bytes and back. How many bytes is known from the shape alone, or for a `bounded` codec how
many at most, so a receiver checks a length before it allocates. Numbers are little-endian and may lie at any offset.

Lossy codecs carry finite numbers only: `encode` refuses the others, and so does `decode`, wherever the bytes came from.
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

# How the numbers that a codec keeps may be stored.
VALUES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class CodecError(SmolclusterError):
    """A tensor that a codec cannot carry, or bytes that no encoder made."""


class Codec(ABC):
    """Encodes float32 tensors as bytes. Has no memory of its own: what a sender keeps between steps is in `state`."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    bounded: ClassVar[bool] = False  # a tensor takes at most `nbytes`, and what it takes follows from its bytes
    limit: ClassVar[float] = torch.finfo(torch.float32).max  # the largest magnitude a lossy codec carries

    @property
    def feedback(self) -> bool:
        """Does training with it need error feedback? Yes where the expected decoded tensor is not the tensor."""
        return False

    @abstractmethod
    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of an encoded tensor of this shape."""

    def encode(self, tensor: Tensor, out: Tensor, *, key: int = 0, state: dict[str, Tensor] | None = None) -> int:
        """Write `tensor`, of any float type, into `out`, which has `nbytes` of uint8. Return how many were used.

        A pure function of tensor, key and state. `key` seeds what is random. `state` is what the sender keeps for this tensor
        from step to step: entries are replaced, tensors in it are never changed. Raises CodecError for a number that it cannot
        carry; `out` is then of no use, and `state` is as it was.
        """
        if not tensor.is_floating_point():
            raise ValueError(f"codec {self.name} encodes floating point numbers, not {tensor.dtype}")
        if out.dtype != torch.uint8 or out.shape != (self.nbytes(tensor.shape),) or not out.is_contiguous():
            raise ValueError(
                f"codec {self.name} writes a tensor of shape {tuple(tensor.shape)} into {self.nbytes(tensor.shape)} bytes in a "
                f"row, not into {tuple(out.shape)} of {out.dtype}"
            )
        source = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()
        if source.numel() == 0:
            return 0
        if not self.lossless:
            check_magnitude(source, limit=self.limit, name=self.name)
        used = self._encode(source, out, key=key % 2**64, state={} if state is None else state)
        return len(out) if used is None else used

    def decode(self, data: Tensor, out: Tensor) -> int:
        """Overwrite `out`, which is float32, with the tensor that `data` begins with. Return how many bytes it took.

        Raises CodecError for data that `encode` cannot have made: of another length, with impossible indices, not finite.
        """
        if out.dtype != torch.float32:
            raise ValueError(f"codec {self.name} decodes into float32, not {out.dtype}")
        nbytes = self.nbytes(out.shape)
        if data.dtype != torch.uint8 or data.ndim != 1 or (len(data) != nbytes and not self.bounded):
            raise CodecError(
                f"{tuple(data.shape)} of {data.dtype} is not a tensor of shape {tuple(out.shape)} as {self.name}: that "
                f"has {nbytes} bytes"
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
        """`source` is float32, contiguous, not empty, and within `limit` unless the codec is lossless.

        Return how many bytes were used; None: all of `out`.
        """

    @abstractmethod
    def _decode(self, data: Tensor, target: Tensor) -> int | None:
        """`data` has the right length, or what may be another's behind it; `target` is contiguous and not empty."""


def check_magnitude(tensor: Tensor, *, limit: float, name: str) -> None:
    """Raise CodecError unless every number is finite and within the limit. One pass over the tensor."""
    low, high = torch.aminmax(tensor)
    largest = float(torch.maximum(-low, high))
    if not math.isfinite(largest):
        raise CodecError(
            f"there is a {'NaN' if math.isnan(largest) else 'infinity'} in it; {name} carries finite numbers"
        )
    if largest > limit:
        raise CodecError(f"there is a number of magnitude {largest:g} in it; {name} carries up to {limit:g}")


def numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers of this type: a view, or a copy where they do not lie on its boundaries."""
    size = dtype.itemsize
    aligned = data.storage_offset() % size == 0 and data.data_ptr() % size == 0
    return (data if aligned else data.clone()).view(dtype)


def store(values: Tensor, out: Tensor, *, dtype: torch.dtype) -> None:
    """Write float32 values as numbers of this type. Raises CodecError where one of them is infinite, or becomes so."""
    narrow = values.to(dtype).contiguous()
    check_magnitude(narrow, limit=math.inf, name=str(dtype).removeprefix("torch."))
    out.copy_(narrow.view(-1).view(torch.uint8))


def random_words(key: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """64 random bits each; NumPy promises that raw Philox words are the same on every platform and version."""
    return np.random.Philox(key=key).random_raw(count)


def generator(key: int) -> np.random.Generator:
    """For what only the sender draws."""
    return np.random.Generator(np.random.Philox(key=key))


def check_choice(codec: str, option: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise UserError(f"codec {codec}: {option} = {value!r}; {suggest(str(value), known)}")


def check_count(codec: str, option: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"codec {codec}: {option} = {value!r} must be a whole number of at least 1")
