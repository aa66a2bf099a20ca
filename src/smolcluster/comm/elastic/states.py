"""Weights and optimizer state on their way from one member to another.

First a list of what comes (meta: tensors, a name, type and shape each, and the sender's own words), then the tensors in
that order, in slices: between two of them the pieces of a sum may pass. Both sides cut alike, so all that travels with a
slice is the number of its tensor.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.elastic.group import Landing
from smolcluster.comm.elastic.payloads import DTYPES
from smolcluster.comm.elastic.transport import Head, Kind, Message
from smolcluster.comm.elastic.view import Member
from smolcluster.comm.group import PeerLost

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

SLICE_BYTES = 1 << 20


def state_messages(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> list[Message]:
    rows = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    listed = [[name, str(row.dtype).removeprefix("torch."), list(row.shape)] for name, row in rows.items()]
    return [
        Message(kind=Kind.STATE, meta={"tensors": listed, "meta": dict(meta)}),
        *(Message(kind=Kind.STATE, channel=number, payload=part) for number, part in _slices(rows.values())),
    ]


def _slices(tensors: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The number of each tensor and a part of it, until there is no more. Of an empty one there is nothing."""
    for number, tensor in enumerate(tensors):
        row = tensor.reshape(-1)
        length = SLICE_BYTES // row.itemsize
        for start in range(0, row.numel(), length):
            yield number, row[start : start + length]


class Transfer:
    """A state on its way to a member."""

    def __init__(self, member: Member, num_messages: int, *, timeout_s: float) -> None:
        self._member, self._unsent, self._timeout_s = member, num_messages, timeout_s
        self._over = threading.Event()
        self._broken = False
        self._moved = time.monotonic()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        """Return when all of it has left; the member reports by itself that it has it."""
        while not self._over.is_set():
            left_s = self._moved + self._timeout_s - time.monotonic()
            if left_s <= 0:
                raise PeerLost(f"{self._member.name} takes no state: nothing moved for {self._timeout_s:g} s")
            self._over.wait(min(left_s, 3600.0))
        if self._broken:
            raise PeerLost(f"{self._member.name} was lost while its state was on the way")

    def left(self) -> None:
        """One more of its messages."""
        self._moved = time.monotonic()
        self._unsent -= 1
        if self._unsent == 0:
            self._over.set()

    def lost(self) -> None:
        self._broken = True
        self._over.set()


class IncomingState:
    """A state that comes in, slice after slice. Raises ValueError for one that cannot be, or is not as `expected`."""

    def __init__(self, said: Mapping[str, Any], *, expected: Layout | None, limit_bytes: int) -> None:
        """Without a layout that is expected, any of at most `limit_bytes` will do."""
        words = said.get("meta")
        if not isinstance(words, dict):
            raise ValueError("a state begins with the list of its tensors")
        layout = _read_layout(said.get("tensors"))
        _check_layout(layout, expected=expected, limit_bytes=limit_bytes)
        self.meta: dict[str, Any] = words
        self.tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in layout.items()}
        self._due = deque(_slices(self.tensors.values()))

    @property
    def complete(self) -> bool:
        return not self._due

    def place(self, head: Head) -> Landing | None:
        """They come in the order of the list."""
        if self.complete:
            return None
        number, part = self._due[0]
        if (head.channel, DTYPES[head.dtype], head.shape) != (number, part.dtype, tuple(part.shape)):
            return None
        return Landing(part, self._arrived)

    def _arrived(self) -> None:
        self._due.popleft()


def _read_layout(listed: Any) -> Layout:
    """Names, types and shapes as a peer tells them."""
    if not isinstance(listed, list):
        raise ValueError("a state begins with the list of its tensors")
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for entry in listed:
        if not isinstance(entry, list) or len(entry) != 3:
            raise ValueError("a tensor of a state has a name, a type and a shape")
        name, dtype, shape = entry
        if not isinstance(name, str) or name in layout or not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"a state cannot have {str(name)[:80]!r} of type {str(dtype)[:20]!r}, or not twice")
        if not isinstance(shape, list) or any(type(size) is not int or not 0 <= size < 2**40 for size in shape):
            raise ValueError(f"{name[:80]!r} of a state has no such shape")
        layout[name] = (DTYPES[dtype], tuple(shape))
    return layout


def _check_layout(layout: Layout, *, expected: Layout | None, limit_bytes: int) -> None:
    if expected is None:
        # An empty tensor can be too large too: every size counts, but for none at all.
        nbytes = sum(math.prod(size or 1 for size in shape) * dtype.itemsize for dtype, shape in layout.values())
        if nbytes > limit_bytes:
            raise ValueError(f"{nbytes} bytes of state, and none was expected")
    elif layout != expected:
        names = [name for name in {**expected, **layout} if layout.get(name) != expected.get(name)]
        raise ValueError(f"{len(names)} tensors are not as expected, among them {names[0]!r}")
