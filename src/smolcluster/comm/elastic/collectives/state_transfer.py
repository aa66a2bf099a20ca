"""Transfer of weights and optimizer state from one member to another.

First the list of tensors (name, dtype and shape of each, their count, the sender's meta), split into pages of one message,
then the tensors in that order, in slices, so that chunks of collectives can go in between. Both sides slice alike, so a slice
carries only the index of its tensor.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from smolcluster.comm.elastic.collectives.operations import Destination
from smolcluster.comm.elastic.membership.received_state import is_shape, slices
from smolcluster.comm.elastic.transport.api import Head, Kind, Message
from smolcluster.comm.elastic.transport.payloads import DTYPES
from smolcluster.comm.group import PeerLost
from smolcluster.comm.view import ViewMember

StateLayout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

PAGE_TENSORS = 1000  # fits the meta of a message, with names of hundreds of characters
MAX_TENSORS = 1 << 17


def state_messages(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> list[Message]:
    rows = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    listed = [[name, str(row.dtype).removeprefix("torch."), list(row.shape)] for name, row in rows.items()]
    first = {"tensors": listed[:PAGE_TENSORS], "count": len(listed), "meta": dict(meta)}
    further = [listed[start : start + PAGE_TENSORS] for start in range(PAGE_TENSORS, len(listed), PAGE_TENSORS)]
    return [
        Message(kind=Kind.STATE, meta=first),
        *(Message(kind=Kind.STATE, meta={"tensors": page}) for page in further),
        *(Message(kind=Kind.STATE, channel=number, payload=part) for number, part in slices(rows.values())),
    ]


class Transfer:
    """A state that is being sent to a member."""

    def __init__(self, member: ViewMember, num_messages: int, *, timeout_s: float) -> None:
        self._member, self._unsent, self._timeout_s = member, num_messages, timeout_s
        self._over = threading.Event()
        self._broken = False
        self._moved = time.monotonic()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        """Wait until all of it was sent. The member itself reports that it has received it."""
        while not self._over.is_set():
            left_s = self._moved + self._timeout_s - time.monotonic()
            if left_s <= 0:
                raise PeerLost(f"{self._member.name} takes no state: nothing was sent for {self._timeout_s:g} s")
            self._over.wait(min(left_s, 3600.0))
        if self._broken:
            raise PeerLost(f"{self._member.name} was lost while its state was being sent")

    def left(self) -> None:
        """Count a message that was sent."""
        self._moved = time.monotonic()
        self._unsent -= 1
        if self._unsent == 0:
            self._over.set()

    def lost(self) -> None:
        self._broken = True
        self._over.set()


class IncomingState:
    """A state that is being received. Raises ValueError if it is invalid or differs from the `expected` layout."""

    def __init__(self, first_page: Mapping[str, Any], *, expected: StateLayout | None, limit_bytes: int) -> None:
        """Without an `expected` layout, any state of at most `limit_bytes` is accepted."""
        meta, listed = first_page.get("meta"), first_page.get("tensors")
        count = first_page.get("count", len(listed) if isinstance(listed, list) else 0)
        if not isinstance(meta, dict) or type(count) is not int or not 0 <= count <= MAX_TENSORS:
            raise ValueError("a state must begin with the list of its tensors")
        self.meta: dict[str, Any] = meta
        self.tensors: dict[str, Tensor] = {}
        self._layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._count, self._expected, self._limit_bytes = count, expected, limit_bytes
        self._nbytes, self._listed = 0, False
        self._due: deque[tuple[int, Tensor]] = deque()
        self.add(first_page)

    @property
    def complete(self) -> bool:
        return self._listed and not self._due

    def add(self, page: Mapping[str, Any]) -> None:
        """Read a page of the list. Memory is allocated when the whole list is valid."""
        if self._listed:
            raise ValueError("a state began before the last one was complete")
        layout = _read_layout(page.get("tensors"), known=self._layout)
        # Zero dimensions must not hide huge ones.
        self._nbytes += sum(math.prod(size or 1 for size in shape) * dtype.itemsize for dtype, shape in layout.values())
        if self._expected is None and self._nbytes > self._limit_bytes:
            raise ValueError(f"{self._nbytes} bytes of unexpected state, the limit is {self._limit_bytes}")
        self._layout |= layout
        self._listed = len(self._layout) == self._count
        if len(self._layout) > self._count or not (layout or self._listed):
            raise ValueError(f"the pages do not list {self._count} tensors")
        if self._expected is not None:
            _compare(self._layout if self._listed else layout, self._expected, whole=self._listed)
        if self._listed:
            self.tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in self._layout.items()}
            self._due.extend(slices(self.tensors.values()))

    def place(self, head: Head) -> Destination | None:
        """Return where to receive the next slice; None if this is not it."""
        if not self._due:
            return None
        number, part = self._due[0]
        if (head.channel, DTYPES[head.dtype], head.shape) != (number, part.dtype, tuple(part.shape)):
            return None
        return Destination(part, self._arrived)

    def _arrived(self) -> None:
        self._due.popleft()


def _read_layout(listed: Any, *, known: StateLayout) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Parse a page of names, dtypes and shapes. `known`: the pages before."""
    if not isinstance(listed, list):
        raise ValueError("a state must begin with the list of its tensors")
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for entry in listed:
        if not isinstance(entry, list) or len(entry) != 3:
            raise ValueError("each tensor of a state needs a name, a dtype and a shape")
        name, dtype, shape = entry
        known_type = isinstance(dtype, str) and dtype in DTYPES
        if not isinstance(name, str) or name in layout or name in known or not known_type:
            raise ValueError(f"invalid or repeated tensor {str(name)[:80]!r} of dtype {str(dtype)[:20]!r}")
        if not is_shape(shape):
            raise ValueError(f"tensor {name[:80]!r} has an invalid shape")
        layout[name] = (DTYPES[dtype], tuple(shape))
    return layout


def _compare(layout: StateLayout, expected: StateLayout, *, whole: bool) -> None:
    """Raise ValueError if the layouts differ. `whole`: all pages have arrived; otherwise compare only this one."""
    names = [name for name in {**(expected if whole else {}), **layout} if layout.get(name) != expected.get(name)]
    if names:
        raise ValueError(f"{len(names)} tensors differ from the expected layout, among them {names[0]!r}")
