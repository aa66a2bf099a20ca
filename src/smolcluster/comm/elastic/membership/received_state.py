"""A state: tensors of weights and optimizer, sent in slices of one message each, so that other messages can go in between.

The message before them announces the number of tensors. Slices are numbered by `channel`; the first one of each tensor has its
name and shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.elastic.transport.messages import Kind, Message

SLICE_BYTES = 1 << 20


def slice_messages(tensors: Mapping[str, Tensor], *, step: int = 0, epoch: int = 0) -> Iterator[Message]:
    """Yield the slices of contiguous CPU tensors."""
    numbers = itertools.count()
    for name, tensor in tensors.items():
        meta: dict[str, Any] = {"name": name, "shape": list(tensor.shape)}
        for part in torch.split(tensor.reshape(-1), SLICE_BYTES // tensor.itemsize):
            yield Message(kind=Kind.STATE, step=step, channel=next(numbers), epoch=epoch, meta=meta, payload=part)
            meta = {}


class ReceivedState:
    """Assembles the tensors of a state. Raises ValueError for an invalid slice."""

    def __init__(self, count: int, *, limit_bytes: int) -> None:
        """`count`: the announced number of tensors. `limit_bytes`: of all tensors and their names."""
        self.tensors: dict[str, Tensor] = {}
        self._count, self._left_bytes, self._number = count, limit_bytes, 0
        self._missing = torch.empty(0)  # of the current tensor

    @property
    def complete(self) -> bool:
        return len(self.tensors) == self._count and not len(self._missing)

    def next(self, number: int, dtype: torch.dtype, shape: Sequence[int], meta: Mapping[str, Any]) -> Tensor:
        """Return where the next slice belongs."""
        if self.complete or number != self._number or len(shape) != 1:
            raise ValueError(f"slice {number} of shape {list(shape)} instead of slice {self._number} of its state")
        is_first = not len(self._missing)
        if is_first:
            self._begin(meta.get("name"), meta.get("shape"), dtype)
        part, self._missing = self._missing[: shape[0]], self._missing[shape[0] :]
        if dtype is not part.dtype or len(part) != shape[0] or not (len(part) or is_first):
            raise ValueError(f"slice {number} does not continue its tensor")
        self._number += 1
        return part

    def _begin(self, name: object, shape: object, dtype: torch.dtype) -> None:
        if not isinstance(name, str) or name in self.tensors:
            raise ValueError(f"a tensor with an invalid or repeated name: {str(name)[:80]!r}")
        if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**40 for size in shape):
            raise ValueError(f"tensor {name[:80]!r} has an invalid shape")
        nbytes = math.prod(size or 1 for size in shape) * dtype.itemsize  # zero dimensions must not hide huge ones
        self._left_bytes -= nbytes + len(name)
        if self._left_bytes < 0:
            raise ValueError(f"tensor {name[:80]!r} of {nbytes} bytes exceeds the limit by {-self._left_bytes}")
        self.tensors[name] = torch.empty(shape, dtype=dtype)
        self._missing = self.tensors[name].view(-1)

    def take(self, message: Message) -> None:
        """Copy a slice that was received elsewhere to its place."""
        part = message.payload
        if message.kind is not Kind.STATE or part is None:
            raise ValueError(f"{message.kind.name} instead of the next slice of its state")
        self.next(message.channel, part.dtype, part.shape, message.meta).copy_(part)
