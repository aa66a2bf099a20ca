"""The state that a server sends to a joining worker: tensors in slices, after the WELCOME that announces them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.elastic.transport.messages import Kind, Message

SLICE_BYTES = 1 << 20


def server_messages(tensors: Mapping[str, Tensor], *, step: int, epoch: int) -> Iterator[Message]:
    """Yield the STATE messages that follow a WELCOME: slices, the first one of each tensor with its name and shape."""
    numbers = itertools.count()
    for name, tensor in tensors.items():
        meta: dict[str, Any] = {"name": name, "shape": list(tensor.shape)}
        for part in [part for _, part in slices([tensor])] or [tensor.reshape(-1)]:
            yield Message(kind=Kind.STATE, step=step, channel=next(numbers), epoch=epoch, meta=meta, payload=part)
            meta = {}


class ReceivedState:
    """Assembles the tensors that follow a WELCOME. Raises ValueError for an invalid message."""

    def __init__(self, count: int, *, most_bytes: int) -> None:
        """`most_bytes`: of one tensor."""
        self.tensors: dict[str, Tensor] = {}
        self._count, self._most_bytes, self._number = count, most_bytes, 0
        self._filling: tuple[str, Tensor, int] | None = None  # name, tensor and received elements of the current one

    @property
    def complete(self) -> bool:
        return len(self.tensors) == self._count and self._filling is None

    def take(self, message: Message) -> None:
        part = message.payload
        if message.kind is not Kind.STATE or message.channel != self._number or part is None or part.dim() != 1:
            raise ValueError(f"{message.kind.name} instead of the next slice of its state")
        self._number += 1
        if self._filling is None:
            name, shape = message.meta.get("name"), message.meta.get("shape")
            if not isinstance(name, str) or not is_shape(shape):
                raise ValueError("a tensor without a name and a shape")
            assert isinstance(shape, list)
            nbytes = math.prod(size or 1 for size in shape) * part.itemsize  # zero dimensions must not hide huge ones
            if nbytes > self._most_bytes:
                raise ValueError(f"tensor {name[:80]!r} of {nbytes} bytes, the limit is {self._most_bytes}")
            if part.numel() == math.prod(shape):  # the usual case
                self.tensors[name] = part.view(shape)
                return
            self._filling = name, torch.empty(shape, dtype=part.dtype), 0
        name, tensor, start = self._filling
        end = start + part.numel()
        if part.dtype is not tensor.dtype or not start < end <= tensor.numel():
            raise ValueError(f"an invalid slice of {name[:80]!r}")
        tensor.view(-1)[start:end] = part
        self._filling = (name, tensor, end) if end < tensor.numel() else None
        if self._filling is None:
            self.tensors[name] = tensor


def slices(tensors: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield slices of at most `SLICE_BYTES` with the index of their tensor. Empty tensors have none."""
    for number, tensor in enumerate(tensors):
        row = tensor.reshape(-1)
        length = SLICE_BYTES // row.itemsize
        for start in range(0, row.numel(), length):
            yield number, row[start : start + length]


def is_shape(shape: object) -> bool:
    return isinstance(shape, list) and all(type(size) is int and 0 <= size < 2**40 for size in shape)
